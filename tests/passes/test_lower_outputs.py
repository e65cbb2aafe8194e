"""Outputs are lowered by the plan of training, and travel to the readers."""

from __future__ import annotations

from dataclasses import replace

from splitc.ir.program import LoweredProgram, Refusal
from splitc.passes.lower_outputs import with_outputs
from splitc.passes.rewriting import lower
from tests.support.printed import placed, two_layers

PINS = {"fc1": "trunk", "fc2": "head"}


def actions(program: LoweredProgram) -> dict[str, list[str]]:
    return {each.name: [str(action) for action in each.actions] for each in program.rank_programs}


def lowered(strategy: str, world: int) -> LoweredProgram:
    before = placed(two_layers(), world, strategy, pins=PINS if "separation" in strategy else {})
    found = with_outputs(lower(before), before).outputs
    assert isinstance(found, LoweredProgram), found
    return found


def test_the_output_is_a_cut_from_the_role_that_computes_it_to_the_readers() -> None:
    assert actions(lowered("layer_separation", 2)) == {
        "trunk_readers": [
            "trunk: forward",
            "trunk: send cut0 -> head",
            "readers: recv cut1 <- head",
            "readers: forward",
            "readers: sum_loss",
        ],
        "head": ["head: recv cut0 <- trunk", "head: forward", "head: send cut1 -> readers", "head: sum_loss"],
    }


def test_nothing_travels_where_readers_compute_the_output() -> None:
    assert actions(lowered("data_parallel", 2)) == {
        "all_readers": ["all: forward", "readers: forward", "readers: sum_loss"]
    }


def test_the_readers_role_has_another_name_where_the_plan_has_one_of_that_name() -> None:
    before = placed(two_layers(), 2, "layer_separation", pins=PINS)
    names = {"trunk": "readers", "head": "head"}
    plan = before.plan
    renamed = replace(
        plan,
        roles={names[role]: ranks for role, ranks in plan.roles.items()},
        batch_offsets={names[role]: bounds for role, bounds in plan.batch_offsets.items()},
        placements={name: replace(place, role=names[place.role]) for name, place in plan.placements.items()},
    )
    found = with_outputs(lower(replace(before, plan=renamed)), before).outputs
    assert isinstance(found, LoweredProgram)
    assert list(found.plan.roles) == ["readers", "head", "readers_"]


def test_a_tensor_that_no_rank_of_the_role_has_is_named() -> None:
    before = placed(two_layers(), 2, "layer_separation", pins=PINS)
    program = lower(before)
    without = tuple(replace(stage, tensors=("fc2.bias",) * (stage.role == "head")) for stage in program.stages)
    found = with_outputs(replace(program, stages=without), before).outputs
    assert found == Refusal("the model's output reads fc1.weight in role trunk, which has not all of it")
