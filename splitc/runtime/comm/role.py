"""One role of a rank in its step, and the examples that it works on: what all parts of a communicator share.

Examples are counted in the compiled global batch; in a step of another batch size (the tail of an epoch) every boundary
moves with its reader's.  Where they lie, and which of them go to which rank, is computed once for all steps of a size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from ..collectives.deferred_gradients import DeferredGradients
from ..collectives.layouts import State
from ..collectives.model_parallel import Group
from ..pieces import Interval, indices, pieces_of
from ..spec import RankSpec, RoleSpec, Shard, StepContext
from ..transport.base import Transport
from ..transport.formats import EXACT
from ..transport.messages import Messages
from ..transport.short import Short

FACTORS = "factors"
"""The kind of what late-multiplied layers gather."""


class Leg(NamedTuple):
    """What goes to, or comes from, a rank of another role: examples of this rank's, from `first` on.

    columns: which of the parts of the features, and of how many; None: all features.
    """

    peer: int
    first: int
    number: int
    columns: tuple[int, int] | None


class Role:
    """One role of a rank.

    members: the ranks of its model-parallel group, or this rank alone.
    examples_of: rank of this role -> its examples of the compiled batch.
    group, replicas, everyone: among the members, the ranks that hold the same parameters, and all ranks of the role.
    optimizer_state: gives the state of a parameter; a worker with an optimizer puts its own in place.
    synchronised: normalisations whose statistics are of all replicas' examples.
    context: the step.  numbers: its seed, its number and its first example as a tensor (`seeded.kernels`).
    short: kind of payload -> its transport in a short format or in unequal shares, where it has one.
    drawn: (microbatch, own) -> the indices of the examples of the group, or of this rank's own.
    busy: its microbatches in which the group has examples; the first one where it has none in any.
    """

    def __init__(
        self,
        rank: RankSpec,
        spec: RoleSpec,
        messages: Messages,
        examples_of: Mapping[int, Interval],
        update: Callable[[str], None],
        deferred: DeferredGradients,
    ) -> None:
        """update, deferred: see `Rank`."""
        transport = messages.transport
        formats = {**asdict(rank.wire), FACTORS: rank.wire.factors}
        self.short = {kind: Short(transport, name) for kind, name in formats.items() if name != EXACT}
        if rank.sum_shares:
            self.short["gradients"] = Short(transport, rank.wire.gradients, rank.sum_shares)
        self.rank, self.spec, self.messages, self.transport = rank, spec, messages, transport
        self.members, self.examples_of = spec.group or (transport.rank,), examples_of
        self.update, self.deferred = update, deferred
        self.group = Group(transport, self.members, deferred, self.carrying)
        self.replicas = Group(transport, spec.replicas)
        self.everyone = Group(transport, spec.ranks or spec.replicas)
        self.optimizer_state: Callable[[nn.Parameter], MutableMapping[str, Any]] = lambda parameter: {}
        self.context = StepContext(rank.batch_offsets, rank.batch_offsets)
        self.synchronised: set[nn.Module] = set()
        members = [examples_of[member] for member in spec.group] or [spec.examples]
        bounds = [first for first, _ in members] + [members[-1][1]]
        self._compiled = self.pieces = pieces_of(spec.scheme, spec.microbatches, rank.batch_offsets, bounds)
        self.numbers, self.drawn = _numbers(self.context), dict[tuple[int | None, bool], Tensor]()
        self._moved()

    def begin(self, context: StepContext) -> None:
        """Begin a step: what is issued from now on belongs to it."""
        before, self.context = self.context, context
        self.numbers = _numbers(context)
        if context.offsets != before.offsets:
            self.pieces = replace(self._compiled, bounds=tuple(map(context.moved, self._compiled.bounds)))
            self._moved()

    def _moved(self) -> None:
        """Find the examples of the microbatches of a batch of this size."""
        self.busy = [k for k in range(self.pieces.number) if any(Examples(self, k).group_rows())] or [0]
        for k in (None, *self.busy):
            for own, ranks in ((False, self.members), (True, (self.transport.rank,))):
                found = (part for rank in ranks for part in Examples(self, k).intervals(rank))
                self.drawn[k, own] = indices(found, self.transport.device)

    @property
    def unit_examples(self) -> int:
        """Examples of a step that the ranks which train together have."""
        if not self.spec.unit:
            return self.context.offsets[-1]
        own = (self.examples_of[rank] for rank in self.spec.unit if rank in self.examples_of)
        intervals = (self.context.interval(examples) for examples in own)
        return sum(last - first for first, last in intervals)

    def carrying(self, kind: str) -> Transport:
        """The transport of payloads of a kind: a field of `Wire`, or what late-multiplied layers gather."""
        return self.short.get(kind, self.transport) if self.context.training else self.transport

    def among(self, own: bool) -> Group:
        """The ranks that sum over examples; own: that have their own, not those of their group."""
        return self.everyone if own else self.replicas


def _numbers(context: StepContext) -> Tensor:
    return torch.tensor((context.seed, context.number, context.first_example), device="cpu")


class Examples:
    """Those of a role in a microbatch, counted within it, or in all of the batch where `microbatch` is None."""

    def __init__(self, role: Role, microbatch: int | None = None) -> None:
        self.role, self.microbatch = role, microbatch
        self._of_sizes: object = None  # for which the tables are
        self._positions: dict[Interval, Interval] = {}
        self._legs: dict[tuple[str, str, str], list[Leg]] = {}

    @property
    def is_last(self) -> bool:
        """Whether no microbatch of this rank comes after this one."""
        return self.microbatch in (None, *self.role.busy[-1:])

    @property
    def sums_gradients(self) -> bool:
        """Whether what has added up is summed over ranks now: in the last one of an update."""
        ends = self.is_last or bool(self.role.spec.updated_every_microbatch)
        return ends and self.role.context.is_last

    @property
    def go_on(self) -> bool:
        """Whether other ranks may still wait for what this one sends of later microbatches."""
        return self.role.spec.microbatches > 1

    def way(self, role: str) -> tuple[str, str, int | None]:
        """What tells messages to a role from others, and from those of other microbatches."""
        return self.role.spec.role, role, self.microbatch

    def copies(self, module: nn.Module) -> dict[int, Tensor] | None:
        """What a module changes in all microbatches but the last, whose changes stay: see `own_code.with_copies`."""
        return None if self.is_last else self.role.context.copies.setdefault((id(module), self.microbatch), {})

    @property
    def own(self) -> Interval:
        """This rank's, first and one past the last."""
        return self.positions(self.role.spec.examples)

    def positions(self, examples: Interval) -> Interval:
        """Where examples of the compiled batch lie in this step's batch or, counted within it, in the microbatch."""
        self._for_this_size()
        if examples not in self._positions:
            own = self.role.context.interval(examples)
            self._positions[examples] = self.role.pieces.positions(own, self.microbatch)
        return self._positions[examples]

    def rows_of(self, ranks: Iterable[int], rows: int = 1) -> list[int]:
        """Rows that come from each of `ranks` of this role; an example has `rows` of them."""
        found = (self.positions(self.role.examples_of[rank]) for rank in ranks)
        return [(last - first) * rows for first, last in found]

    def group_rows(self, rows: int = 1) -> list[int]:
        """Rows that come from each member of the group."""
        return self.rows_of(self.role.members, rows)

    def span(self, state: str) -> Interval:
        """The examples that this rank has of a value in a state: its own, or its group's."""
        (first, _), (_, last) = (self.role.examples_of[self.role.members[k]] for k in (0, -1))
        return self.own if state == State.BATCH else self.positions((first, last))

    def legs(self, role: str, here: str, there: str) -> list[Leg]:
        """The way of a value, in state `here` in this rank's group, to the ranks of `role` and state `there`."""
        self._for_this_size()
        if (key := (role, here, there)) not in self._legs:
            self._legs[key] = list(self._found(*key))
        return self._legs[key]

    def _found(self, role: str, here: str, there: str) -> Iterable[Leg]:
        start, spec = self.span(here)[0], self.role.spec
        routes = (spec.routes if here == there else spec.group_routes)[role]
        for route in routes:
            first, last = self.positions(route.examples)
            group = [each.peer for each in routes if each.examples == route.examples]
            columns = (group.index(route.peer), len(group)) if there == State.FEATURES else None
            if first < last:  # else both sides know
                yield Leg(route.peer, first - start, last - first, columns)

    def _for_this_size(self) -> None:
        if self._of_sizes is not self.role.pieces:
            self._of_sizes, self._positions, self._legs = self.role.pieces, {}, {}

    def intervals(self, rank: int | None = None) -> list[Interval]:
        """A rank's examples of the microbatch, by default this one's, as counted in the batch."""
        compiled = self.role.spec.examples if rank is None else self.role.examples_of[rank]
        return self.role.pieces.examples(self.role.context.interval(compiled), self.microbatch)


