"""One rank of a compiled program: its place in the plan, and what its seats share.

A `Rank` is made by `rankN.py` from plain numbers and comes alive when it is connected to a transport.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .collectives.loss import Loss
from .errors import LaunchError
from .role_comm import RoleComm
from .transport.base import Transport, Work


class Rank:
    """The rank's place in the plan.

    index, world: who it is.  comms: its place in each of its roles; none on a rank without work.
    readers, bounds: the ranks that read data, and where each one's examples begin and end.
    inputs: name -> (shape with -1 for the batch, dtype, bound of whole numbers) of what a reader reads.

    seed, step_number: what dropout's masks depend on; step_number counts training steps.
    training: False makes dropout pass its input through.  updates_now: whether this step's gradients are summed, False
    in all but the last of several batches to an update.  pulls_now: whether servers give their parameters, False in all
    but the first of them.
    """

    def __init__(
        self,
        index: int,
        world: int,
        comms: Sequence[RoleComm] = (),
        readers: tuple[int, ...] = (),
        bounds: tuple[int, ...] = (0,),
        inputs: Mapping[str, tuple[tuple[int, ...], str, int | None]] | None = None,
    ) -> None:
        self.index, self.world = index, world
        self.comms = tuple(comms)
        self.readers, self.bounds = readers, bounds
        self.inputs = inputs or {}
        self.seed = 0
        self.step_number = 0
        self.training = True
        self.updates_now = True
        self.pulls_now = True
        self.update: Callable[[str], None] = lambda role: None
        self.step_offsets = bounds
        self._sent = 0
        self._everyones: dict[tuple[int, str], tuple[int, int]] = {}  # (rank, role) -> examples, once connected
        self._under_way = False
        self._pending: list[Work] = []
        self._transport: Transport | None = None

    # -- a step's surroundings -----------------------------------------------------------------------------------------

    def connect(self, transport: Transport, seed: int = 0) -> None:
        """Come alive on `transport`.  Collective.  Raises LaunchError when it is another rank's or world's."""
        if (transport.rank, transport.world) != (self.index, self.world):
            raise LaunchError(
                f"this is rank {self.index} of {self.world}, started as {transport.rank} of {transport.world}"
            )
        self._transport, self.seed = transport, seed
        transport.connect([self.everyone, *(ranks for seat in self.comms for ranks in seat.communicators)])
        for seat in self.comms:
            seat.sit(self)
        own = {(self.index, seat.role): seat.compiled_examples for seat in self.comms}
        everyones = transport.gather_objects(own)
        self._everyones = transport.broadcast_object(
            None if everyones is None else {key: value for each in everyones for key, value in each.items()}
        )

    @property
    def transport(self) -> Transport:
        if self._transport is None:
            raise LaunchError(f"rank {self.index} is not connected; start the ranks with torchrun launch.py")
        return self._transport

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.world))

    @property
    def role(self) -> str:
        """The names of its roles."""
        return " and ".join(seat.role for seat in self.comms) or "idle"

    @property
    def data_rank(self) -> int | None:
        """Which part of the global batch this rank reads; None: none."""
        return self.readers.index(self.index) if self.index in self.readers else None

    @property
    def views(self) -> tuple[Rank | RoleComm, ...]:
        """What its step is called with: its seats, or itself where it has none."""
        return self.comms or (self,)

    def comm(self, role: str) -> RoleComm:
        """Its place in `role`."""
        return next(seat for seat in self.comms if seat.role == role)

    def examples_of(self, rank: int, role: str) -> tuple[int, int]:
        """The examples, as compiled, that a rank has as one of `role`."""
        return self._everyones[rank, role]

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
        for seat in self.comms:
            if seat.updates != "every":
                continue
            if min(self._size(rank, role, now) for rank, role in self._everyones if role == seat.role) < len(
                seat.group
            ):
                raise LaunchError(
                    f"a batch of {' + '.join(map(str, sizes or ()))} examples leaves some of the {len(seat.group)} "
                    f"turns of role {seat.role} without any, and each of them is an update; give each reader more"
                )
        self.step_offsets = now

    def _size(self, rank: int, role: str, now: Sequence[int]) -> int:
        first, last = self._everyones[rank, role]
        return self._at(last, now) - self._at(first, now)

    def without_examples(self, bounds: Sequence[int]) -> list[int]:
        """The ranks with work that get no example when the readers' parts of a step have these bounds."""
        found = [
            rank
            for (rank, _), (first, last) in self._everyones.items()
            if first < last and self._at(first, bounds) == self._at(last, bounds)
        ]
        return list(dict.fromkeys(found))

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

    def post(self, work: Work, nbytes: int) -> None:
        """Keep a message of `nbytes` that is on its way until the step's end."""
        self._pending.append(work)
        self.count(nbytes)

    def count(self, nbytes: int) -> None:
        """Add to the payload sent."""
        self._sent += nbytes

    @property
    def sent_bytes(self) -> int:
        """Payload bytes that this rank has sent in steps so far, as the communication nodes define them."""
        return self._sent + sum(seat.sent_bytes for seat in self.comms)

    def part(self, first: int, last: int) -> tuple[int, int]:
        """Where examples of the compiled batch lie in this step's."""
        return self._at(first, self.step_offsets), self._at(last, self.step_offsets)

    def _at(self, position: int, now: Sequence[int]) -> int:
        """Where a boundary of the compiled batch lies in a batch with the readers' bounds `now`.

        A boundary inside a reader's part divides it in the same proportion, rounded down.
        """
        full = self.bounds
        if position == full[-1]:
            return now[-1]
        k = bisect.bisect_right(full, position) - 1
        return now[k] + (position - full[k]) * (now[k + 1] - now[k]) // (full[k + 1] - full[k])

    # -- with everyone -------------------------------------------------------------------------------------------------

    def sum_loss(self, contribution: Tensor) -> Loss:
        """Start to sum the ranks' contributions to the loss; `wait` gives the global loss, the same on every rank.

        The sum is taken in float64; the loss has the dtype of the contribution.
        """
        total = contribution.detach().to(self.transport.device, torch.float64, copy=True)
        self.count(2 * (self.world - 1) * total.nbytes // self.world)
        return Loss(total, self.transport.all_reduce(total, self.everyone), contribution.dtype)
