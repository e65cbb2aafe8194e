"""The command line: `splitc inspect`, `compile`, `run`, `verify`, `simulate` and so on; `options.py` has them all."""

from splitc.cli.entry import main

__all__ = ["main"]