@dataclass
class Part:
    """What generated code calls about one thing in a role and a microbatch; its public methods are a communicator's.

    kind: of the values that it is given, see `Wire`.
    """

    role: Role
    examples: Examples = field(init=False)
    kind: str = field(init=False, default="activations")

    def __post_init__(self) -> None:
        self.examples = Examples(self.role)

    @property
    def rows(self) -> Mapping[str, Shard]:
        """Parameter -> the rows of it that this rank updates for others too; none of those that it updates whole."""
        return {}

    def updated(self, stage: nn.Module) -> Mapping[str, nn.Parameter]:
        """Parameters that the optimizer has in place of those of the stage, which they are views of."""
        return {}

    def copies(self, stage: nn.Module) -> set[nn.Parameter]:
        """The parameters of which the stage has copies, which other ranks update."""
        return set()

    def within(self, examples: Examples, kind: str) -> Self:
        """The same in a microbatch, of values of a kind."""
        part = copy(self)
        part.examples, part.kind = examples, kind
        return part


def given(gradient: Tensor | None, examples: Examples, role: str, verb: str) -> Tensor:
    """The gradient, unless the backward before did not reach it."""
    if gradient is None:
        raise RuntimeError(
            f"rank {examples.role.transport.rank}: no gradient arrived for what role {role} {verb}; its stage does not "
            f"depend on it"
        )
    return gradient
