"""One rank of a compiled program: what its generated step calls to talk to the others.

A `Rank` is made by `rankN.py` from plain numbers and comes alive when it is connected to a transport.  Examples are
counted in the global batch as compiled; when a step has other batches (the tail of an epoch), every boundary moves with
its reader's.

What a step sends starts to travel at once and is waited for at the step's end: nothing that was sent may change in
between.  Everything is issued in the order of the generated lines, so that the order proved at compile time holds.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .errors import LaunchError
from .gradients import Buckets, GradientSum
from .loss import Loss, target_weight
from .seeded import mask
from .transport import Transport, Work

Routes = Mapping[str, tuple[tuple[int, int, int], ...]]


class Rank:
    """The rank's place in the plan, and its communication.

    index, world, role: who it is.  examples: its part of the global batch, first and one past the last.
    replicas: the ranks that hold the same parameters.  routes: role -> (peer, first, one past the last) it shares.
    readers, bounds: the ranks that read data, and where each one's examples begin and end.
    inputs: name -> (shape with -1 for the batch, dtype, bound of whole numbers) of what a reader reads.
    owners: role -> the rank that gives the role's parameters to a whole state_dict.

    seed, step_number: what dropout's masks depend on; step_number counts training steps.
    training: False makes dropout pass its input through.  sent_bytes: what this rank has sent so far, as on a ring.
    """

    def __init__(
        self,
        index: int,
        world: int,
        role: str,
        examples: tuple[int, int] = (0, 0),
        replicas: tuple[int, ...] = (),
        routes: Routes | None = None,
        readers: tuple[int, ...] = (),
        bounds: tuple[int, ...] = (0,),
        inputs: Mapping[str, tuple[tuple[int, ...], str, int | None]] | None = None,
        owners: Mapping[str, int] | None = None,
    ) -> None:
        self.index, self.world, self.role = index, world, role
        self.replicas, self.routes = replicas, routes or {}
        self.readers, self.bounds = readers, bounds
        self.inputs, self.owners = inputs or {}, owners or {}
        self.seed = 0
        self.step_number = 0
        self.sent_bytes = 0
        self.training = True
        self._examples = examples
        self._everyones: dict[int, tuple[int, int]] = {}  # rank -> its part of the global batch, once connected
        self._now = bounds
        self._under_way = False
        self._pending: list[Work] = []
        self._transport: Transport | None = None
        self._summing: GradientSum | None = None

    # -- a step's surroundings -----------------------------------------------------------------------------------------

    def connect(self, transport: Transport, seed: int = 0) -> None:
        """Come alive on `transport`.  Collective.  Raises LaunchError when it is another rank's or world's."""
        if (transport.rank, transport.world) != (self.index, self.world):
            raise LaunchError(
                f"this is rank {self.index} of {self.world}, started as {transport.rank} of {transport.world}"
            )
        self._transport, self.seed = transport, seed
        transport.connect([self.replicas, self.everyone])
        table = torch.zeros(self.world, 2, dtype=torch.int64, device=transport.device)
        table[self.index] = torch.tensor(self._examples)
        transport.all_reduce(table, self.everyone).wait()
        self._everyones = {rank: (first, last) for rank, (first, last) in enumerate(table.tolist())}

    @property
    def transport(self) -> Transport:
        if self._transport is None:
            raise LaunchError(f"rank {self.index} is not connected; start the ranks with torchrun launch.py")
        return self._transport

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.world))

    @property
    def data_rank(self) -> int | None:
        """Which part of the global batch this rank reads; None: none."""
        return self.readers.index(self.index) if self.index in self.readers else None

    @property
    def owns_its_role(self) -> bool:
        """Whether this rank is the one of its replicas that counts where each parameter counts once."""
        return self.owners.get(self.role) == self.index

    def begin(self, sizes: Sequence[int] | None = None) -> None:
        """Say that reader k gives `sizes[k]` examples to the step; None: as compiled.

        Raises LaunchError, on every rank alike, when some rank would be left without examples.
        """
        now = self.bounds if sizes is None else tuple(sum(sizes[:k]) for k in range(len(sizes) + 1))
        if len(now) != len(self.bounds):
            raise LaunchError(f"sizes of {len(now) - 1} readers given, but {len(self.bounds) - 1} ranks read data")
        if idle := self.without_examples(now):
            raise LaunchError(
                f"a batch of {' + '.join(map(str, sizes or ()))} examples leaves rank {', '.join(map(str, idle))} "
                f"without any; give each reader more"
            )
        self._now = now

    def without_examples(self, bounds: Sequence[int]) -> list[int]:
        """The ranks with work that get no example when the readers' parts of a step have these bounds."""
        return [
            rank
            for rank, (first, last) in self._everyones.items()
            if first < last and self._at(first, bounds) == self._at(last, bounds)
        ]

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Around all that a step issues; on leaving, every message has left and its tensors may be reused.

        A rank whose step broke off inside cannot take another one: the others have sent and received something else.
        """
        if self._under_way:
            raise LaunchError(
                f"rank {self.index}: its last step broke off in the middle, and the ranks no longer agree on what is "
                f"on its way; start all ranks again"
            )
        self._under_way = True
        yield
        for work in self._pending:
            work.wait()
        self._pending.clear()
        self._under_way = False

    @property
    def examples(self) -> tuple[int, int]:
        """This step's part of the global batch."""
        return self._at(self._examples[0]), self._at(self._examples[1])

    def _at(self, position: int, now: Sequence[int] | None = None) -> int:
        """Where a boundary of the compiled batch lies in this step's batch, or in one with the readers' bounds `now`.

        A boundary inside a reader's part divides it in the same proportion, rounded down.
        """
        full, now = self.bounds, self._now if now is None else now
        if position == full[-1]:
            return now[-1]
        k = bisect.bisect_right(full, position) - 1
        return now[k] + (position - full[k]) * (now[k + 1] - now[k]) // (full[k + 1] - full[k])

    # -- between roles -------------------------------------------------------------------------------------------------

    def send(self, value: Tensor | None, role: str, dim: int = 0, rows: int = 1) -> None:
        """Give each rank of `role` the examples of `value` that it works on; returns at once.

        dim, rows: the batch dimension and how many rows of it one example has.
        """
        if value is None:
            raise RuntimeError(
                f"rank {self.index}: no gradient arrived for what role {role} sent; its stage does not depend on it"
            )
        first = self.examples[0]
        for peer, start, stop in self.routes[role]:
            a, b = self._at(start), self._at(stop)
            part = value.detach().narrow(dim, (a - first) * rows, (b - a) * rows)
            self._pending.append(self.transport.isend(part, peer))
            self.sent_bytes += part.nbytes

    def recv(self, role: str, shape: tuple[int, ...], dtype: torch.dtype, rows: int = 1) -> Tensor:
        """This rank's examples from the ranks of `role` that have them.  shape: -1 stands for the batch."""
        dim = shape.index(-1)
        first, last = self.examples
        sizes = [(last - first) * rows if n == -1 else n for n in shape]
        value = torch.empty(sizes, dtype=dtype, device=self.transport.device)
        arriving = []
        for peer, start, stop in self.routes[role]:
            a, b = self._at(start), self._at(stop)
            arriving.append(self.transport.irecv(value.narrow(dim, (a - first) * rows, (b - a) * rows), peer))
        for work in arriving:
            work.wait()
        return value

    # -- within the role -----------------------------------------------------------------------------------------------

    @contextmanager
    def all_reduce(self, stage: nn.Module, buckets: Buckets) -> Iterator[None]:
        """Sum the gradients of `stage` over the replicas; each bucket starts once the backward inside has filled it."""
        if self._summing is None or self._summing.stage is not stage:
            self._summing = GradientSum(stage, buckets)
        with self._summing.while_backward(self.transport, self.replicas):
            yield
        self.sent_bytes += self._summing.sent_bytes(len(self.replicas))

    def total(self, value: Tensor) -> Tensor:
        """A scalar without gradient, summed over the role: the denominator of a weighted mean."""
        total = value.detach().clone()
        self.transport.all_reduce(total, self.replicas).wait()
        return total

    def total_weight(self, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100) -> Tensor:
        """The weights of all targets of the role's ranks: what a weighted mean over the global batch divides by."""
        return self.total(target_weight(target, weight, ignore_index))

    def share(self, value: Tensor) -> Tensor:
        """`value` times this rank's share of the global batch: the ranks' means then sum to the mean."""
        first, last = self.examples
        return value * ((last - first) / self._now[-1])

    def dropout(self, value: Tensor, p: float, *, layer: str, feature_dims: int = 0) -> Tensor:
        """Dropout with a mask that depends on seed, step, layer and examples, not on the rank (see `seeded`)."""
        if not self.training:
            return value
        return value * mask(value, p, feature_dims, (self.seed, self.step_number, layer, *self.examples))

    # -- with everyone -------------------------------------------------------------------------------------------------

    def sum_loss(self, contribution: Tensor) -> Loss:
        """Start to sum the ranks' contributions to the loss; `wait` gives the global loss, the same on every rank.

        The sum is taken in float64; the loss has the dtype of the contribution.
        """
        total = contribution.detach().to(self.transport.device, torch.float64, copy=True)
        return Loss(total, self.transport.all_reduce(total, self.everyone), contribution.dtype)
