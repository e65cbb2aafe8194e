"""The operations on the wire, and the payload bytes that a rank sends in each: the one table of them."""

from __future__ import annotations

from enum import StrEnum


class Collective(StrEnum):
    """What an operation does on the wire."""

    SEND = "send"
    RECV = "recv"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    NONE = "none"  # the rank computes it alone

    def sent(self, nbytes: float, own: float, ranks: int) -> float:
        """Return the payload bytes that a rank sends.

        nbytes: of the whole value.  own: of this rank's part of it, which is the whole value for a sum or a message.
        """
        match self:
            case Collective.SEND:
                return own
            case Collective.ALL_GATHER:
                return (ranks - 1) * own
            case Collective.REDUCE_SCATTER:
                return nbytes - own
            case Collective.ALL_REDUCE:  # on a ring
                return 2 * (ranks - 1) / ranks * nbytes
            case _:
                return 0.0
