"""Local SGD: units train by themselves and average, as independent processes whose parameters are averaged by hand."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.errors import LaunchError, PlacementError
from splitc.ir.program import Program
from splitc.runtime.rounds.feature import InRounds
from splitc.runtime.worker import Worker
from tests.support.compiled import analyse, compiled
from tests.support.ranks import Net, adam, assert_same, batch_of, decaying, on_workers, part_of, sgd, train
from tests.support.sampling import along
from tests.support.units import plain_sgd, train_units

EXACT = 1e-9


class Counting(Net):
    """BatchNorm, a frozen layer, a tied weight and a buffer that counts."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(16, 16)
        self.again.weight = nn.Parameter(torch.randn(16, 16))
        self.twice = nn.Linear(16, 16)
        self.twice.weight = self.again.weight
        self.head[0].requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.double))

    def forward(self, images: Tensor) -> Tensor:
        self.steps.add_(1)
        hidden = self.head[0](self.features(images).flatten(1)) * (1 + 1 / (1 + self.steps))
        scores: Tensor = self.head[2](self.twice(self.again(hidden).relu()).relu())
        return scores


MODELS = {"net": lambda: Net(norm=False), "norm": Net, "counting": Counting}


@cache
def known(name: str) -> tuple[nn.Module, Program]:
    torch.manual_seed(1)
    model = MODELS[name]().double()
    return model, analyse(model, *batch_of(3, torch.double), F.cross_entropy)


def planned(name: str, strategy: str, world: int, **options: Any) -> CompiledProgram:
    model, program = known(name)
    return compiled(model, *batch_of(3, torch.double), F.cross_entropy, world, strategy, analysed=program, **options)


def doubles(examples: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    return [batch_of(examples, torch.double) for _ in range(steps)]


# -- a period of one update --------------------------------------------------------------------------------------------


@along(0, world=[3, 2, 4], name=["counting", "net"], accumulate=[2, 1])
def test_a_period_of_one_update_of_sgd_is_data_parallelism(name: str, world: int, accumulate: int) -> None:
    sizes = [2 + k for k in range(world)]
    batches = doubles(sum(sizes), 4)
    got = []
    for strategy in ("local_sgd(period=1)", "data_parallel"):
        program = planned(name, strategy, world)
        results = on_workers(
            program, lambda worker: train(worker, batches, sizes), optimizer=plain_sgd, accumulate=accumulate
        )
        got.append(results[0])
    (losses, state), (expected, other) = got
    assert other is not None and state is not None
    assert losses[accumulate - 1 :: accumulate] == pytest.approx(expected[accumulate - 1 :: accumulate], rel=EXACT)
    parameters = {key for key, _ in known(name)[0].named_parameters()}
    assert_same({k: state[k] for k in state if k in parameters}, {k: other[k] for k in other if k in parameters}, EXACT)


# -- longer periods ----------------------------------------------------------------------------------------------------


@along(0, lengths=[(3, 2, 5), (2, 3, 6), (4, 4, 3)], optimizer=[adam, decaying], name=["counting", "norm", "net"])
def test_training_is_that_of_processes_averaged_by_hand(
    name: str, lengths: tuple[int, int, int], optimizer: Any
) -> None:
    world, period, steps = lengths
    sizes = [2 + (k % 3) for k in range(world)]
    batches = doubles(sum(sizes), steps)
    program = planned(name, f"local_sgd(period={period})", world)
    results = on_workers(program, lambda worker: train(worker, batches, sizes), optimizer=optimizer)
    losses, state = train_units(known(name)[0], batches, [sizes] * steps, period, optimizer)
    assert_same(results[0][1], state, EXACT)
    for rank, (found, _) in enumerate(results):
        for k, value in enumerate(found):
            ends = (k + 1) % period == 0
            whole = sum(unit[k] * n for unit, n in zip(losses, sizes, strict=True)) / sum(sizes)
            assert value == pytest.approx(whole if ends else losses[rank][k], rel=EXACT)


def test_a_unit_clips_and_accumulates_its_own_gradients() -> None:
    batches, sizes = doubles(7, 8), [3, 4]
    options: dict[str, Any] = {"accumulate": 2, "clip_norm": 0.05}
    results = on_workers(
        planned("net", "local_sgd(period=2)", 2), lambda worker: train(worker, batches, sizes), **options
    )
    _, state = train_units(known("net")[0], batches, [sizes] * 8, 2, sgd, **options)
    assert_same(results[0][1], state, EXACT)


def test_batches_of_a_round_count_by_their_examples() -> None:
    many = [[1, 5], [4, 2], [3, 3], [2, 6]]
    batches = [batch_of(sum(sizes), torch.double) for sizes in many]

    def run(worker: Worker) -> dict[str, Tensor] | None:
        for batch, sizes in zip(batches, many, strict=True):
            worker.use_sizes(sizes)
            worker.step(*part_of(worker, batch, sizes))
        return worker.state_dict()

    got = on_workers(planned("net", "local_sgd(period=3)", 2), run)[0]
    assert_same(got, train_units(known("net")[0], batches, many, 3)[1], EXACT)


# -- the end of a round ------------------------------------------------------------------------------------------------


def _ended(worker: Worker, how: str, batch: tuple[Tensor, ...]) -> None:
    state = {key: tensor.clone() for key, tensor in known("norm")[0].state_dict().items()}
    match how:
        case "state_dict":
            worker.state_dict()
        case "evaluate":
            worker.evaluate(*batch)
        case "load_state_dict":
            worker.load_state_dict(state if worker.rank.index == 0 else None)
        case "end_round":
            worker.end_round()


@pytest.mark.parametrize("how", ["state_dict", "evaluate", "load_state_dict", "end_round"])
def test_a_running_round_ends_early(how: str) -> None:
    batches, sizes = doubles(6, 4), [3, 3]

    def run(worker: Worker) -> tuple[bool, dict[str, Tensor]]:
        for batch in batches:
            worker.step(*part_of(worker, batch, sizes))
        _ended(worker, how, part_of(worker, batches[0], sizes))
        (rounds,) = (feature for feature in worker._features if isinstance(feature, InRounds))
        return rounds.running, {key: tensor.clone() for key, tensor in worker.stage.state_dict().items()}

    results = on_workers(planned("norm", "local_sgd(period=3)", 2), run)
    expected = train_units(known("norm")[0], batches, [sizes] * 4, 3)[1]
    if how == "load_state_dict":
        expected = known("norm")[0].state_dict()
    for running, state in results:
        assert not running
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, expected[key], rtol=EXACT, atol=EXACT)


