"""The command line: `splitc inspect`, `compile`, `run`, `verify`, `clusters`, `demo`."""

from splitc.cli.entry import main

__all__ = ["main"]
