"""The version of splitc, as installed or as in its pyproject."""

__version__ = "0.1.0"