def test_a_round_that_ended_early_is_followed_by_a_whole_one() -> None:
    batches, sizes = doubles(6, 5), [3, 3]

    def run(worker: Worker) -> dict[str, Tensor] | None:
        train(worker, batches[:1], sizes)
        return train(worker, batches[1:], sizes)[1]

    got = on_workers(planned("net", "local_sgd(period=3)", 2), run, optimizer=plain_sgd)[0]
    model = copy.deepcopy(known("net")[0])
    model.load_state_dict(train_units(model, batches[:1], [sizes], 3, plain_sgd)[1])
    assert_same(got, train_units(model, batches[1:], [sizes] * 4, 3, plain_sgd)[1], EXACT)


# -- what units cannot train alike -------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, both: Tensor) -> Tensor:
        loss: Tensor = self.model(*both.split([8, 6], 1))
        return loss


def test_what_a_unit_of_one_rank_has_not_is_refused() -> None:
    for options, pins, why in (
        ("(sync_batchnorm=True)", {}, "sync_batchnorm"),
        ("(all_reduce=recursive_doubling)", {}, "all_reduce"),
        ("", {"head.0": "fc"}, "asks for role 'fc'"),
        ("(period=0)", {}, "period is 0"),
    ):
        with pytest.raises((PlacementError, LaunchError), match=why):
            planned("norm", f"local_sgd{options}", 2, pins=pins)


def test_a_worker_knows_how_far_a_round_and_an_update_are(tmp_path: Path) -> None:
    """So that a run which is asked to stop goes on to the end of it; saving ends a round, and the next one begins."""
    (batch,), sizes = doubles(7, 1), [3, 4]

    def run(worker: Worker) -> list[int]:
        worker.use_sizes(sizes)
        assert worker.cycle == (6, 0)
        seen = []
        for step in range(7):
            worker.step(*part_of(worker, batch, sizes))
            seen.append(worker.cycle[1])
            if step == 3:
                worker.save(tmp_path)
                seen.append(worker.cycle[1])
        return seen

    program = planned("net", "local_sgd(period=3)", 2)
    assert on_workers(program, run, accumulate=2) == [[1, 2, 3, 4, 0, 1, 2, 3]] * 2
