"""What generated code calls to move values, and their gradients: to ranks of other roles, and to states in a group."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..collectives.layouts import Extents, State, Transition
from ..collectives.model_parallel import feature_widths
from ..transport.base import AllOf
from ..transport.messages import Arriving
from .role import Part, given


class CutComm(Part):
    """A rank's messages to other roles.

    A send starts at once and is waited for when an answer has come, or at the step's end: what was sent must not change
    before.
    """

    def send(
        self, value: Tensor | None, role: str, dim: int = 0, rows: int = 1, of: str = "batch", to: str = "batch"
    ) -> None:
        """Start to send each rank of `role` its part of `value`; what is for this rank itself stays in memory.

        dim, rows: the batch dimension, and how many rows of it one example has.
        of, to: the state of `value` in this rank's group, and that in the group of the other.
        """
        messages, own = self.role.messages, self.role.spec.role
        value = given(value, self.examples, role, "sent").detach()
        for peer, part in self._parts(value, role, dim, rows, of, to):
            if peer == self.role.transport.rank:
                messages.local[own, role].append(part)
            else:
                messages.send(part, peer, self.examples.way(role), self.role.carrying(self.kind))

    def recv(
        self, role: str, shape: tuple[int, ...], dtype: torch.dtype, rows: int = 1, of: str = "batch", to: str = "batch"
    ) -> Tensor:
        """Receive this rank's part of a value from the ranks of `role`.  shape: of all features; -1 is the batch."""
        return self.irecv(role, shape, dtype, rows, of, to).wait()

    def irecv(
        self, role: str, shape: tuple[int, ...], dtype: torch.dtype, rows: int = 1, of: str = "batch", to: str = "batch"
    ) -> Arriving:
        """Start to receive it; `wait` of what is returned gives the tensor."""
        transport, messages, own = self.role.transport, self.role.messages, self.role.spec.role
        dim, (start, stop) = shape.index(-1), self.examples.span(to)
        sizes = [(stop - start) * rows if n == -1 else n for n in shape]
        if to == State.FEATURES:
            sizes[-1] = feature_widths(shape[-1], self.role.group.size)[self.role.group.index]
        value = torch.empty(sizes, dtype=dtype, device=transport.device)
        works = []
        for peer, part in self._parts(value, role, dim, rows, to, of):
            if peer == transport.rank:
                part.copy_(messages.local[role, own].popleft())
            else:
                works.append(self.role.carrying(self.kind).irecv(part, peer))

        def arrived() -> Tensor:
            messages.answered(self.examples.way(role))  # what comes back is made of what was sent
            return value

        return Arriving(AllOf(works), arrived)

    def _parts(
        self, value: Tensor, role: str, dim: int, rows: int, here: str, there: str
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the ranks of `role`, each with the part that it has in state `there` of a value in state `here`."""
        for peer, first, number, columns in self.examples.legs(role, here, there):
            part = value.narrow(dim, first * rows, number * rows)
            if columns is not None:
                which, size = columns
                widths = feature_widths(value.shape[-1], size)
                part = part.narrow(-1, sum(widths[:which]), widths[which])
            yield peer, part


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
