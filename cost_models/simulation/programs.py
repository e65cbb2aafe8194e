"""The operations of all simulated ranks, step after step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from splitc.cost_models.simulation.batches import Batch
from splitc.cost_models.simulation.operations import Compute, Operation, Wait
from splitc.cost_models.simulation.prices import Prices
from splitc.cost_models.simulation.step_operations import Step


def operations_of(prices: Prices, batches: Iterable[Batch], merge: bool) -> list[list[Operation]]:
    """The operations of every rank in these batches.  merge: join computations with nothing between them."""
    found: list[list[Operation]] = [[] for _ in range(prices.program.plan.world)]
    for batch in batches:
        prices.begin_step(batch.times)
        for rank in sorted(prices.ranks):
            operations = Step(prices, rank, batch).operations()
            found[rank] += _merged(operations) if merge else operations
    return found


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
