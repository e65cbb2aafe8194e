"""The communicator of one role of a rank: what generated code calls to exchange tensors with other ranks.

Each part has the methods about one thing, under the names that generated code calls:

    CutComm         send, recv, irecv
    GroupComm       piece; start, modulo, slice_batch, shard, slice_features, copy_to_group, ...
    DividedLayers   cross_entropy, linear_cross_entropy, logsumexp, embedding, pick, put, scale_by_part
    GradientComm    all_reduce, all_reduce_tied, linear, update
    LossComm        batch_norm, all_reduce_scalar, global_weight, scale_by_share, sum_loss, scaled, autocast, ...
    SeededComm      dropout, uniform, normal, seeded, own_code

and what the features of `features` bring along.  Operations are issued in the order of the generated lines, so that the
order checked at compile time holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .collectives.divided_layers import DividedLayers
from .comm.role import Examples, Part, Role
from .comm.sums import GradientComm, LossComm
from .comm.values import CutComm, GroupComm
from .features import FEATURES
from .seeded.comm import SeededComm

PARTS: tuple[Callable[[Role], Any], ...] = (
    CutComm,
    GroupComm,
    lambda role: DividedLayers(role.group),
    GradientComm,
    LossComm,
    SeededComm,
    *(feature.comm for feature in FEATURES if feature.comm is not None),
)


class RoleComm:
    """A rank's communicator in one role.

    `comm[k]` is the communicator in microbatch k: the examples that it moves, counts and draws for are those of piece k
    of the batch.  `comm` itself has the whole batch.  `comm.errors` is the same for gradients of values, where these
    travel in another format.

    role: its name.  members: the ranks of its model-parallel group, or this rank alone.  shared: what its parts share.
    counted: the examples.
    """

    def __init__(
        self, shared: Role, parts: Sequence[Any] | None = None, microbatch: int | None = None, kind: str = "activations"
    ) -> None:
        self.shared, self.role, self.members = shared, shared.spec.role, shared.members
        self.counted = Examples(shared, microbatch)
        made = [make(shared) for make in PARTS] if parts is None else parts
        self.parts = [part.within(self.counted, kind) if isinstance(part, Part) else part for part in made]
        for part in self.parts:
            names = [name for name in dir(type(part)) if not name.startswith("_") and not hasattr(Part, name)]
            vars(self).update({name: getattr(part, name) for name in names})
        self._within: dict[int, RoleComm] = {}

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __getitem__(self, microbatch: int) -> RoleComm:
        if microbatch not in self._within:
            self._within[microbatch] = RoleComm(self.shared, self.parts, microbatch)
        return self._within[microbatch]

    @cached_property
    def errors(self) -> RoleComm:
        """The communicator that is given gradients of values, on their way back."""
        return RoleComm(self.shared, self.parts, self.counted.microbatch, "errors")

    def microbatches(self) -> list[int]:
        """Those of a step in which this rank's group has examples; the first one where it has none in any."""
        return self.shared.busy
