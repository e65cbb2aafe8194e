"""The communicator of one role of a rank: what generated code calls to exchange tensors with other ranks.

Examples are counted in the compiled global batch; in a step of another batch size (the tail of an epoch) every boundary
moves with its reader's.  A send starts at once and is waited for when an answer has come, or at the step's end: what
was sent must not change before.  Operations are issued in the order of the generated lines, so that the order checked
at compile time holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from .collectives import gradients
from .collectives.divided_layers import DividedLayers
from .collectives.gradients import Buckets, GradientSum
from .collectives.late_multiply import LateMultiply
from .collectives.layouts import Extents, State, Transition
from .collectives.loss import start_sum, target_weight
from .collectives.meanwhile import Meanwhile
from .collectives.model_parallel import Group, feature_widths
from .collectives.server_comm import ServerComm
from .collectives.sync_batch_norm import batch_norm
from .cut_comm import CutComm
from .pieces import pieces_of
from .rounds.averaging import Averages
from .rounds.comm import RoundComm
from .seeded.comm import SeededComm
from .seeded.draws import Draws
from .spec import RoleSpec, StepContext
from .transport.messages import Arriving, Messages


class RoleComm(CutComm, SeededComm, DividedLayers, ServerComm, RoundComm):
    """A rank's communicator in one role.  members: the ranks of its model-parallel group, or this rank alone.

    `comm[k]` is the communicator in microbatch k: the examples that it moves, counts and draws for are those of piece k
    of the batch.  `comm` itself has the whole batch.
    """

    def __init__(
        self,
        spec: RoleSpec,
        messages: Messages,
        context: StepContext,
        role_examples: Mapping[int, tuple[int, int]],
        update: Callable[[str], None],
        meanwhile: Meanwhile,
    ) -> None:
        """role_examples: rank of this role -> its examples of the compiled batch.  update, meanwhile: see `Rank`."""
        transport = messages.transport
        self.role, self.members = spec.role, spec.group or (transport.rank,)
        self._spec, self._messages, self._transport = spec, messages, transport
        self._role_examples, self._update = role_examples, update
        members = [role_examples[member] for member in spec.group] or [spec.examples]
        bounds = [first for first, _ in members] + [members[-1][1]]
        self._compiled_pieces = pieces_of(spec.scheme, spec.microbatches, context.compiled_offsets, bounds)
        self._piece: int | None = None
        self._busy = [0]
        self.begin(context)
        self._group = Group(transport, self.members, meanwhile)
        self._replicas, self._meanwhile = Group(transport, spec.replicas), meanwhile
        self._role = Group(transport, spec.ranks or spec.replicas)
        self._position = self._group.index
        self._late = LateMultiply(transport, spec.replicas)
        self._gradient_sums: dict[nn.Module, GradientSum] = {}
        self._served_buckets, self._served_parameters, self._subnets = {}, {}, {}
        self.averages = Averages(transport, spec.averaged, spec.through_server)
        self.optimizer_state = lambda parameter: {}

    def begin(self, context: StepContext) -> None:
        """Begin a step: what is issued from now on belongs to it."""
        self._context = context
        compiled = self._pieces = self._compiled_pieces
        if compiled.number > 1:
            self._pieces = replace(compiled, bounds=tuple(map(context.moved, compiled.bounds)))
            self._busy = [k for k in range(compiled.number) if any(self[k]._group_rows(1))] or [0]

    def __getitem__(self, microbatch: int) -> RoleComm:
        piece = copy(self)
        piece._piece = microbatch
        return piece

    @property
    def _unit_examples(self) -> int:
        """Examples of a step that the ranks which train together have; all where there are no rounds."""
        if not self._spec.unit:
            return self._context.offsets[-1]
        intervals = (self._context.interval(self._role_examples[rank]) for rank in self._spec.unit)
        return sum(last - first for first, last in intervals)

    @property
    def examples(self) -> tuple[int, int]:
        """This rank's examples, first and one past the last, as counted in the global batch or in the microbatch."""
        return self._positions(self._spec.examples)

    def _positions(self, examples: tuple[int, int]) -> tuple[int, int]:
        """Where examples of the compiled batch lie in this step's batch or, counted within it, in the microbatch."""
        return self._pieces.positions(self._context.interval(examples), self._piece)

    def _rows_of(self, ranks: Iterable[int], rows: int) -> list[int]:
        """Rows that come from each of `ranks` of this role; an example has `rows` of them."""
        return [(last - first) * rows for first, last in (self._positions(self._role_examples[r]) for r in ranks)]

    def _group_rows(self, rows: int) -> list[int]:
        """Rows that come from each member of the group."""
        return self._rows_of(self.members, rows)

    def microbatches(self) -> list[int]:
        """Those of a step in which this rank's group has examples; the first one where it has none in any."""
        return self._busy

    def piece(self, value: Tensor, dim: int = 0, rows: int = 1) -> Tensor:
        """The microbatch's examples of a value that has all examples of this rank."""
        own = self._context.interval(self._spec.examples)
        parts = [
            value.narrow(dim, (first - own[0]) * rows, (last - first) * rows)
            for first, last in self._pieces.examples(own, self._piece)
        ]
        return parts[0] if len(parts) == 1 and not dim else torch.cat(parts or [value.narrow(dim, 0, 0)], dim)

    @property
    def _is_last(self) -> bool:
        """Whether no microbatch of this rank comes after this one."""
        return self._piece in (None, *self._busy[-1:])

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
        value, transition = self._arrived(value, self.role, "gathered"), Transition(State(source), State(target))
        return self._group.start(value, transition, self._extents(features, dim, rows))

    def _extents(self, features: int, dim: int, rows: int) -> Extents:
        """How the group divides a value of the microbatch."""
        return Extents(tuple(self._group_rows(rows)), tuple(feature_widths(features, len(self.members))), dim)

    def _moved(
        self, value: Tensor | None, source: State, target: State, features: int = 0, dim: int = 0, rows: int = 1
    ) -> Tensor:
        """A value in another state, as the group divides it."""
        value = self._arrived(value, self.role, "gathered")
        return self._group.transition(value, Transition(source, target), self._extents(features, dim, rows))

    @contextmanager
    def all_reduce(self, stage: nn.Module, buckets: Buckets) -> Iterator[None]:
        """Sum the gradients of `stage` over the replicas; each bucket starts once the backward inside has filled it.

        Over microbatches and accumulated batches gradients add up, and are summed over the replicas in the last one.
        """
        if not self._context.is_last or not (self._is_last or self._spec.updated_every_microbatch):
            yield
            return
        if stage not in self._gradient_sums:
            self._gradient_sums[stage] = GradientSum(stage, buckets, self._spec.all_reduce)
        own = self._spec.own_sums
        ranks = [self._role.ranks if bucket[0] in own else self._replicas.ranks for bucket in buckets]
        later = self._spec.microbatches > 1  # ranks may wait for what this one sends next before they join
        with self._gradient_sums[stage].while_backward(self._transport, ranks, later):
            yield
            self._meanwhile.finish()
        if later:
            self._messages.at_end(self._gradient_sums[stage].finish)

    def summed(self, stage: nn.Module) -> set[nn.Parameter]:
        """The parameters whose gradients buckets sum."""
        return self._gradient_sums[stage].parameters if stage in self._gradient_sums else set()

    def all_reduce_tied(self, stage: nn.Module, tied: Mapping[str, tuple[int, ...]]) -> None:
        """Sum the gradients of parameters that several roles use over all ranks that hold a copy of them."""
        if self._context.is_last:
            gradients.all_reduce_tied(self._transport, stage, tied)

    def late_multiply(self, value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer whose weight gradient is computed from all replicas' inputs and output errors."""
        first, last = self.examples
        rows = self._rows_of(self._spec.replicas, own := value[..., 0].numel() // max(last - first, 1))
        if not all(examples := self._rows_of(self._spec.replicas, 1)):  # then one without knows no rows of an example
            each = self._replicas.all_reduce_scalar(torch.tensor(own, device=value.device))
            rows = [number * (int(each) // (len(rows) - examples.count(0))) for number in examples]
        return self._late.linear(value, weight, bias, rows=rows, is_last=self._is_last)

    def linear(self, value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer whose weight's gradient is computed while gradients of values travel."""
        return self._meanwhile.linear(value, weight, bias)

    def multiply(self) -> None:
        """Compute the gradients of late-multiplied layers, after the last microbatch: W' = E^T X."""
        if self._is_last:
            self._late.finish()

    def batch_norm(self, value: Tensor, module: nn.modules.batchnorm._BatchNorm, own: bool = False) -> Tensor:
        """BatchNorm `module` over the examples of all replicas; own: as of `all_reduce_scalar`."""
        return batch_norm(self._role if own else self._replicas, value, module)

    def all_reduce_scalar(self, value: Tensor, own: bool = False) -> Tensor:
        """A scalar without gradient, summed over the replicas: the denominator of a weighted mean.

        own: it is of this rank's own examples, not of its group's, and summed over all ranks of the role.
        """
        return (self._role if own else self._replicas).all_reduce_scalar(value)

    def global_weight(
        self, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100, own: bool = False
    ) -> Arriving:
        """Start to sum the weights of all replicas' targets: what a weighted mean over the global batch divides by."""
        total = target_weight(target, weight, ignore_index)
        return start_sum(self._transport, total, (self._role if own else self._replicas).ranks, total.dtype)

    def scale_by_share(self, value: Tensor, own: bool = False) -> Tensor:
        """`value` times the fraction of the batch that it was computed from: the means then sum to the mean.

        The batch is that of all ranks that train together.  own: it was this rank's own examples, not its group's.
        """
        rows = self._group_rows(1)
        share = (rows[self._position] if own else sum(rows)) / max(self._unit_examples, 1)
        return value * share if share else value.nan_to_num() * 0.0  # the mean of no examples is not a number

    def _draws(self, own: bool = False) -> Draws:
        before, members = self._context.first_example, (self._transport.rank,) if own else self.members
        whole = (self._context.interval(self._role_examples[member]) for member in members)
        parts = (part for each in whole for part in self._pieces.examples(each, self._piece))
        return Draws(self._context.seed, self._context.number, [(before + a, before + b) for a, b in parts])

    def store_buffer(self, buffer: Tensor, value: Tensor) -> None:
        """Let a buffer have `value` after the step; all microbatches and roles of a rank compute the same one."""
        self._context.stored.append((buffer, value.detach()))

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss that backward begins with, in float16."""
        return loss * self._context.loss_scale

    def autocast(self, dtype: torch.dtype) -> torch.autocast:
        """Around a stage's forward: the mixed precision that the program was captured with."""
        return torch.autocast(self._transport.device.type, dtype)

    def sum_loss(self, contribution: Tensor, own: bool = False) -> Arriving:
        """Start to sum the loss over all ranks; that of a group, which all its ranks have, counts once.

        own: it is of this rank's own examples, and counts anyway.
        Within a round over those that train together, at its end the mean of theirs, weighted by examples.
        """
        counted = contribution if self._position == 0 or own else torch.zeros_like(contribution)
        if self._spec.unit and self._context.training and not self._context.ends_round:
            return start_sum(self._transport, counted, self._spec.unit)
        return start_sum(self._transport, counted * (self._unit_examples / self._context.offsets[-1]))

    def update(self) -> None:
        """Let the optimizer update this role's parameters now, before the next microbatch."""
        self._meanwhile.finish()
        self._update(self.role)


def _whole(partial: bool) -> State:
    """The state of a whole value, of which each rank's readers compute a part, or all."""
    return State.DIVIDED if partial else State.REPLICATE
