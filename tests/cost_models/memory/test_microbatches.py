"""Bytes of a rank whose step runs in microbatches: predicted, measured, and what must hold by structure."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from splitc.compiled import CompiledProgram
from splitc.cost_models.memory.memory import RankMemory
from splitc.cost_models.memory.memory_check import _bound, memory_of_all
from splitc.cost_models.memory.rank_memory import memory_of
from splitc.errors import PlacementError
from splitc.ir.placements import SCHEDULES, Placement
from tests.cost_models.memory.test_memory import assert_as_measured, example
from tests.support.compiled import analyse, compiled
from tests.support.every_strategy import Asked, Pins, planned
from tests.support.measured_memory import in_processes
from tests.support.sampling import sampled


def divided(split: str, **options: Any) -> Placement:
    return Placement(holding="sharded", group=2, split=split, **options)


def whole(**options: Any) -> Placement:
    return Placement(holding="replicated", group=2, **options)


ROWS: Pins = {"fc6": divided("columns"), "fc7": divided("rows"), "fc8": Placement(holding="replicated")}
HEADS: Pins = {
    "conv": "trunk",
    "fc6": divided("rows", role="head"),
    "fc7": divided("columns", role="head"),
    "fc8": whole(role="head", arrives="replicate"),
}
PLANS: dict[str, tuple[int, str, Pins]] = {
    "data_parallel": (2, "data_parallel", {}),
    "two roles": (3, "layer_separation(n_c=2, n_f=1)", {"conv": "conv", "fc*": "fc"}),
    "two roles, many heads": (3, "layer_separation(n_c=1, n_f=2)", {}),
    "three roles": (4, "layer_separation(ranks=2+1+1)", {}),
    "late_multiply": (2, "late_multiply", {"fc*": Placement(sync="late_multiply")}),
    "modulo_shard": (2, "modulo_shard(mp=2)", {}),
    "rows": (4, "modulo_shard(mp=2)", ROWS),
    "groups on heads": (4, "layer_separation(n_c=2, n_f=2)", HEADS),
}
IMAGE, CLASS = 64 * 4, 8  # bytes of an example, of which every piece is a view
CELLS = [(plan, 2 + k % 3, SCHEDULES[k % 2]) for k, plan in enumerate(PLANS)]


def in_pieces(plan: str, number: int, schedule: str, batch: int = 8, **options: Any) -> CompiledProgram:
    """A plan whose readers have `batch` examples each."""
    world, strategy, pins = PLANS[plan]
    return planned(world, Asked(plan, text(strategy, number, schedule), pins), global_batch=batch * world, **options)


def text(strategy: str, number: int, schedule: str) -> str:
    begin = strategy.removesuffix(")") + (", " if "(" in strategy else "(")
    return f"{begin}microbatches={number}, schedule={schedule})"


def first(plan: str, number: int, schedule: str = "1f1b", batch: int = 8) -> RankMemory:
    """What the first rank needs."""
    return memory_of(in_pieces(plan, number, schedule, batch).program, 0)


@sampled(("plan", "number", "schedule"), CELLS, one_in=8)
def test_a_rank_has_the_bytes_that_were_predicted(plan: str, number: int, schedule: str) -> None:
    for memory, real in assert_as_measured(in_pieces(plan, number, schedule), activations=0):
        assert memory.peak <= 1.35 * real.peak, "buffers of receives are there before the message on real transports"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("plan", "schedule"), [("three roles", "1f1b")])
def test_processes_have_the_peak_that_was_predicted(plan: str, schedule: str, tmp_path: Path) -> None:
    world, strategy, _ = PLANS[plan]
    (model, inputs, target, loss), known = example("alexnet")
    done = compiled(model, inputs, target, loss, world, text(strategy, 4, schedule), analysed=known)
    for memory, real in zip(memory_of_all(done.program), in_processes(done, tmp_path), strict=True):
        assert memory.peak == pytest.approx(real.peak, rel=0.02)
        assert memory.gradients == real.gradients and memory.activations == real.saved


# -- by structure ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_alone_in_its_role_keeps_the_activations_of_one_piece() -> None:
    one, two, four = (first("data_parallel", number).activations for number in (1, 2, 4))
    assert one - two == 2 * (two - four) and four < 0.5 * one


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "flying"), [("three roles", 3), ("modulo_shard", 2)])
def test_1f1b_keeps_the_activations_of_as_many_pieces_as_roles_are_to_come(plan: str, flying: int) -> None:
    programs = [in_pieces(plan, 6, order, batch=12) for order in SCHEDULES]
    every, few = (memory_of(done.program, 0) for done in programs)
    read = IMAGE * programs[0].plan.batch(programs[0].plan.reader, 0)
    assert few.activations - read == pytest.approx(flying / 6 * (every.activations - read), rel=0.1)
    assert few.peak < every.peak


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["two roles", "data_parallel", "groups on heads"])
def test_what_a_piece_kept_is_gone_after_its_backward(plan: str) -> None:
    """More pieces of the same size need no more than the larger batch itself."""
    programs = [in_pieces(plan, number, "1f1b", batch=2 * number) for number in (4, 8)]
    four, eight = (memory_of(done.program, 0) for done in programs)
    more = (IMAGE + CLASS) * programs[0].plan.batch(programs[0].plan.reader, 0)
    assert eight.activations - four.activations <= more
    assert more <= eight.peak - four.peak <= more + 4 * 4, "and the losses of four pieces"


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "plan"), [*zip(cycle(SCHEDULES), reversed(PLANS))])
def test_ranks_that_are_alike_are_followed_once_and_the_bound_is_not_exceeded(plan: str, schedule: str) -> None:
    done = in_pieces(plan, 3, schedule, batch=7).program  # which three microbatches do not divide
    memories = memory_of_all(done)
    assert memories == tuple(memory_of(done, rank) for rank in range(done.plan.world))
    assert all(memory.peak <= _bound(done, rank) for rank, memory in enumerate(memories))


ALONE = ["single_device", "data_parallel", "hybrid_single", "layer_separation(ranks=1+1)"]
WIDE = nn.Sequential(nn.Linear(8, 1024), nn.Tanh(), nn.Linear(1024, 8), nn.Tanh(), nn.Linear(8, 256), nn.Linear(256, 5))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "schedule"), [*zip(ALONE, cycle(SCHEDULES))])
def test_a_plan_fits_where_its_pieces_do_though_the_whole_batch_does_not(strategy: str, schedule: str) -> None:
    given = WIDE, (torch.randn(64, 8),), torch.randint(5, (64,)), F.cross_entropy
    known, world = analyse(*given), 1 if strategy == "single_device" else 2

    def peak(number: int, **options: Any) -> float:
        asked = text(strategy, number, schedule)
        done = compiled(*given, world, asked, analysed=known, pins={"0": Placement()}, **options)
        return max(memory.peak for memory in memory_of_all(done.program))

    least = 1.1 * peak(8)
    assert peak(8, memory=least) <= least
    with pytest.raises(PlacementError, match=r"needs? .* and ha"):
        peak(1, memory=least)
