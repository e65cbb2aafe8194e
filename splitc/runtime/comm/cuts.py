"""What generated code calls to exchange values, and their gradients, with ranks of other roles."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..collectives.layouts import State
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
