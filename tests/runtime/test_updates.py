"""The norm of gradients, checks that they are finite, and the scale of the loss in float16."""

from __future__ import annotations

import copy
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.cost_models.memory.live_storage import HELD, LiveStorage
from splitc.errors import LaunchError, NonFiniteError
from splitc.runtime.updates import LossScale, Updates, clip, norm
from splitc.runtime.worker import Worker
from tests.support.compiled import compiled
from tests.support.every_strategy import analysed, images, planned
from tests.support.ranks import STRATEGIES, assert_same, batches_for, on_ranks, on_workers, part_of, plain, sgd
from tests.support.sampling import along, sampled

LAYOUTS = ["data_parallel", "layer_separation(n_c=2, n_f=1)", "modulo_shard(mp=3,scheme=B/K)", "parameter_server"]
F16 = torch.float16


@cache
def mixed(strategy: str) -> tuple[nn.Module, CompiledProgram]:
    """The small model in float16 on three ranks."""
    model, _ = analysed()
    x, y = images(4)
    return model, compiled(model, (x,), y, F.cross_entropy, 3, strategy, autocast=F16)


# -- norms -------------------------------------------------------------------------------------------------------------


@along(strategy=STRATEGIES, limit=[None, 0.05])
def test_the_norm_is_that_of_one_process_before_clipping(strategy: str, limit: float | None) -> None:
    model, program = plain(strategy)
    (batch,) = batches_for(program, 1)

    def run(worker: Worker) -> list[float]:
        worker.step(*part_of(worker, batch, program.plan.local_batches))
        return [float(worker.grad_norm()), float(worker.grad_norm())]

    model = copy.deepcopy(model)
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    expected = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    for found in on_workers(program, run, clip_norm=limit):
        assert found == pytest.approx([expected, expected], rel=1e-5)


def test_a_norm_is_in_float64_without_a_copy_of_a_gradient_and_clipping_keeps_their_dtypes() -> None:
    """Also of a layer whose gradient is a view in another order, of complex, of small and of no numbers."""
    random = torch.Generator().manual_seed(3)
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
    gradients = [torch.randn(7, 3, 2, 2, generator=random).to(dtype) for dtype in dtypes]
    gradients += [torch.randn(3000, 1000, generator=random).t(), torch.zeros(0), torch.tensor(5.0)]
    expected = sum(float(g.abs().double().square().sum()) for g in gradients) ** 0.5
    before, kept = [g.clone() for g in gradients], LiveStorage()
    total = torch.empty(())

    def run(transport: Any) -> None:
        nonlocal total
        kept.mark(gradients, HELD)
        with kept:
            total = norm(transport, gradients, (0,))
            clip(gradients, total, 2.0)

    on_ranks(1, run)
    assert kept.peak - kept.most[HELD] < 20_000
    assert total.dtype == torch.float64 and float(total) == pytest.approx(expected, rel=1e-12)
    for after, given in zip(gradients, before, strict=True):
        torch.testing.assert_close(after, given * (2.0 / (expected + 1e-6)))
    assert float(norm(on_ranks(1, lambda transport: transport)[0], [], (0,))) == 0


def test_overflows_are_found_in_any_dtype_and_place() -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
    good = [torch.full((3, 2), torch.finfo(dtype).max, dtype=dtype) for dtype in dtypes] + [torch.zeros(0)]
    updates = Updates(None, 1, None, True, None)  # type: ignore[arg-type]
    assert not updates._overflows(good)
    for k, bad in product(range(len(dtypes)), (float("inf"), float("-inf"), float("nan"))):
        gradients = [each.clone() for each in good]
        gradients[k][2, 1] = bad
        assert updates._overflows(gradients), (k, bad)


# -- what is not finite ------------------------------------------------------------------------------------------------


