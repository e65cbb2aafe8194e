"""The errors that splitc raises.

A user can catch the four that are about his input; `InternalError` means a bug of ours.  A text says what is wrong,
where (the node and the user's file and line), the numbers with their units, and what to do.
"""

from collections.abc import Iterable

from splitc.runtime.errors import LaunchError, RanksFailed, SplitcError

__all__ = [
    "CaptureError",
    "CostError",
    "InternalError",
    "LaunchError",
    "PlacementError",
    "RanksFailed",
    "SplitcError",
    "bullets",
]


class CaptureError(SplitcError):
    """The model or its loss cannot be turned into one graph."""


class CostError(SplitcError):
    """A price is missing or makes no sense: an unknown cluster, device, link or op."""


class PlacementError(SplitcError):
    """No plan meets what was asked for."""


class InternalError(Exception):
    """splitc broke one of its own rules; please report it with the message."""


def bullets(title: str, problems: Iterable[str]) -> str:
    """One text for all problems at once, so that a user mends them in one go."""
    return "\n".join([title, *(f"  - {problem}" for problem in problems)])
