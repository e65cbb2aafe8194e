"""The command line: `splitc inspect`, `compile`, `run`, `verify`, `simulate`, `calibrate`, `clusters`, `demo`."""

from splitc.cli.entry import main

__all__ = ["main"]
