"""The errors of running ranks that a user can catch.  They import nothing heavy, so that messages come quickly."""

from collections.abc import Iterable


class SplitcError(Exception):
    """What splitc raises about the user's model, cluster, plan or launch."""


class LaunchError(SplitcError):
    """The ranks cannot be started, or do not fit what was compiled."""


class RanksFailed(LaunchError):
    """Ranks were started, and one of them failed; its own error is in the text."""


class NonFiniteError(SplitcError):
    """The loss or a gradient of a step is infinite or not a number."""


def listed(title: str, lines: Iterable[str]) -> str:
    """A title, and each line below it once."""
    return "\n".join([f"{title}:", *(f"  - {line}" for line in dict.fromkeys(lines))])
