"""Training that goes on from a checkpoint is that which made it, bit for bit; an exported file has the whole model."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from splitc.compiled import CompiledProgram
from splitc.errors import LaunchError
from splitc.ir.placements import Placement
from splitc.runtime.worker import Worker
from tests.support.compiled import compiled
from tests.support.every_strategy import Small, images, planned
from tests.support.ranks import SEPARATION, Net, adam, batch_of, compile_net, on_workers, part_of
from tests.support.run_state import run_state
from tests.support.sampling import sampled

Batches = Sequence[tuple[Tensor, ...]]


def steps(worker: Worker, batches: Batches) -> list[float]:
    sizes = [last - first for first, last in pairwise(worker.rank.spec.batch_offsets)]
    return [float(worker.step(*part_of(worker, batch, sizes))) for batch in batches]


def after(worker: Worker, losses: list[float]) -> tuple[list[float], Any]:
    """The losses, and copies of all that later steps depend on."""
    return losses, run_state(worker)


def assert_equal(got: Any, expected: Any) -> None:
    """Bit for bit."""
    match expected:
        case Tensor():
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
            assert torch.equal(got, expected)
        case dict():
            assert list(got) == list(expected)
            for key in expected:
                assert_equal(got[key], expected[key])
        case list() | tuple():
            assert len(got) == len(expected)
            for one, other in zip(got, expected, strict=True):
                assert_equal(one, other)
        case _:
            assert got == expected


def assert_goes_on(program: CompiledProgram, batches: Batches, folder: Path, **options: Any) -> None:
    """Training on after half of the batches, and from a checkpoint made there, is the same."""
    half = len(batches) // 2

    def at_once(worker: Worker) -> Any:
        steps(worker, batches[:half])
        worker.save(folder)
        return after(worker, steps(worker, batches[half:]))

    def resumed(worker: Worker) -> Any:
        assert worker.resume(folder) == half
        return after(worker, steps(worker, batches[half:]))

    expected = on_workers(program, at_once, **options)
    assert_equal(on_workers(program, resumed, **options), expected)


def batches_of(program: CompiledProgram, number: int = 6) -> Batches:
    return [images(program.plan.global_batch) for _ in range(number)]


def nadam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, lr=0.01)


def asgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.ASGD(params, lr=0.01, t0=2)


RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "data_parallel": (3, {"accumulate": 2, "clip_norm": 0.1, "seed": 7}),
    SEPARATION: (3, {"accumulate": 2}),
    "parameter_server": (3, {"accumulate": 2}),
    "modulo_shard(mp=2,scheme=B/K,updates=every)": (2, {}),
    "local_sgd(period=2)": (2, {}),
}
"""Strategy -> ranks and options: half of the batches end within an update, and within a round."""


@sampled("strategy", RUNS, one_in=3, whole=True)
def test_training_goes_on_bit_for_bit_from_a_checkpoint(strategy: str, tmp_path: Path) -> None:
    world, options = RUNS[strategy]
    program = planned(world, strategy, norm=True)
    assert_goes_on(program, batches_of(program), tmp_path, **options)


@pytest.mark.slow
def test_dropout_goes_on_with_the_masks_of_the_steps_to_come(tmp_path: Path) -> None:
    program = compile_net(Net(drop=0.5))
    assert_goes_on(program, [batch_of(program.plan.global_batch) for _ in range(4)], tmp_path)


@pytest.mark.slow
def test_numbers_in_the_optimizer_keep_their_precision(tmp_path: Path) -> None:
    program = planned(2, "data_parallel", torch.float64)
    batches = [images(program.plan.global_batch, torch.float64) for _ in range(6)]
    for optimizer in (nadam, asgd):
        assert_goes_on(program, batches, tmp_path / optimizer.__name__, optimizer=optimizer)


def test_a_rate_that_was_set_by_hand_goes_on_under_any_plan(tmp_path: Path) -> None:
    def saved(worker: Worker) -> None:
        assert worker.optimizer is not None
        worker.optimizer.param_groups[0]["lr"] = 0.025
        worker.save(tmp_path)

    def resumed(worker: Worker) -> float:
        worker.resume(tmp_path)
        assert worker.optimizer is not None
        return float(worker.optimizer.param_groups[0]["lr"])

    on_workers(small(), saved)
    for strategy in ("data_parallel", "late_multiply"):
        assert on_workers(small(strategy), resumed) == [0.025, 0.025]


@pytest.mark.slow
def test_a_checkpoint_is_read_by_torch_alone_under_the_models_names(tmp_path: Path) -> None:
    program = planned(2, "modulo_shard(mp=2)", pins={"fc*": Placement(holding="sharded", group=2, split="columns")})

    def run(worker: Worker) -> dict[str, Tensor] | None:
        steps(worker, batches_of(program, 1))
        worker.save(tmp_path / "run")
        return worker.state_dict()

    whole = on_workers(program, run)[0]
    assert whole is not None
    dcp_to_torch_save(tmp_path / "run" / "step-000001", tmp_path / "whole.pt")
    saved = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert_equal({name: saved["model"][name] for name in whole}, whole)
    assert saved["model"].keys() == whole.keys()
    trained = {name for name, parameter in Small().named_parameters()}
    assert saved["optimizer"].keys() == trained
    for name in trained:
        assert saved["optimizer"][name]["momentum_buffer"].shape == whole[name].shape


# -- refusals ----------------------------------------------------------------------------------------------------------


@cache
def small(strategy: str = "data_parallel", world: int = 2) -> CompiledProgram:
    return planned(world, strategy)


def saved_run(folder: Path, **options: Any) -> None:
    def run(worker: Any) -> None:
        steps(worker, batches_of(small(), 1))
        worker.save(folder)

    on_workers(small(), run, **options)


OTHER_RUNS: list[tuple[str, int, dict[str, Any], str]] = [
    ("data_parallel", 2, {"seed": 4}, "seed: the checkpoint has 0, this run 4"),
    ("data_parallel", 2, {"accumulate": 2}, "accumulate: the checkpoint has 1, this run 2"),
    ("data_parallel", 3, {"clip_norm": 0.5}, "clip_norm: the checkpoint has None, this run 0.5"),
    ("late_multiply", 2, {"optimizer": adam}, "optimizer: the checkpoint has SGD, this run Adam"),
    ("local_sgd(period=2)", 2, {}, "rounds of local updates go on under their own plan only"),
]


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_refused_on_every_rank_and_changes_nothing(tmp_path: Path) -> None:
    saved_run(tmp_path)

    def run(worker: Worker) -> str:
        before = run_state(worker)
        with pytest.raises(LaunchError) as caught:
            worker.resume(tmp_path)
        assert_equal(run_state(worker), before)
        return str(caught.value)

    for strategy, world, options, problem in OTHER_RUNS:
        (text,) = set(on_workers(small(strategy, world), run, **options))
        first, *rest = text.splitlines()
        assert "training cannot go on from this checkpoint, and nothing was changed" in first
        assert all(problem in line for line in rest), text


def test_another_plan_goes_on_between_updates_only(tmp_path: Path) -> None:
    saved_run(tmp_path, accumulate=2)

    def run(worker: Worker) -> None:
        with pytest.raises(LaunchError, match="after 1 batches, of which 2 make an update"):
            worker.resume(tmp_path)

    on_workers(small("late_multiply"), run, accumulate=2)


@pytest.mark.slow
def test_tensors_that_differ_are_named_with_their_shapes(tmp_path: Path) -> None:
    saved_run(tmp_path)
    model = Small()
    model.fc6, model.fc7 = nn.Linear(27, 12), nn.Linear(12, 13, bias=False)
    other = compiled(model, (images(4)[0],), images(4)[1], F.cross_entropy, 2, "data_parallel")

    def run(worker: Worker) -> str:
        with pytest.raises(LaunchError) as caught:
            worker.resume(tmp_path)
        return str(caught.value)

    (text,) = set(on_workers(other, run))
    assert text.splitlines()[1:] == [
        "  - it is not of the same model:",
        "  - fc6.weight: the checkpoint has (14, 27) float32, this run (12, 27) float32",
        "  - fc6.bias: the checkpoint has (14,) float32, this run (12,) float32",
        "  - fc7.weight: the checkpoint has (13, 14) float32, this run (13, 12) float32",
        "  - fc7.bias: the checkpoint has it, this run has none of its own",
    ]


def test_a_folder_without_a_checkpoint_is_named_and_not_made(tmp_path: Path) -> None:
    def run(worker: Worker) -> None:
        with pytest.raises(LaunchError, match="nothing has no checkpoint"):
            worker.resume(tmp_path / "nothing")
        with pytest.raises(LaunchError, match="has no checkpoint after step 7"):
            worker.resume(tmp_path / "step-000007")

    on_workers(small(), run)
    assert list(tmp_path.iterdir()) == []


def refused(worker: Worker, folder: Path) -> str:
    with pytest.raises(LaunchError) as caught:
        worker.save(folder)
    return str(caught.value)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    for text in on_workers(small(), lambda worker: refused(worker, tmp_path)):
        assert "thesis.tex is no checkpoint of a run" in text
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_could_not_be_read_again_is_refused_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    saved_run(tmp_path / "run")

    def run(worker: Worker) -> str:
        worker.resume(tmp_path / "run")
        assert worker.optimizer is not None
        if worker.rank.index == 1:
            worker.optimizer.param_groups[0]["shape"] = nn.Linear(1, 1)
        return refused(worker, tmp_path / "run")

    assert all("no checkpoint was written" in text and "rank 1: " in text for text in on_workers(small(), run))
    assert on_workers(small(), lambda worker: worker.resume(tmp_path / "run")) == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("call", "survived"), [("rename", 0), ("rmtree", 0), ("rename", 1), ("rename", 2)])
def test_a_process_killed_while_it_saves_leaves_the_last_checkpoint_or_the_new_one(
    call: str, survived: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_run(tmp_path / "run")
    owner: Any = Path if call == "rename" else shutil
    real, calls = getattr(owner, call), iter(range(100))

    def killed(*arguments: Any, **options: Any) -> Any:
        if next(calls) >= survived:
            raise InterruptedError
        return real(*arguments, **options)

    def run(worker: Worker) -> None:
        worker.resume(tmp_path / "run")
        steps(worker, batches_of(small(), 1))
        with suppress(LaunchError):
            worker.save(tmp_path / "run")

    with monkeypatch.context() as patch:
        patch.setattr(owner, call, killed)
        on_workers(small(), run)
    made = on_workers(small(), lambda worker: worker.resume(tmp_path / "run"))
    assert made in ([1, 1], [2, 2])

    def again(worker: Worker) -> None:
        worker.resume(tmp_path / "run")
        worker.save(tmp_path / "run")

    on_workers(small(), again)
    assert all("." not in path.name for path in (tmp_path / "run").iterdir())