def spoilt(worker: Worker, program: CompiledProgram, batch: tuple[Tensor, ...], layer: str) -> str:
    """The error of a step in which the gradients of a layer become infinite, after which a right one follows."""
    own = part_of(worker, batch, program.plan.local_batches)
    worker.step(*own)
    hooks = [
        parameter.register_hook(lambda gradient: gradient * float("inf"))
        for name, parameter in worker.stage.named_parameters()
        if name.startswith(layer)
    ]
    before = {name: parameter.detach().clone() for name, parameter in worker.stage.named_parameters()}
    with pytest.raises(NonFiniteError) as error:
        worker.step(*own)
    assert all(torch.equal(p, before[name]) for name, p in worker.stage.named_parameters())
    for hook in hooks:
        hook.remove()
    assert torch.isfinite(worker.step(*own))
    assert worker.steps == 2
    return str(error.value)


@pytest.mark.parametrize("strategy", LAYOUTS[:2])
def test_gradients_that_are_not_finite_are_told_by_layer_and_rank_and_update_nothing(strategy: str) -> None:
    program = planned(3, strategy)
    batch = images(program.plan.global_batch)
    found = on_workers(program, lambda worker: spoilt(worker, program, batch, "fc8"), check_finite=True)
    rank = 0 if strategy == "data_parallel" else 2
    assert len(set(found)) == 1
    assert f", the gradients of fc8 on rank {rank} are not finite; no parameter was updated" in found[0]
    assert found[0].startswith("step 2: the loss is ")


def test_a_loss_that_is_not_finite_is_told_in_any_of_the_accumulated_batches() -> None:
    program = planned(2, "data_parallel")
    x, y = images(program.plan.global_batch)

    def run(worker: Worker) -> tuple[str, int]:
        good = part_of(worker, (x, y), program.plan.local_batches)
        bad = part_of(worker, (x * float("nan"), y), program.plan.local_batches)
        with pytest.raises(NonFiniteError) as error:
            worker.step(*bad)
        worker.step(*good)
        with pytest.raises(NonFiniteError, match="step 2: the loss is nan, the gradients of conv on rank 0 and of 3"):
            worker.step(*bad)
        assert worker.steps == 0  # the update begins anew
        worker.step(*good)
        worker.step(*good)
        return str(error.value), worker.steps

    for said, steps in on_workers(program, run, check_finite=True, accumulate=2):
        assert said.startswith("step 1: the loss is nan") and steps == 2


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_update_that_is_not_finite_is_left_out_and_nothing_remains_of_it(
    accumulate: int, capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3))
    x, y = torch.randn(8, 1, 8, 8), torch.arange(8) % 3
    program = compiled(model, x[:4], y[:4], F.cross_entropy, 2, "data_parallel")

    def run(worker: Worker, bad: bool) -> dict[str, Tensor] | None:
        own = part_of(worker, (x, y), program.plan.local_batches)
        for factor in [1.0] * accumulate + ([float("nan")] + [1.0] * (accumulate - 1)) * bad + [1.0] * accumulate:
            worker.step(own[0] * factor, own[1])
        assert worker.steps == accumulate * (2 + bad)
        return worker.state_dict()

    clean = on_workers(program, lambda worker: run(worker, False), accumulate=accumulate)[0]
    assert clean is not None
    found = on_workers(program, lambda worker: run(worker, True), accumulate=accumulate, check_finite="skip")[0]
    if accumulate == 1:
        assert_same(found, clean, 0)
    assert found is not None and all(bool(each.isfinite().all()) for each in found.values())
    said = capfd.readouterr().err
    assert said.startswith(f"left out: step {accumulate + 1}: the loss is nan, the gradients of ")


def test_another_policy_is_refused() -> None:
    with pytest.raises(LaunchError, match=r'check_finite=.stop.: give True, or "skip"'):
        on_workers(planned(2, "data_parallel"), lambda worker: None, check_finite="stop")


