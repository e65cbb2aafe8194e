"""The errors of running ranks that a user can catch, and how ranks exit.  It imports nothing heavy: they come fast."""

from __future__ import annotations

import signal
from collections.abc import Iterable

# How a rank exits: all is done; another start may go on from a checkpoint; no other start will do better.
DONE, RESTART, STOP = 0, 1, 3

# The signals, with their names, for which a run stops.
SIGNALS = {getattr(signal, name): name for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name)}

# How rank 0's line begins when all ranks have stopped for a signal; the variables that have the user's command, and the
# least number of ranks with which a run may go on.
STOPPED_BY, COMMAND, MIN_WORLD = "stopped by ", "SPLITC_COMMAND", "SPLITC_MIN_WORLD"

MEMORY, SHM = "SPLITC_MEMORY", "/dev/shm"  # names a folder in memory that is no process's; the usual one


class SplitcError(Exception):
    """What splitc raises about the user's model, cluster, plan or launch."""


class LaunchError(SplitcError):
    """The ranks cannot be started, or do not fit what was compiled."""


class RanksApart(LaunchError):
    """The ranks of a start did not find each other; those of another one may."""


class RanksFailed(LaunchError):
    """Ranks were started, and one of them failed; its own error is in the text."""


class BackendError(SplitcError):
    """The backend of this rank, NCCL say, refused an operation or failed in it: no other rank is the cause."""


class NonFiniteError(SplitcError):
    """The loss or a gradient of a step is infinite or not a number."""


class ReplicaError(SplitcError):
    """Ranks that hold the same tensor have other values of it."""


def bullets(title: str, problems: Iterable[str]) -> str:
    """One message that lists all problems, each once."""
    return "\n".join([title, *(f"  - {problem}" for problem in dict.fromkeys(problems))])
