"""Three ways from data-parallel convolutions into model-parallel fc layers: BK, B and B/K (Krizhevsky 2014).

K workers have B examples each; every worker holds a part of the fc layers, so it must see the examples of all.  As
SplitBrain (Lai et al., section 3.1) describes them:

    scheme   turns   in each turn                                  examples of a turn
    BK       1       every worker broadcasts its B                 B K
    B        K       one worker broadcasts its B                   B
    B/K      K       every worker broadcasts B / K of its own      B

A turn goes forward and backward through the fc layers.  All schemes move the same bytes: each example goes to K - 1
others, and its gradient comes back from them.  They differ in the memory of a turn, and in who sends at the same time.
With i activations an example, the numbers that leave one link after another in a step are

    BK       (K - 1) B i         all links at once
    B        K (K - 1) B i       one worker's link after the other's
    B/K      (K - 1) B i         all links at once, in K turns

A. Krizhevsky: One weird trick for parallelizing convolutional neural networks, arXiv 1404.5997.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitc.errors import CostError
from splitc.ir.cluster import Link

SCHEMES = ("BK", "B", "B/K")


@dataclass(frozen=True)
class Exchange:
    """One scheme on K workers of B examples with `row` bytes of activations each.

    Raises CostError for an unknown scheme, and for B / K where K does not divide B, as SplitBrain supposes.
    """

    scheme: str
    B: int
    K: int
    row: float

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise CostError(f"scheme {self.scheme!r} is none of {', '.join(SCHEMES)}")
        if self.scheme == "B/K" and self.B % self.K:
            raise CostError(f"scheme B/K takes B / K examples in a turn, and {self.K} does not divide {self.B}")

    @property
    def turns(self) -> int:
        """Passes forward and backward through the fc layers in a step."""
        return 1 if self.scheme == "BK" else self.K

    @property
    def examples(self) -> int:
        """Examples that a worker has in the fc layers at a time."""
        return self.B * self.K // self.turns

    @property
    def senders(self) -> int:
        """Workers that broadcast at the same time."""
        return 1 if self.scheme == "B" else self.K

    @property
    def nbytes(self) -> float:
        """Bytes of activations that all workers send in a step; as many of gradients come back."""
        return self.K * (self.K - 1) * self.B * self.row

    @property
    def held(self) -> float:
        """Bytes of activations that a worker gathers in a turn."""
        return self.examples * self.row

    @property
    def sent_in_turn(self) -> float:
        """Bytes that a sender sends in one turn."""
        return self.nbytes / (self.turns * self.senders)

    def seconds(self, link: Link) -> float:
        """Seconds of the activations' way in a step, as much again for the gradients': no turn overlaps another.

        A sender gives each of the K - 1 others a message; one that receives at the same time does so on a duplex link.
        """
        directions = 2 if self.senders > 1 and not link.duplex else 1
        messages = (self.K - 1) * link.latency
        return self.turns * (messages + directions * self.sent_in_turn / link.bandwidth)