# -- the scale of the loss ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@sampled("strategy", LAYOUTS[::-1], one_in=4)
def test_parameters_are_those_of_torchs_scaler_in_one_process(strategy: str) -> None:
    model, program = mixed(strategy)
    sizes = program.plan.local_batches
    batch = images(sum(sizes))

    def run(worker: Worker) -> dict[str, Tensor] | None:
        for _ in range(4):
            worker.step(*part_of(worker, batch, sizes))
        return worker.state_dict()

    alone, scaler = copy.deepcopy(model), torch.amp.GradScaler("cpu")
    optimizer = sgd(alone.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", F16):
            loss = F.cross_entropy(alone(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_same(on_workers(program, run)[0], alone.state_dict(), tolerance=2e-3)


@pytest.mark.slow
@sampled("strategy", LAYOUTS[1:] + LAYOUTS[:1], one_in=4)
def test_all_ranks_skip_an_update_that_overflows_on_one_of_them(strategy: str) -> None:
    _, program = mixed(strategy)
    sizes = program.plan.local_batches
    batch = images(sum(sizes))
    batch[0][-1].mul_(3e4)  # an example of the last reader

    def run(worker: Worker) -> tuple[float, bool, float]:
        def parameters() -> list[Tensor]:
            return [p.detach().clone() for name, p in worker.stage.named_parameters() if name not in copies]

        copies = set(dict(worker.stage.named_parameters())) - {name for name, _ in worker._state.trained}
        before, own = parameters(), part_of(worker, batch, sizes)
        worker.step(*own)
        scale, same = worker.loss_scale, all(map(torch.equal, parameters(), before))
        for _ in range(30):
            if not worker._updates.overflow:
                break
            worker.step(*own)
        return scale, same, worker.loss_scale

    found = on_workers(program, run, optimizer=lambda params: torch.optim.SGD(params, lr=1e-9))
    assert len(set(found)) == 1
    assert found[0][:2] == (32768.0, True) and found[0][2] < 32768


@pytest.mark.slow
def test_a_dynamic_scale_is_that_of_torchs_scaler() -> None:
    ours, theirs = LossScale("dynamic"), torch.amp.GradScaler("cpu")
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    theirs.scale(torch.zeros(()))
    for overflow in [True, True, *[False] * 2003, True, *[False] * 2000]:
        parameter.grad = torch.tensor([float("inf") if overflow else 0.0])
        theirs.step(optimizer)
        theirs.update()
        ours.count(overflow)
        assert ours.value == theirs.get_scale()


def test_a_fixed_scale_stays_and_an_overflow_is_no_error_unless_checked() -> None:
    _, program = mixed("data_parallel")
    batch = images(program.plan.global_batch)

    def run(worker: Worker) -> float:
        before = [p.detach().clone() for p in worker.stage.parameters()]
        own = part_of(worker, batch, program.plan.local_batches)
        if worker._updates.check_finite:
            with pytest.raises(NonFiniteError, match="the gradients of conv on rank 0 and of 3 more layers"):
                worker.step(*own)
        else:
            worker.step(*own)
        assert all(map(torch.equal, worker.stage.parameters(), before))
        return worker.loss_scale

    for check in (False, True):
        assert on_workers(program, run, loss_scale=1e30, check_finite=check) == [1e30] * 3


@pytest.mark.parametrize(
    ("autocast", "given", "text"),
    [
        (F16, "static", "loss_scale='static': give \"dynamic\" or a number above 0"),
        (F16, 0.0, "loss_scale=0.0: give"),
        (None, 128.0, r"loss_scale=128.0: the program does not run in float16; compile with autocast=torch.float16"),
    ],
)
def test_a_scale_that_cannot_be_is_refused(autocast: torch.dtype | None, given: Any, text: str) -> None:
    program = mixed("data_parallel")[1] if autocast else planned(3, "data_parallel")
    with pytest.raises(LaunchError, match=text):
        on_workers(program, lambda worker: None, loss_scale=given)


def test_checkpoints_hold_the_scale(tmp_path: Path) -> None:
    _, program = mixed("layer_separation(n_c=2, n_f=1)")
    batch = images(program.plan.global_batch)
    batch[0].mul_(300)

    def run(worker: Worker) -> float:
        worker.step(*part_of(worker, batch, program.plan.local_batches))
        worker.save(tmp_path)
        return worker.loss_scale

    def again(worker: Worker) -> float:
        worker.resume(tmp_path)
        return worker.loss_scale

    scales = on_workers(program, run)
    assert max(scales) < 65536 and on_workers(program, again) == scales
