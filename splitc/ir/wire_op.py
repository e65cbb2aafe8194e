"""One message or collective of a step, and what travels in it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch

from splitc.runtime.transport.collective import Collective
from splitc.runtime.transport.formats import FORMATS


class What(StrEnum):
    """What a payload is."""

    CUT = "cut"
    CUT_GRADIENT = "d_cut"
    ENTRY = "entry"
    ENTRY_GRADIENT = "entry_grad"
    NODE = "node"
    NODE_GRADIENT = "d_node"
    LATE = "X, E"
    BUCKET = "bucket"
    AVERAGE = "average"
    DEAL = "deal"
    COLLECT = "collect"
    FETCH_AHEAD = "fetch_ahead"
    TIED = "tied"
    LOSS = "loss"
    PULL = "pull"
    PUSH = "push"


STATE_COPIES = 1
"""Copies of a parameter in the optimizer's state that are counted: SGD with momentum, as in a written launch.py."""


@dataclass(frozen=True)
class Payload:
    """What travels: equal on both sides of a message, and on all members of a collective.

    name: of the cut, the node, the tied parameter, or the first served parameter.
    role: that communicates; of a cut, its producer.  peer: the consumer of a cut that is sent.
    rows: (first, last + 1) of the examples of a message, or of the rows of a served parameter.
    columns: likewise of its features, where it has a slice of them.
    more: number of further parameters in the same message.
    """

    what: What
    name: str = ""
    role: str = ""
    peer: str = ""
    bucket: int | None = None
    microbatch: int = 0
    rows: tuple[int, int] = (0, 0)
    more: int = 0
    columns: tuple[int, int] | None = None

    @property
    def of_any_turn(self) -> Payload:
        """The same in whichever microbatch."""
        return replace(self, microbatch=0)

    def __str__(self) -> str:
        rows = f"[{', '.join(f'{a}:{b}' for a, b in filter(None, (self.rows, self.columns)))}]"
        piece = f"[{self.microbatch}]" if self.microbatch else ""
        d = "d_" if self.what in (What.CUT_GRADIENT, What.NODE_GRADIENT) else ""
        match self.what:
            case What.CUT | What.CUT_GRADIENT:
                return f"{d}{self.name}.{self.role}.{self.peer}{piece}{rows}"
            case What.ENTRY | What.ENTRY_GRADIENT:
                return f"{self.what} {self.name}[{self.microbatch}]"
            case What.NODE | What.NODE_GRADIENT:
                return f"{d}{self.role}.{self.name}[{self.microbatch}]"
            case What.LATE:
                return f"{self.what} {self.role}.{self.name}[{self.microbatch}]"
            case What.BUCKET | What.AVERAGE:
                return f"{self.role}.{self.what}{self.bucket}"
            case What.PULL | What.PUSH:
                return f"{self.what} {self.name}{rows}" + (f" and {self.more} more" if self.more else "")
            case What.DEAL | What.COLLECT | What.FETCH_AHEAD:
                return f"{self.what} {self.role}.{self.name.removeprefix('torch.')}"
            case What.TIED | What.LOSS:
                return f"{self.what} {self.name}".rstrip()


@dataclass(frozen=True)
class WireOp:
    """One message or collective of one rank.

    kind: "send", "recv" or "collective".  ranks: the peer, or all members.
    shape: of the payload; of a collective whose members contribute different shapes, of the whole.
    sent: payload bytes that this rank sends.
    algorithm: of a collective, a `Collective`, "recursive_doubling", or "server" for a sum by the first of the ranks.
    layer: the layer that computed the value, or whose computation the communication is part of; None for inputs,
    buckets and the loss.  packed: of several layers, each one's share of `sent`.
    times: how often in a step, as the mean over a round: 1 / updates for what happens once a round.
    within: role and microbatch of the backward in which it begins: a bucket at any place, once it is full.
    form: the short format in which its numbers travel; "": as they are.
    shares: of a sum, rank -> what it adds up, in proportion to the others; none where a ring makes it.
    """

    kind: str
    payload: Payload
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    sent: float = 0.0
    layer: str | None = None
    algorithm: str = ""
    times: float = 1.0
    packed: tuple[tuple[str, float], ...] = ()
    within: tuple[str, int] | None = field(default=None, compare=False)
    form: str = ""
    shares: tuple[int, ...] = ()

    @property
    def per_step(self) -> float:
        """Payload bytes that this rank sends in a step, as the mean over a round."""
        return self.sent * self.times

    def sent_for(self, layer: str) -> float:
        """Payload bytes that this rank sends in a step for a layer."""
        return self.per_step * sum(share for name, share in self.packed or ((self.layer, 1.0),) if name == layer)

    @property
    def computed(self) -> int:
        """Bytes of `shape` as they are computed."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of `shape` as they travel."""
        return FORMATS[self.form].nbytes(math.prod(self.shape)) if self.form else self.computed

    @property
    def cast(self) -> tuple[float, float]:
        """Bytes of memory that it costs a rank to encode what it sends, and to decode what comes."""
        if not self.form:
            return 0.0, 0.0
        numel, traffic = math.prod(self.shape), FORMATS[self.form].traffic
        part = numel / len(self.ranks)
        leaving, coming = {
            "send": (numel, 0.0),
            "recv": (0.0, numel),
            Collective.ALL_GATHER: (part, numel),
            Collective.REDUCE_SCATTER: (numel - part, numel - part),
            Collective.ALL_REDUCE: (numel, 2 * numel),
        }.get(self.algorithm or self.kind, (part, part))
        return leaving * traffic, coming * traffic

    def of_all(self) -> WireOp:
        """The collective to which every rank gives a tensor of this shape, with the bytes that a rank sends."""
        collective, count = Collective(self.algorithm), len(self.ranks)
        own = self.nbytes / count if collective is Collective.REDUCE_SCATTER else self.nbytes
        shape = (count, *self.shape) if collective is Collective.ALL_GATHER else self.shape
        return replace(self, shape=shape, sent=collective.sent(self.nbytes, own, count))

    def __str__(self) -> str:
        other = {"send": "to", "recv": "from"}.get(self.kind, "of ranks")
        form = f" in {self.form}" if self.form else ""
        return f"{self.kind} {self.payload} {self.shape} {self.dtype}{form} {other} {', '.join(map(str, self.ranks))}"
