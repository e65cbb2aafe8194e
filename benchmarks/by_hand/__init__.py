"""Training steps as an engineer writes them by hand for one strategy, with torch.distributed alone: yardsticks.

They train a model that has `features`, `avgpool` and a `classifier` of linear layers, as AlexNet does, with the mean
cross entropy over the examples of all ranks; DDP's train any model.  Every step and every `state` is collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from benchmarks.by_hand.common import parts
from benchmarks.by_hand.ddp import Ddp, SparseDdp
from benchmarks.by_hand.late_multiply import LateMultiply
from benchmarks.by_hand.rows import Rows
from benchmarks.by_hand.separation import Separation


class Script(Protocol):
    """One rank of a script."""

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train on this rank's examples of a global batch."""

    def state(self) -> dict[str, Tensor]:
        """The whole model's weights, on every rank."""


def examples(script: str, total: int, world: int) -> list[int]:
    """How many examples of a global batch each rank of a script trains on."""
    return [*parts(total, world - 1), 0] if script == "separation" else parts(total, world)


SCRIPTS: dict[str, Callable[..., Script]] = {
    "ddp": Ddp,
    "late_multiply": LateMultiply,
    "rows": Rows,
    "separation": Separation,
    "sparse_ddp": SparseDdp,
}
"""Each takes the model, a factory of its optimizer, how many examples each rank has, and its own options."""
