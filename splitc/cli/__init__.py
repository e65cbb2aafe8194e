"""The command line: `splitc inspect`, `compile`, `run`, `verify`, `calibrate`, `clusters`, `demo`."""

from splitc.cli.entry import main

__all__ = ["main"]
