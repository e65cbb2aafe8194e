"""What generated code calls to bring values to another state in the group of a role, and to divide its batch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives.layouts import Extents, State, Transition
from ..collectives.model_parallel import feature_widths
from ..transport.messages import Arriving
from .role import Part, given


class GroupComm(Part):
    """The transitions of a rank's group, on the examples of the microbatch."""

    def piece(self, value: Tensor, dim: int = 0, rows: int = 1) -> Tensor:
        """The microbatch's examples of a value that has all examples of this rank."""
        start, _ = self.role.context.interval(self.role.spec.examples)
        parts = [value.narrow(dim, (a - start) * rows, (b - a) * rows) for a, b in self.examples.intervals()]
        return parts[0] if len(parts) == 1 and not dim else torch.cat(parts or [value.narrow(dim, 0, 0)], dim)

    def modulo(self, value: Tensor, partial: bool = True, dim: int = 0, rows: int = 1) -> Tensor:
        """The microbatch's examples of all ranks of the group; partial: in backward their gradients are summed."""
        return self._moved(value, State.BATCH, _whole(partial), dim=dim, rows=rows)

    def slice_batch(self, value: Tensor | None, partial: bool = False, dim: int = 0, rows: int = 1) -> Tensor:
        """This rank's own examples out of the group's; partial: its gradient is a term of a sum."""
        return self._moved(value, _whole(partial), State.BATCH, dim=dim, rows=rows)

    def shard(self, value: Tensor, features: int, partial: bool = True) -> Tensor:
        """The whole last dim, of which each rank of the group has a part; partial: as of `modulo`."""
        return self._moved(value, State.FEATURES, _whole(partial), features)

    def slice_features(self, value: Tensor, features: int, partial: bool = False) -> Tensor:
        """This rank's part of the last dim, which all ranks of the group have; partial: as of `slice_batch`."""
        return self._moved(value, _whole(partial), State.FEATURES, features)

    def copy_to_group(self, value: Tensor) -> Tensor:
        """`value` itself; backward sums its gradient over the group."""
        return self._moved(value, State.REPLICATE, State.DIVIDED)

    def reduce_from_group(self, value: Tensor, partial: bool = False) -> Tensor:
        """The sum of `value` over the group; partial: so are their gradients."""
        return self._moved(value, State.PARTIAL, _whole(partial))

    def reduce_scatter(self, value: Tensor | None, to: str, features: int = 0, dim: int = 0, rows: int = 1) -> Tensor:
        """This rank's examples (to="batch") or features of the sum of `value` over the group."""
        return self._moved(value, State.PARTIAL, State(to), features, dim, rows)

    def all_to_all(self, value: Tensor | None, to: str, features: int, dim: int = 0, rows: int = 1) -> Tensor:
        """Own features of all the group's examples, for own examples (to="features"), or the reverse."""
        source = State.BATCH if to == State.FEATURES else State.FEATURES
        return self._moved(value, source, State(to), features, dim, rows)

    def start(
        self, value: Tensor | None, source: str, target: str, features: int = 0, dim: int = 0, rows: int = 1
    ) -> Arriving:
        """Start to bring a value, or a gradient, to another state; `wait` of what is returned gives it."""
        value, transition = self._given(value), Transition(State(source), State(target))
        return self.role.group.start(value, transition, self._extents(features, dim, rows), self.kind)

    def _moved(
        self, value: Tensor | None, source: State, target: State, features: int = 0, dim: int = 0, rows: int = 1
    ) -> Tensor:
        """A value in another state, as the group divides it."""
        value, transition = self._given(value), Transition(source, target)
        return self.role.group.transition(value, transition, self._extents(features, dim, rows), self.kind)

    def _given(self, value: Tensor | None) -> Tensor:
        return given(value, self.examples, self.role.spec.role, "gathered")

    def _extents(self, features: int, dim: int, rows: int) -> Extents:
        """How the group divides a value of the microbatch."""
        widths = feature_widths(features, self.role.group.size)
        return Extents(tuple(self.examples.group_rows(rows)), tuple(widths), dim)


def _whole(partial: bool) -> State:
    """The state of a whole value, of which each rank's readers compute a part, or all."""
    return State.DIVIDED if partial else State.REPLICATE
