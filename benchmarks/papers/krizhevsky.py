"""Price Krizhevsky's schemes BK, B and B/K between data-parallel convolutions and model-parallel fc layers.

K workers have B examples each; every worker holds a shard of the fc layers, so it needs the examples of all.  As
SplitBrain (Lai et al., section 3.1) describes them:

    scheme   microbatches   in each microbatch                           examples of a microbatch
    BK       1              every worker broadcasts its B                B K
    B        K              one worker broadcasts its B                  B
    B/K      K              every worker broadcasts B / K of its own     B

Each microbatch goes forward and backward through the fc layers.  All schemes move the same bytes: each example goes to
K - 1 others, and its gradient returns from them.  They differ in the memory of a microbatch, and in how many workers
send at the same time.  With i activations for each example, the numbers that leave links one after another are

    BK       (K - 1) B i         all links at once
    B        K (K - 1) B i       one worker's link after the other's
    B/K      (K - 1) B i         all links at once, in K microbatches

A. Krizhevsky: One weird trick for parallelizing convolutional neural networks, arXiv 1404.5997.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitc.errors import CostError
from splitc.ir.device import Link

SCHEMES = ("BK", "B", "B/K")


@dataclass(frozen=True)
class Exchange:
    """One scheme on K workers with B examples each.  row: bytes of activations of one example.

    Raises CostError for an unknown scheme, and for B/K if K does not divide B, which SplitBrain assumes.
    """

    scheme: str
    B: int
    K: int
    row: float

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise CostError(f"scheme {self.scheme!r} is none of {', '.join(SCHEMES)}")
        if self.scheme == "B/K" and self.B % self.K:
            raise CostError(f"scheme B/K takes B / K examples in a microbatch, and {self.K} does not divide {self.B}")

    @property
    def num_microbatches(self) -> int:
        """Passes forward and backward through the fc layers in a step."""
        return 1 if self.scheme == "BK" else self.K

    @property
    def examples(self) -> int:
        """Examples of one microbatch in the fc layers."""
        return self.B * self.K // self.num_microbatches

    @property
    def senders(self) -> int:
        """Workers that broadcast at the same time."""
        return 1 if self.scheme == "B" else self.K

    @property
    def nbytes(self) -> float:
        """Bytes of activations that all workers send in a step; as many bytes of gradients return."""
        return self.K * (self.K - 1) * self.B * self.row

    @property
    def held(self) -> float:
        """Bytes of activations that a worker gathers for one microbatch."""
        return self.examples * self.row

    @property
    def sent_in_microbatch(self) -> float:
        """Bytes that each sender sends in one microbatch."""
        return self.nbytes / (self.num_microbatches * self.senders)

    def seconds(self, link: Link) -> float:
        """Seconds to exchange the activations of a step, without overlap; the gradients take the same again.

        A sender sends a message to each of the K - 1 others; it receives at the same time on a duplex link only.
        """
        directions = 2 if self.senders > 1 and not link.duplex else 1
        messages = (self.K - 1) * link.latency
        return self.num_microbatches * (messages + directions * self.sent_in_microbatch / link.bandwidth)
