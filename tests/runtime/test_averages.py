"""Moving averages of the parameters, in every layout as of one process."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from splitc.compiled import CompiledProgram
from splitc.errors import LaunchError
from splitc.runtime.worker import Worker
from tests.support.every_strategy import analysed, images, planned
from tests.support.ranks import adam, assert_same, on_workers, part_of
from tests.support.sampling import sampled

LAYOUTS = ["data_parallel", "layer_separation(n_c=2, n_f=1)", "modulo_shard(mp=3,scheme=B/K)", "parameter_server"]
BATCHES = [images(12) for _ in range(4)]


def trained(worker: Worker, program: CompiledProgram, batches: list[Any]) -> None:
    sizes = [12 // worker.data_world] * worker.data_world
    worker.use_sizes(sizes)
    for batch in batches:
        worker.step(*part_of(worker, batch, sizes))


def expected(batches: list[Any]) -> dict[str, Tensor]:
    """Of torch's AveragedModel, which had taken in the initial parameters."""
    model = copy.deepcopy(analysed()[0])
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(model)
    optimizer = adam(list(model.named_parameters()))
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        averaged.update_parameters(model)
    return dict(averaged.module.state_dict())


@sampled("strategy", LAYOUTS, one_in=4)
def test_averages_are_those_of_torch_in_one_process(strategy: str) -> None:
    program = planned(3, strategy)
    batch = BATCHES[0]

    def run(worker: Worker) -> tuple[Any, ...]:
        trained(worker, program, BATCHES)
        own = part_of(worker, batch, [12 // worker.data_world] * worker.data_world)
        before, loss = worker.state_dict(), worker.evaluate(*own)
        with worker.averaged():
            found = worker.state_dict(), worker.evaluate(*own), worker.predict(*own)
        after = worker.state_dict()
        assert worker.evaluate(*own) == loss
        if before is not None and after is not None:
            assert_same(after, before, tolerance=0)
        return found

    results = on_workers(program, run, optimizer=adam, ema=0.9)
    wanted = expected(BATCHES)
    assert_same(results[0][0], wanted)
    model = copy.deepcopy(analysed()[0])
    model.load_state_dict(wanted)
    scores = model.eval()(batch[0])
    torch.testing.assert_close(torch.cat([r[2] for r in results if r[2] is not None]), scores, rtol=1e-4, atol=1e-5)
    assert float(results[0][1]) == pytest.approx(float(F.cross_entropy(scores, batch[1]).detach()), rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the checkpoint was made with global batches")
@sampled(("before", "after"), [(LAYOUTS[3], LAYOUTS[1]), (LAYOUTS[1], LAYOUTS[2])], one_in=2)
def test_checkpoints_hold_averages_for_any_plan(before: str, after: str, tmp_path: Path) -> None:
    first, second = planned(3, before), planned(3, after)

    def start(worker: Worker) -> None:
        trained(worker, first, BATCHES[:2])
        worker.save(tmp_path)

    def go_on(worker: Worker) -> Any:
        worker.resume(tmp_path)
        trained(worker, second, BATCHES[2:])
        with worker.averaged():
            return worker.state_dict()

    on_workers(first, start, optimizer=adam, ema=0.9)
    assert_same(on_workers(second, go_on, optimizer=adam, ema=0.9)[0], expected(BATCHES), tolerance=1e-4)


def test_averages_begin_with_the_parameters_that_were_loaded(tmp_path: Path) -> None:
    program = planned(3, "data_parallel")

    def without(worker: Worker) -> Any:
        trained(worker, program, BATCHES[:2])
        worker.save(tmp_path)
        return worker.state_dict()

    state = on_workers(program, without, optimizer=adam)[0]

    def resumed(worker: Worker) -> Any:
        worker.resume(tmp_path)
        with worker.averaged():
            return worker.state_dict()

    def loaded(worker: Worker) -> Any:
        worker.load_state_dict(state)
        with worker.averaged():
            return worker.state_dict()

    for run in (resumed, loaded):
        assert_same(on_workers(program, run, optimizer=adam, ema=0.9)[0], state, tolerance=0)


@pytest.mark.slow
def test_what_a_resumed_run_drops_or_begins_anew_is_named(tmp_path: Path) -> None:
    program = planned(3, "layer_separation")

    def averaging(worker: Worker) -> None:
        trained(worker, program, BATCHES[:1])
        worker.save(tmp_path)

    def resumed(worker: Worker) -> None:
        worker.register(counter=torch.nn.BatchNorm1d(1))
        worker.resume(tmp_path)

    on_workers(program, averaging, optimizer=adam, ema=0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_workers(program, resumed, optimizer=adam)
    assert [str(each.message) for each in caught] == [
        "the checkpoint has averages of the parameters, which this run drops; give ema= to keep them",
        "counter: the checkpoint has none of it, so it begins anew",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_workers(program, lambda worker: worker.resume(tmp_path), optimizer=adam, ema=0.9)


def test_averages_that_cannot_be_are_refused() -> None:
    program = planned(2, "data_parallel")

    def without(worker: Worker) -> None:
        assert worker.averages == {}
        with pytest.raises(LaunchError, match=r"no averages: give ema=0.999"), worker.averaged():
            pass

    def waiting(worker: Worker) -> None:
        worker.step(*part_of(worker, images(program.plan.global_batch), program.plan.local_batches))
        with pytest.raises(LaunchError, match="1 accumulated batches wait for their update"), worker.averaged():
            pass

    on_workers(program, without)
    on_workers(program, waiting, ema=0.9, accumulate=2)
    with pytest.raises(LaunchError, match="ema=1: give the weight of the average, from 0 to below 1"):
        on_workers(program, without, ema=1)
    with pytest.raises(LaunchError, match="in rounds of local updates each unit has parameters of its own"):
        on_workers(planned(2, "local_sgd"), without, ema=0.9)
