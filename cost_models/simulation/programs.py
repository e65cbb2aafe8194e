"""The operations of all ranks: generated for one rank of each kind, and re-addressed for the others.

Ranks are of one kind if they run the same actions on equally many examples, at the same position of their groups, on
one device, and their wires differ only in the ranks and rows of what they send.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from functools import cache

from splitc.cost_models.simulation.batches import Batch
from splitc.cost_models.simulation.operations import Begin, Compute, Operation, Transfer, Wait
from splitc.cost_models.simulation.prices import Prices
from splitc.cost_models.simulation.step_operations import Step
from splitc.ir.features import features
from splitc.ir.wire import wire
from splitc.ir.wire_op import WireOp


class Programs:
    """The operations of every simulated rank, step after step.  merge: join computations with nothing between them."""

    def __init__(self, prices: Prices, merge: bool) -> None:
        self._prices, self._merge, self._plan = prices, merge, prices.program.plan
        self.operations: list[list[Operation]] = [[] for _ in range(self._plan.world)]
        self._sizes = cache(self._plan.sizes)
        self._kinds = {rank: self._kind(rank) for rank in sorted(prices.ranks)}
        self._own: dict[int, dict[Transfer, Transfer]] = {
            rank: {} for rank in self._kinds
        }  # of the first of its kind -> of the rank

    def add(self, batch: Batch) -> None:
        """Append a step to every rank's operations."""
        self._prices.begin_step(batch.times)
        done: dict[Hashable, tuple[int, list[Operation], list[int]]] = {}
        for rank, kind in self._kinds.items():
            if kind not in done:
                first = Step(self._prices, rank, batch)
                operations = first.operations()
                found = list(_merged(operations)) if self._merge else operations
                done[kind] = rank, found, _positions(wire(self._prices.program, rank), first.begun)
                self.operations[rank] += found
            else:
                self.operations[rank] += self._readdressed(rank, *done[kind][1:])

    def _readdressed(self, rank: int, operations: list[Operation], positions: Iterable[int]) -> Iterator[Operation]:
        """Yield operations of another rank of its kind as those of `rank`.  positions: in the wire, of what begins."""
        own, ops, position = self._own[rank], wire(self._prices.program, rank), iter(positions)
        for each in operations:
            if isinstance(each, Begin):
                own[each.transfer] = transfer = self._prices.transfer(rank, ops[next(position)])
                yield Begin(transfer, each.nbytes)
            elif isinstance(each, Wait):
                yield Wait(tuple([own[transfer] for transfer in each.transfers]))
            else:
                yield each

    def _kind(self, rank: int) -> Hashable:
        plan, program = self._plan, self._prices.program
        groups = [(role, plan.group(role, rank)) for role in plan.roles_of(rank)]
        sizes = tuple((group.index(rank), *self._sizes(role, group[0])) for role, group in groups)
        ops = tuple(_without_ranks(op) for op in wire(program, rank))
        alone = rank if any(feature.is_apart(plan, rank) for feature in features()) else None
        name = program.rank_program(rank).name if plan.duties(rank) else ""
        return name, id(self._prices.cluster.device_of(rank)), sizes, alone, ops


def _without_ranks(op: WireOp) -> Hashable:
    p, others = op.payload, (op.shape, op.sent, op.times, len(op.ranks), op.form)
    return op.kind, p.what, p.name, p.role, p.peer, p.bucket, p.microbatch, others


def _positions(ops: Iterable[WireOp], begun: Iterable[WireOp]) -> list[int]:
    """Return where in a rank's wire each operation is that it begins."""
    places: dict[WireOp, list[int]] = {}
    for k, op in enumerate(ops):
        places.setdefault(op, []).append(k)
    return [places[op].pop(0) for op in begun]


def _merged(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield the operations without waits for nothing, and computations that follow each other as one."""
    name, seconds = "", 0.0
    for each in operations:
        if isinstance(each, Compute):
            name, seconds = name or each.name, seconds + each.seconds
        elif not isinstance(each, Wait) or each.transfers:
            if name:
                yield Compute(name, seconds)
            name, seconds = "", 0.0
            yield each
    if name:
        yield Compute(name, seconds)
