"""The error of a benchmark that cannot be run or did not come to its end."""

from __future__ import annotations


class BenchmarkError(RuntimeError):
    """Something that the network testbed needs is missing, or a process on it failed.  The text says what to do."""
