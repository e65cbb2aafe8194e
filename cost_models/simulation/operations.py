"""What a rank does in a step, one after the other: computing, transfers, and waiting for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Compute:
    """Compute for `seconds`."""

    name: str
    seconds: float


@dataclass(frozen=True, eq=False)
class Transfer:
    """A message or collective.

    parties: ranks that must begin it.  lines: numbers of the lines that it occupies.  seconds: its duration.
    processor: processor time that it costs each party (s).
    """

    name: str
    parties: tuple[int, ...]
    lines: tuple[int, ...]
    seconds: float
    processor: float = 0.0


@dataclass(frozen=True)
class Begin:
    """Begin `transfer`, of which this rank sends `nbytes`, without waiting for it."""

    transfer: Transfer
    nbytes: float = 0.0


@dataclass(frozen=True)
class Wait:
    """Wait until all `transfers` have ended."""

    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class Mark:
    """The end of a step."""


Operation = Compute | Begin | Wait | Mark
