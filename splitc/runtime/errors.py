"""The errors of running ranks that a user can catch.  They import nothing heavy, so that messages come quickly."""

from collections.abc import Iterable


class SplitcError(Exception):
    """What splitc raises about the user's model, cluster, plan or launch."""


class LaunchError(SplitcError):
    """The ranks cannot be started, or do not fit what was compiled."""


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
