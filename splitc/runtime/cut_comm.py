"""What generated code calls to exchange values, and their gradients, with ranks of other roles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .collectives.layouts import State
from .collectives.model_parallel import feature_widths
from .spec import RoleSpec
from .transport.base import AllOf, Transport
from .transport.messages import Arriving, Messages


class CutComm:
    """A rank's messages to other roles; a `RoleComm` says in which role, and in which microbatch.

    members: the ranks of its model-parallel group, or this rank alone.
    """

    role: str
    members: tuple[int, ...]
    _spec: RoleSpec
    _messages: Messages
    _transport: Transport
    _role_examples: Mapping[int, tuple[int, int]]
    _piece: int | None

    def _positions(self, examples: tuple[int, int]) -> tuple[int, int]:
        """Where examples of the compiled batch lie in this step's batch or, counted within it, in the microbatch."""
        raise NotImplementedError

    def send(
        self, value: Tensor | None, role: str, dim: int = 0, rows: int = 1, of: str = "batch", to: str = "batch"
    ) -> None:
        """Start to send each rank of `role` its part of `value`; what is for this rank itself stays in memory.

        dim, rows: the batch dimension, and how many rows of it one example has.
        of, to: the state of `value` in this rank's group, and that in the group of the other.
        """
        value = self._arrived(value, role, "sent").detach()
        for peer, part in self._parts(value, role, dim, rows, of, to):
            if peer == self._transport.rank:
                self._messages.put_local(self.role, role, part)
            else:
                self._messages.send(part, peer, (self.role, role, self._piece))

    def recv(
        self, role: str, shape: tuple[int, ...], dtype: torch.dtype, rows: int = 1, of: str = "batch", to: str = "batch"
    ) -> Tensor:
        """Receive this rank's part of a value from the ranks of `role`.  shape: of all features; -1 is the batch."""
        return self.irecv(role, shape, dtype, rows, of, to).wait()

    def irecv(
        self, role: str, shape: tuple[int, ...], dtype: torch.dtype, rows: int = 1, of: str = "batch", to: str = "batch"
    ) -> Arriving:
        """Start to receive it; `wait` of what is returned gives the tensor."""
        dim, (start, stop) = shape.index(-1), self._span(to)
        sizes = [(stop - start) * rows if n == -1 else n for n in shape]
        if to == State.FEATURES:
            sizes[-1] = feature_widths(shape[-1], len(self.members))[self.members.index(self._transport.rank)]
        value = torch.empty(sizes, dtype=dtype, device=self._transport.device)
        works = []
        for peer, part in self._parts(value, role, dim, rows, to, of):
            if peer == self._transport.rank:
                part.copy_(self._messages.receive_local(role, self.role))
            else:
                works.append(self._transport.irecv(part, peer))

        def arrived() -> Tensor:
            self._messages.answered((self.role, role, self._piece))  # what comes back is made of what was sent
            return value

        return Arriving(AllOf(works), arrived)

    def _span(self, state: str) -> tuple[int, int]:
        """The examples that this rank has of a value in a state: its own, or its group's."""
        if state == State.BATCH:
            return self._positions(self._spec.examples)
        return self._positions((self._role_examples[self.members[0]][0], self._role_examples[self.members[-1]][1]))

    def _parts(
        self, value: Tensor, role: str, dim: int, rows: int, here: str, there: str
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the ranks of `role`, each with the part that it has in state `there` of a value in state `here`."""
        (start, _), routes = self._span(here), self._spec.routes if here == there else self._spec.group_routes
        for route in routes[role]:
            first, last = self._positions(route.examples)
            if first == last:
                continue  # both sides know
            part = value.narrow(dim, (first - start) * rows, (last - first) * rows)
            if there == State.FEATURES:
                group = [each.peer for each in routes[role] if each.examples == route.examples]
                widths, own = feature_widths(value.shape[-1], len(group)), group.index(route.peer)
                part = part.narrow(-1, sum(widths[:own]), widths[own])
            yield route.peer, part

    def _arrived(self, gradient: Tensor | None, role: str, verb: str) -> Tensor:
        """The gradient, unless the backward before did not reach it."""
        if gradient is None:
            raise RuntimeError(
                f"rank {self._transport.rank}: no gradient arrived for what role {role} {verb}; its stage does not "
                f"depend on it"
            )
        return gradient
