"""Several batches to an update: equal to one process that divides each loss by their number."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

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
    adam,
    assert_same,
    batch_of,
    batches_for,
    compile_net,
    decaying,
    on_workers,
    one_process,
    part_of,
    plain,
    sgd,
    train,
)
from tests.support.sampling import sampled


@pytest.mark.parametrize("strategy", STRATEGIES)
@sampled("optimizer", [sgd, decaying, adam], everyday=[adam])
@sampled("accumulate", [2, 3], everyday=[3])
def test_training_is_that_of_one_process_that_divides_each_loss(strategy: str, optimizer: Any, accumulate: int) -> None:
    model, program = plain(strategy)
    batches = batches_for(program, 2 * accumulate)
    results = on_workers(program, lambda worker: train(worker, batches), optimizer=optimizer, accumulate=accumulate)
    losses, state = one_process(copy.deepcopy(model), batches, optimizer, accumulate=accumulate)
    for got, _ in results:
        assert got == pytest.approx(losses, rel=1e-5)  # each batch's own, not divided
    assert_same(results[0][1], state)


@pytest.mark.parametrize("limit", [0.05, 1e3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@sampled("optimizer", [sgd, adam], everyday=[adam])
def test_what_is_clipped_is_the_gradient_of_the_whole_update(strategy: str, limit: float, optimizer: Any) -> None:
    model, program = plain(strategy)
    batches = batches_for(program, 4)
    results = on_workers(
        program, lambda worker: train(worker, batches), optimizer=optimizer, accumulate=2, clip_norm=limit
    )
    _, state = one_process(copy.deepcopy(model), batches, optimizer, clip_norm=limit, accumulate=2)
    assert_same(results[0][1], state)


@pytest.mark.parametrize("strategy", ["data_parallel", SEPARATION])
def test_in_double_precision_it_agrees_to_the_last_digits(strategy: str) -> None:
    model = Net(norm=False, drop=0.0).double()
    program = compile_net(model, strategy, STRATEGIES[strategy])
    batches = [batch_of(program.plan.global_batch, torch.float64) for _ in range(6)]

    def run(worker: Worker) -> tuple[list[float], dict[str, Tensor] | None]:
        return train(worker, batches)

    results = on_workers(program, run, optimizer=adam, accumulate=3, clip_norm=0.5)
    losses, state = one_process(copy.deepcopy(model), batches, adam, clip_norm=0.5, accumulate=3)
    assert results[-1][0] == pytest.approx(losses, rel=1e-13)
    assert_same(results[0][1], state, tolerance=1e-11)


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


def test_parameters_move_only_with_the_last_batch_of_an_update_also_around_an_evaluation() -> None:
    _, program = plain()
    batches = batches_for(program, 4)

    def run(worker: Worker) -> list[bool]:
        moved = []
        for batch in batches:
            before = [p.detach().clone() for p in worker.stage.parameters()]
            worker.step(*part_of(worker, batch, (4, 4)))
            worker.evaluate(*part_of(worker, batch, (4, 4)))
            after = worker.stage.parameters()
            moved.append(not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        return moved

    assert on_workers(program, run, accumulate=2) == [[False, True, False, True]] * 3


def test_an_evaluation_between_the_batches_of_an_update_changes_nothing() -> None:
    _, program = plain()
    batches = batches_for(program, 4)

    def with_evaluation(worker: Worker) -> dict[str, Tensor] | None:
        for batch in batches:
            train(worker, [batch])
            worker.evaluate(*part_of(worker, batch, (4, 4)))
        return worker.state_dict()

    state = on_workers(program, with_evaluation, accumulate=2)[0]
    expected = on_workers(program, lambda worker: train(worker, batches), accumulate=2)[0][1]
    assert expected is not None
    assert_same(state, expected, tolerance=0.0)


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


def test_the_gradients_that_a_worker_shows_are_the_mean_over_the_batches() -> None:
    model, program = plain("data_parallel")
    batches = batches_for(program, 2)

    def run(worker: Worker) -> dict[str, Tensor]:
        train(worker, batches)
        return {name: gradient.clone() for name, gradient in worker.gradients().items()}

    alone = copy.deepcopy(model)
    one_process(alone, batches, accumulate=2)
    for gradients in on_workers(program, run, accumulate=2):
        assert gradients
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, alone.get_parameter(name).grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulate", [0, -1, 1.0, True, "2"])
def test_what_is_no_number_of_batches_is_refused(accumulate: Any) -> None:
    _, program = plain()
    with pytest.raises(LaunchError, match=f"accumulate={accumulate!r}: give a whole number of batches, at least 1"):
        on_workers(program, lambda worker: None, accumulate=accumulate)


@pytest.mark.parametrize("strategy", ["data_parallel", SEPARATION])
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
