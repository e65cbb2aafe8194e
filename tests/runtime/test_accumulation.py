"""Several batches to an update: equal to one process that divides each loss by their number."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from splitc.errors import LaunchError
from splitc.ir.wire import wire
from splitc.ir.wire_op import What
from splitc.runtime.worker import Worker
from tests.support.ranks import (
    SEPARATION,
    STRATEGIES,
    Net,
    assert_same,
    batch_of,
    batches_for,
    compile_net,
    on_workers,
    one_process,
    plain,
    train,
)
from tests.support.sampling import sampled


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data_parallel", SEPARATION])
def test_the_batches_of_an_update_may_differ_in_size(strategy: str) -> None:
    model, program = plain(strategy)
    sizes = [[4, 4], [1, 3], [2, 1], [5, 6]]
    batches = [batch_of(sum(each)) for each in sizes]

    def run(worker: Worker) -> tuple[list[float], dict[str, Tensor] | None]:
        losses: list[float] = []
        for batch, each in zip(batches, sizes, strict=True):
            losses += train(worker, [batch], each)[0]
        return losses, worker.state_dict()

    results = on_workers(program, run, accumulate=2)
    losses, state = one_process(copy.deepcopy(model), batches, accumulate=2)
    assert results[-1][0] == pytest.approx(losses, rel=1e-5)
    assert_same(results[0][1], state)


@pytest.mark.parametrize("strategy", ["data_parallel", SEPARATION])
def test_gradients_travel_with_the_last_batch_only(strategy: str) -> None:
    _, program = plain(strategy)
    batches = batches_for(program, 3)

    def run(worker: Worker) -> list[int]:
        sent = [0]
        for batch in batches:
            train(worker, [batch])
            sent.append(worker.rank.sent_bytes)
        return [after - before for before, after in pairwise(sent)]

    for rank, (first, second, last) in enumerate(on_workers(program, run, accumulate=3)):
        ops = wire(program.program, rank)
        summed = sum(int(op.sent) for op in ops if op.payload.what is What.BUCKET)
        assert last == sum(int(op.sent) for op in ops)
        assert first == second == last - summed
        assert summed > 0 or strategy == SEPARATION


def test_what_is_no_number_of_batches_is_refused() -> None:
    _, program = plain()
    for given in (0, -1, 1.0, True, "2"):
        with pytest.raises(LaunchError, match=f"accumulate={given!r}: give a whole number of batches, at least 1"):
            on_workers(program, lambda worker: None, accumulate=given)


@pytest.mark.slow
@sampled("strategy", [SEPARATION, "data_parallel"], one_in=2)
def test_accumulated_batches_have_the_masks_of_one_batch_of_all_their_examples(strategy: str) -> None:
    model = Net(norm=False, drop=0.5).double()
    program = compile_net(model, strategy, STRATEGIES[strategy])
    batches = [batch_of(program.plan.global_batch, torch.float64) for _ in range(4)]
    whole = [tuple(torch.cat(pair) for pair in zip(*batches[k : k + 2], strict=True)) for k in (0, 2)]
    twice = [2 * size for size in program.plan.local_batches]

    def parts(worker: Worker) -> tuple[list[float], dict[str, Tensor] | None]:
        return train(worker, batches)

    def at_once(worker: Worker) -> tuple[list[float], dict[str, Tensor] | None]:
        return train(worker, whole, twice)

    _, accumulated = on_workers(program, parts, accumulate=2)[0]
    _, expected = on_workers(program, at_once)[0]
    assert expected is not None
    assert_same(accumulated, expected, tolerance=1e-11)
