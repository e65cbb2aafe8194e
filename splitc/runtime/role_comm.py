"""One role that a rank has: what generated code calls to talk to the other ranks of this role, and to other roles.

Examples are counted in the global batch as compiled; when a step has other batches (the tail of an epoch), every
boundary moves with its reader's.  What a step sends starts to travel at once and is waited for at the step's end:
nothing that was sent may change in between.  Everything is issued in the order of the generated lines, so that the
order proved at compile time holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .collectives.dropout import mask
from .collectives.gradients import Buckets, GradientSum
from .collectives.late_multiply import LateMultiply
from .collectives.loss import Loss, target_weight
from .collectives.model_parallel import Group
from .collectives.parameter_server import Bucket, Exchange, Served, Server, own_rows
from .collectives.sync_batch_norm import batch_norm
from .errors import LaunchError
from .transport.base import Transport

if TYPE_CHECKING:
    from .rank import Rank

Routes = Mapping[str, tuple[tuple[int, int, int], ...]]
Shares = Mapping[str, tuple[int, int, int]]


class RoleComm:
    """A rank's place in one role.

    examples: its part of the global batch, first and one past the last.  replicas: the ranks that hold the same
    parameters.  routes: role -> (peer, first, one past the last) of the examples it shares with it.
    group: the ranks of its model-parallel group; scheme: which of their examples make a turn, "BK" all, "B" one
    member's, "B/K" a part of each member's.  updates: "once" after all turns, or after "every" one.
    shares: parameter -> (dim, first, one past the last) of what this rank has of it.
    algorithm: how gradients are summed, by the "backend" or by "recursive_doubling".
    serves: of a worker that is a server too: parameter -> (dim, first, one past the last) of the rows that it serves.
    workers: of a server that is none: role -> the ranks that it serves.
    """

    def __init__(
        self,
        role: str,
        examples: tuple[int, int] = (0, 0),
        replicas: tuple[int, ...] = (),
        routes: Routes | None = None,
        group: tuple[int, ...] = (),
        scheme: str = "BK",
        updates: str = "once",
        shares: Shares | None = None,
        algorithm: str = "backend",
        serves: Shares | None = None,
        workers: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.role = role
        self.replicas, self.routes = replicas, routes or {}
        self.group, self.scheme, self.updates = group, scheme, updates
        self.shares = shares or {}
        self.algorithm = algorithm
        self.serves, self.workers = serves or {}, workers or {}
        self.compiled_examples = examples
        self._rank: Rank | None = None
        self._turn: int | None = None
        self._last_turn = True
        self._summing: GradientSum | None = None
        self._exchange: Exchange | None = None
        self._rows_served: dict[str, nn.Parameter] = {}
        self._handed_over: dict[str, deque[Tensor]] = {}
        self._gathering: Group | None = None
        self._replicas: Group | None = None
        self._late: LateMultiply | None = None

    # -- its place -----------------------------------------------------------------------------------------------------

    def sit(self, rank: Rank) -> None:
        """Belong to `rank`, which is connected."""
        self._rank = rank
        self._gathering = Group(rank.transport, self.members)
        self._replicas = Group(rank.transport, self.replicas)
        self._late = LateMultiply(rank.transport, self.replicas)
        self._summing, self._exchange = None, None

    @property
    def rank(self) -> Rank:
        if self._rank is None:
            raise LaunchError(f"role {self.role} is not connected; start the ranks with torchrun launch.py")
        return self._rank

    @property
    def transport(self) -> Transport:
        return self.rank.transport

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of its group, at least itself."""
        return self.group or (self.rank.index,)

    @property
    def communicators(self) -> list[tuple[int, ...]]:
        """The sets of ranks that it takes part in collectives of."""
        return [ranks for ranks in (self.replicas, self.group) if len(ranks) > 1]

    @property
    def sent_bytes(self) -> int:
        """Payload bytes of what it gathered so far."""
        assert self._gathering is not None and self._replicas is not None and self._late is not None
        return self._gathering.sent_bytes + self._replicas.sent_bytes + self._late.sent_bytes

    @property
    def examples(self) -> tuple[int, int]:
        """This step's part of the global batch that is its own."""
        return self.rank.part(*self.compiled_examples)

    def _rows(self, turn: int | None = None) -> list[int]:
        """Examples that each member of its group gives to a turn."""
        return [last - first for first, last in self._pieces(turn)]

    def _pieces(self, turn: int | None = None) -> list[tuple[int, int]]:
        turn = (self._turn or 0) if turn is None else turn
        size, found = len(self.members), []
        for k, member in enumerate(self.members):
            first, last = self.rank.part(*self.rank.examples_of(member, self.role))
            if self.scheme == "B" and k != turn:
                last = first
            if self.scheme == "B/K":
                first, last = first + (last - first) * turn // size, first + (last - first) * (turn + 1) // size
            found.append((first, last))
        return found

    # -- between roles -------------------------------------------------------------------------------------------------

    def send(self, value: Tensor | None, role: str, dim: int = 0, rows: int = 1) -> None:
        """Give each rank of `role` the examples of `value` that it works on; returns at once.

        What this rank itself works on as one of `role` is handed over in memory.
        dim, rows: the batch dimension and how many rows of it one example has.
        """
        if value is None:
            raise RuntimeError(
                f"rank {self.rank.index}: no gradient arrived for what role {role} sent; its stage does not depend "
                f"on it"
            )
        first = self.examples[0]
        for peer, start, stop in self.routes[role]:
            a, b = self.rank.part(start, stop)
            part = value.detach().narrow(dim, (a - first) * rows, (b - a) * rows)
            if peer == self.rank.index:
                self.rank.comm(role).hand(self.role, part)
            else:
                self.rank.post(self.transport.isend(part, peer), part.nbytes)

    def hand(self, role: str, part: Tensor) -> None:
        """Take what this rank, as one of `role`, has for itself."""
        self._handed_over.setdefault(role, deque()).append(part)

    def recv(self, role: str, shape: tuple[int, ...], dtype: torch.dtype, rows: int = 1) -> Tensor:
        """This rank's examples from the ranks of `role` that have them.  shape: -1 stands for the batch."""
        dim = shape.index(-1)
        first, last = self.examples
        sizes = [(last - first) * rows if n == -1 else n for n in shape]
        value = torch.empty(sizes, dtype=dtype, device=self.transport.device)
        arriving = []
        for peer, start, stop in self.routes[role]:
            a, b = self.rank.part(start, stop)
            part = value.narrow(dim, (a - first) * rows, (b - a) * rows)
            if peer == self.rank.index:
                part.copy_(self._handed_over[role].popleft())
            else:
                arriving.append(self.transport.irecv(part, peer))
        for work in arriving:
            work.wait()
        return value

    # -- within the group ----------------------------------------------------------------------------------------------

    def turns(self, number: int) -> Iterator[int]:
        """The turns of a step, of which those without any example in the group are left out."""
        busy = [turn for turn in range(number) if any(self._rows(turn))]
        try:
            for turn in busy:
                self._turn, self._last_turn = turn, turn == busy[-1]
                yield turn
        finally:
            self._turn, self._last_turn = None, True

    def modulo(self, value: Tensor, dim: int = 0, rows: int = 1) -> Tensor:
        """The turn's examples of all ranks of the group; `value` has those of this rank."""
        assert self._gathering is not None
        (first, last), (own, _) = self._pieces()[self._position], self.examples
        part = value.detach().narrow(dim, (first - own) * rows, (last - first) * rows)
        return self._gathering.gather_examples(part, [n * rows for n in self._rows()], dim)

    def modulo_grad(self, gradient: Tensor | None, dim: int = 0, rows: int = 1, partial: bool = True) -> Tensor:
        """The gradient of what `modulo` took from this rank.

        partial: the ranks' gradients are parts of a sum; else each has the whole.
        """
        assert self._gathering is not None
        if gradient is None:
            raise RuntimeError(f"rank {self.rank.index}: no gradient arrived for what role {self.role} gathered")
        return self._gathering.return_examples(gradient, [n * rows for n in self._rows()], dim, partial=partial)

    def slice_batch(self, value: Tensor, dim: int = 0, rows: int = 1) -> Tensor:
        """This rank's own examples out of the group's."""
        assert self._gathering is not None
        return self._gathering.keep_own(value.detach(), [n * rows for n in self._rows()], dim)

    def all_gather_grad(self, gradient: Tensor | None, dim: int = 0, rows: int = 1) -> Tensor:
        """The gradient of all the group's examples, of which each rank has its own."""
        assert self._gathering is not None
        if gradient is None:
            raise RuntimeError(f"rank {self.rank.index}: no gradient arrived for what role {self.role} kept")
        return self._gathering.spread_gradients(gradient, [n * rows for n in self._rows()], dim)

    def shard(self, value: Tensor, features: int, partial: bool = True) -> Tensor:
        """The whole last dim, of which each rank of the group has its part.

        partial: in backward the gradients of the ranks are parts of a sum; else they are the same.
        """
        assert self._gathering is not None
        return self._gathering.gather_features(value, widths(features, len(self.members)), partial)

    def copy_to_group(self, value: Tensor) -> Tensor:
        """`value`, whose readers have parts of its gradient: backward sums them over the group."""
        assert self._gathering is not None
        return self._gathering.copy_to_group(value)

    def reduce_from_group(self, value: Tensor) -> Tensor:
        """The sum of `value` over the group."""
        assert self._gathering is not None
        return self._gathering.reduce_from_group(value)

    @property
    def _position(self) -> int:
        return self.members.index(self.rank.index)

    def autocast(self, dtype: torch.dtype) -> torch.autocast:
        """Around a stage's forward: mixed precision, as the program was captured with."""
        return torch.autocast(self.transport.device.type, dtype)

    # -- within the role -----------------------------------------------------------------------------------------------

    @contextmanager
    def all_reduce(self, stage: nn.Module, buckets: Buckets) -> Iterator[None]:
        """Sum the gradients of `stage` over the replicas; each bucket starts once the backward inside has filled it.

        With several turns, or several batches to an update, gradients add up until the last one, and are summed in it.
        """
        if not self._sums_now:
            yield
            return
        if self._summing is None or self._summing.stage is not stage:
            self._summing = GradientSum(stage, buckets, self.algorithm)
        with self._summing.while_backward(self.transport, self.replicas):
            yield
        self.rank.count(self._summing.sent_bytes(self.replicas.index(self.rank.index), len(self.replicas)))

    def all_reduce_tied(self, stage: nn.Module, tied: Mapping[str, tuple[int, ...]]) -> None:
        """Sum the gradients of parameters that several roles use over all ranks that have a copy of them."""
        if not self.rank.updates_now:
            return
        parameters = dict(stage.named_parameters(remove_duplicate=False))
        under_way = []
        for name, ranks in tied.items():
            parameter = parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            total = parameter.grad.contiguous()
            under_way.append((parameter, total, self.transport.all_reduce(total, ranks)))
            self.rank.count(2 * (len(ranks) - 1) * total.nbytes // len(ranks))
        for parameter, total, work in under_way:
            work.wait()
            parameter.grad = total

    @property
    def _sums_now(self) -> bool:
        return (self._last_turn or self.updates == "every") and self.rank.updates_now

    def late_multiply(self, value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer whose gradient is made of all replicas' inputs and output errors (see `late`)."""
        assert self._late is not None
        first, last = self.examples
        an_example = value[..., 0].numel() // max(last - first, 1)
        everyones = (self.rank.part(*self.rank.examples_of(rank, self.role)) for rank in self.replicas)
        return self._late.linear(value, weight, bias, rows=[(b - a) * an_example for a, b in everyones])

    def multiply(self) -> None:
        """Finish the gradients of late-multiplied layers: W' = E^T X."""
        assert self._late is not None
        self._late.finish()

    def batch_norm(self, value: Tensor, module: nn.modules.batchnorm._BatchNorm) -> Tensor:
        """BatchNorm `module` over the examples of all replicas."""
        training = module.training or module.running_mean is None
        factor = module.momentum
        if training and module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
            factor = 1.0 / float(module.num_batches_tracked) if factor is None else factor
        assert self._replicas is not None
        return batch_norm(
            self._replicas,
            value,
            module.running_mean,
            module.running_var,
            module.weight,
            module.bias,
            training,
            0.0 if factor is None else factor,
            module.eps,
        )

    def all_reduce_scalar(self, value: Tensor) -> Tensor:
        """A scalar without gradient, summed over the role: the denominator of a weighted mean."""
        assert self._replicas is not None
        return self._replicas.all_reduce_scalar(value)

    def global_weight(self, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100) -> Tensor:
        """The weights of all targets of the role's ranks: what a weighted mean over the global batch divides by."""
        return self.all_reduce_scalar(target_weight(target, weight, ignore_index))

    def scale_by_share(self, value: Tensor) -> Tensor:
        """`value` times the share of the global batch that is before this rank: the means then sum to the mean."""
        return value * (sum(self._rows()) / self.rank.step_offsets[-1])

    def dropout(self, value: Tensor, p: float, *, layer: str, feature_dims: int = 0, sharded: bool = False) -> Tensor:
        """Dropout with a mask that depends on seed, step, layer and examples, not on the rank (see `seeded`).

        sharded: `value` has a part of the features, and the mask depends on which part.
        """
        if not self.rank.training:
            return value
        pieces = [bound for piece in self._pieces() for bound in piece]
        part = (self._position,) if sharded else ()
        key = (self.rank.seed, self.rank.step_number, layer, *pieces, *part)
        return value * mask(value, p, feature_dims, key)

    # -- with servers --------------------------------------------------------------------------------------------------

    def own_rows(self, stage: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters of the rows that this worker serves to all: views of the stage's own."""
        self._rows_served = own_rows(stage, self.serves)
        return self._rows_served

    def send_parameters(self, stage: nn.Module, served: Served) -> None:
        """As a server, give the workers their parameters."""
        if self.rank.pulls_now:
            self._server(stage).give_all(served, self.workers)

    def reduce_gradients(self, stage: nn.Module, served: Served) -> None:
        """As a server, leave the sum of the workers' gradients in `.grad`."""
        if self.rank.updates_now:
            self._server(stage).collect(served, self.workers)

    def start_pulls(self, stage: nn.Module, buckets: Sequence[Bucket]) -> None:
        """Let the parameters of all buckets begin to arrive; `pull` waits for one of them."""
        if self.rank.pulls_now:
            self._exchange_of(stage, buckets).start_pulls()

    def pull(self, bucket: int) -> None:
        """Wait for the parameters of a bucket, just before they are read."""
        if self._exchange is not None:
            self._exchange.pull(bucket)

    def pull_all(self, stage: nn.Module, buckets: Sequence[Bucket]) -> None:
        """Wait for all parameters before anything is computed."""
        if self.rank.pulls_now:
            self._exchange_of(stage, buckets).pull_all()

    @contextmanager
    def push(self, stage: nn.Module, buckets: Sequence[Bucket]) -> Iterator[None]:
        """Push each bucket of gradients once the backward inside has filled it.

        With several batches to an update, gradients add up here until the last one.
        """
        if not self.rank.updates_now:
            yield
            return
        with self._exchange_of(stage, buckets).while_backward():
            yield

    def push_all(self, stage: nn.Module, buckets: Sequence[Bucket]) -> None:
        """Push all gradients, after backward."""
        if self.rank.updates_now:
            self._exchange_of(stage, buckets).push_all()

    def _server(self, stage: nn.Module) -> Server:
        return Server(self.rank, {**dict(stage.named_parameters(remove_duplicate=False)), **self._rows_served})

    def _exchange_of(self, stage: nn.Module, buckets: Sequence[Bucket]) -> Exchange:
        if self._exchange is None or self._exchange.stage is not stage:
            self._exchange = Exchange(self.rank, stage, buckets, self.replicas, self._server(stage))
        return self._exchange

    # -- with everyone -------------------------------------------------------------------------------------------------

    def sum_loss(self, contribution: Tensor) -> Loss:
        """Start to sum the ranks' contributions to the loss; that of a group, which all its ranks have, counts once."""
        return self.rank.sum_loss(contribution if self._position == 0 else torch.zeros_like(contribution))

    def update(self) -> None:
        """Let the optimizer step on this role's parameters now, before the next turn."""
        self.rank.update(self.role)


def widths(features: int, parts: int) -> Sequence[int]:
    """How many of `features` each of `parts` ranks has; the first ones have one more where it does not divide."""
    small, extra = divmod(features, parts)
    return [small + (k < extra) for k in range(parts)]
