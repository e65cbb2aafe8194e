"""The tests, in rooms that mirror the product's."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
