"""In which state the groups of a separated head receive values, and what travels for it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from splitc.capture.example.example import Example
from splitc.compiled import CompiledProgram
from splitc.errors import PlacementError
from splitc.ir.placements import Placement
from splitc.ir.plan import Plan
from splitc.ir.program import Cut, Program
from splitc.ir.wire import wire
from splitc.ir.wire_op import What, WireOp
from splitc.runtime.collectives.layouts import State
from splitc.runtime.worker import Worker
from splitc.specialise import Settings, specialise
from tests.passes.planner.test_group_roles import Headed, separated
from tests.support.compiled import CLUSTER, analyse
from tests.support.ranks import on_workers, part_of
from tests.support.sampling import sampled

ROWS = Placement(group=2, split="rows")
COLUMNS = Placement(group=2, split="columns")
WHOLE = replace(COLUMNS, arrives="replicate")


def cut_of(program: CompiledProgram, name: str = "cut0") -> Cut:
    return next(cut for cut in program.program.stage("head").receives if cut.name == name)


def received(program: CompiledProgram, what: What, role: str) -> dict[int, list[WireOp]]:
    """Rank of a role -> the messages of cut0, or of its gradient, that it receives."""
    ranks = program.plan.roles[role]
    ops = {rank: [op for op in wire(program.program, rank) if op.kind == "recv"] for rank in ranks}
    return {rank: [op for op in ops[rank] if (op.payload.what, op.payload.name) == (what, "cut0")] for rank in ranks}


@pytest.mark.slow
def test_each_head_rank_receives_its_features_of_all_examples_and_nothing_twice() -> None:
    for n_c, n_f in [(1, 2), (3, 2), (2, 4)]:
        program = separated(n_c, n_f, a=ROWS)
        plan, examples = program.plan, program.plan.global_batch
        assert (cut_of(program).arrives, cut_of(program).entry) == (State.FEATURES, None)
        for what, role in ((What.CUT, "head"), (What.CUT_GRADIENT, "trunk")):
            ops = [op for ops in received(program, what, role).values() for op in ops]
            parts = [(range(*op.payload.rows), range(*op.payload.columns or (0, 9))) for op in ops]
            elements = sorted((row, column) for rows, columns in parts for row in rows for column in columns)
            assert elements == [(row, column) for row in range(examples) for column in range(9)]
            assert sum(op.nbytes for op in ops) == examples * 9 * 8
        for rank, ops in received(program, What.CUT, "head").items():
            group = plan.group("head", rank)
            width = (5, 4)[group.index(rank)]  # of 9 features
            assert sum(op.nbytes for op in ops) == sum(plan.batch("head", member) for member in group) * width * 8
        ops = [op for rank in range(plan.world) for op in wire(program.program, rank)]
        assert not any(op.payload.what is What.ENTRY for op in ops)


@pytest.mark.slow
def test_whole_values_go_to_every_head_rank_and_each_returns_the_gradient_of_its_examples() -> None:
    program = separated(3, 2, a=WHOLE)
    assert cut_of(program).arrives is State.REPLICATE
    there = [sum(op.nbytes for op in ops) for ops in received(program, What.CUT, "head").values()]
    back = [sum(op.nbytes for op in ops) for ops in received(program, What.CUT_GRADIENT, "trunk").values()]
    assert there == [21 * 9 * 8] * 2 and back == [7 * 9 * 8] * 3
    verbs = [action.verb for action in program.program.rank_program(3).actions]
    assert "modulo" not in verbs and verbs.index("modulo_grad") < verbs.index("send_grad")


@pytest.mark.slow
def test_targets_go_whole_to_every_head_rank_unless_a_pin_says_otherwise() -> None:
    assert cut_of(separated(2, 2, a=ROWS), "target").arrives is State.REPLICATE
    assert cut_of(separated(2, 2, a=ROWS, c=Placement(arrives="batch")), "target").arrives is State.BATCH


@pytest.mark.slow
def test_by_default_examples_are_routed_and_gathered_in_the_group() -> None:
    for pin in (COLUMNS, replace(ROWS, arrives="batch")):
        cut = cut_of(separated(2, 2, a=pin))
        assert cut.arrives is State.BATCH and cut.gathered


def test_an_arrival_in_a_state_that_nothing_reads_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"cut0 .* is to arrive in state replicate, but is read in state features"):
        separated(2, 2, a=replace(ROWS, arrives="replicate"))


@pytest.mark.slow
def test_a_plan_keeps_how_values_arrive_and_older_ones_load() -> None:
    plan = separated(2, 2, a=WHOLE).plan
    assert Plan.from_json(plan.to_json()) == plan and plan.to_json().count('"arrives"') == 1


EXACT = [
    ((2, 2, 3), WHOLE, "1f1b"), ((1, 2, 1), ROWS, "all_forward"), ((2, 4, 2), ROWS, "1f1b"),
    ((4, 2, 2), COLUMNS, "all_forward"), ((2, 4, 2), WHOLE, "all_forward"), ((4, 2, 2), ROWS, "1f1b"),
]  # fmt: skip


@pytest.mark.slow
@sampled(("sizes", "pin", "schedule"), EXACT, one_in=6)
def test_training_is_exact_however_values_arrive(sizes: tuple[int, int, int], pin: Placement, schedule: str) -> None:
    n_c, n_f, microbatches = sizes
    program = in_pieces(n_c, n_f, microbatches, schedule, a=pin, b=Placement(state="batch"), c=ROWS)
    result = program.verify(steps=2)
    assert result.holds, str(result)


@cache
def headed() -> Program:
    return analyse(Headed().double(), torch.randn(7, 12, dtype=torch.float64), torch.randint(5, (7,)), F.cross_entropy)


def in_pieces(n_c: int, n_f: int, microbatches: int, schedule: str, **pins: Any) -> CompiledProgram:
    plan = replace(separated(n_c, n_f, **pins).plan, microbatches=microbatches, schedule=schedule)
    model, x, y = Headed().double(), torch.randn(7, 12, dtype=torch.float64), torch.randint(5, (7,))
    settings = Settings(n_c + n_f, cluster=CLUSTER)
    program = specialise(headed(), settings, replace(plan, model=""))
    return CompiledProgram(program, model, Example.bind(model, (x,), y, F.cross_entropy), settings)


@pytest.mark.slow
@sampled("pin", [ROWS, WHOLE], one_in=2, ids=str)
def test_evaluation_of_a_smaller_uneven_batch_is_that_of_one_process(pin: Placement) -> None:
    program = separated(3, 2, a=pin, b=Placement(state="batch"), c=ROWS)
    sizes, model = [7, 4, 5], Headed().double()
    x, y = torch.randn(16, 12, dtype=torch.float64), torch.randint(5, (16,))

    def run(worker: Worker) -> tuple[float, Any]:
        worker.use_sizes(sizes)
        return float(worker.evaluate(*part_of(worker, (x, y), sizes))), worker.state_dict()

    found = on_workers(program, run)
    model.load_state_dict(found[0][1])
    assert [loss for loss, _ in found] == pytest.approx(
        [float(F.cross_entropy(model.eval()(x), y).detach())] * 5, rel=1e-12
    )
