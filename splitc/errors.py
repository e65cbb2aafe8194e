"""The errors that splitc raises.

Subclasses of SplitcError are about the input; InternalError is a bug of splitc.  A message says what is wrong, where
(the node and the user's file and line), the numbers with their units, and what to do.
"""

from splitc.runtime.errors import (
    BackendError,
    LaunchError,
    NonFiniteError,
    RanksFailed,
    ReplicaError,
    SplitcError,
    bullets,
)

__all__ = ["BackendError", "LaunchError", "NonFiniteError", "RanksFailed", "ReplicaError", "SplitcError", "bullets"]


class ArgumentError(SplitcError, TypeError):
    """An argument of the Python API is of a type, or in a range, of no use."""


class CaptureError(SplitcError):
    """The model or its loss cannot be turned into one graph."""


class CostError(SplitcError):
    """A cost is missing or invalid: an unknown cluster, device, link or op."""


class PlacementError(SplitcError):
    """No plan meets the request."""


class InternalError(Exception):
    """An invariant of splitc is violated; please report it with the message."""
