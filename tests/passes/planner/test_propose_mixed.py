"""Mixtures by pins: what runs where, what the roles are called, and which places contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from splitc.errors import PlacementError
from splitc.ir.placements import Grouping, Placement
from splitc.ir.plan import Plan
from splitc.ir.program import Program
from splitc.passes.planner.pins import resolve_pins
from splitc.passes.planner.request import Request
from splitc.strategies.mixed import ALL, ONE, plan_of, where_to_run
from tests.support.small_programs import Row, separable, small_cluster, small_program

LAYERS = ("conv1", "conv2", "fc1", "fc2", "loss")
GROUPED = 2


def assigned(where: dict[str, int], world: int = 4, program: Program | None = None, **options: Any) -> Plan:
    """The plan of these places; other layers run on all ranks."""
    program = program or separable()
    everything = {layer.name: where.get(layer.name, ALL) for layer in program.layers}
    return plan_of(Request(program, small_cluster(), world, **options), everything)


def roles(made: Plan) -> dict[str, str]:
    return {layer: place.role for layer, place in made.placements.items()}


def test_one_place_of_all_is_the_role_all() -> None:
    made = assigned({})
    assert made.roles == {"all": (0, 1, 2, 3)} and made.groups == {}
    assert made.batch_offsets == {"all": (0, 4, 8, 12, 16)}
    assert {place.sync for layer, place in made.placements.items() if layer != "loss"} == {"all_reduce"}
    assert made.placements["loss"].sync == "none", "it has nothing to sum"


def test_layers_after_each_other_in_one_place_are_one_role_and_roles_are_named_in_the_datas_way() -> None:
    made = assigned({"fc1": GROUPED, "fc2": ALL, "loss": ONE})
    assert roles(made) == {"conv1": "stage0", "conv2": "stage0", "fc1": "stage1", "fc2": "stage2", "loss": "stage3"}
    assert list(made.roles) == ["stage0", "stage1", "stage2", "stage3"]
    assert made.roles["stage3"] == (0,) and made.roles["stage2"] == (0, 1, 2, 3)
    assert made.batch_offsets["stage3"] == (0, 16) and made.batch_offsets["stage1"] == made.batch_offsets["stage0"]


def test_a_role_for_the_data_is_there_even_when_no_layer_is_in_it() -> None:
    made = assigned(dict.fromkeys(LAYERS, ONE), 2)
    assert made.roles == {"trunk": (0, 1), "head": (0,)}
    assert set(roles(made).values()) == {"head"}


def test_groups_that_hold_the_loss_work_in_turns_and_others_on_everything_at_once() -> None:
    inner = assigned({"fc1": GROUPED, "fc2": GROUPED, "loss": GROUPED})
    assert inner.groups == {"head": Grouping(2, "B/K")}
    outer = assigned({"fc1": GROUPED})
    assert outer.groups == {"stage1": Grouping(2, "BK")}
    both = assigned({"conv2": GROUPED, "fc2": GROUPED, "loss": GROUPED})
    assert both.groups == {"stage1": Grouping(2, "BK"), "stage3": Grouping(2, "B/K")}
    pins = resolve_pins({"fc2": Placement(state="batch")}, LAYERS)
    assert assigned({"fc2": GROUPED, "loss": GROUPED}, pins=pins).groups == {"head": Grouping(2, "BK")}


def test_what_only_one_rank_holds_is_not_summed() -> None:
    made = assigned({"fc1": GROUPED, "fc2": GROUPED, "loss": GROUPED}, 2)
    assert made.placements["fc2"].sync == "none", "its group has the gradient whole"
    assert assigned({"fc1": GROUPED}, 4).placements["fc1"].sync == "all_reduce"
    assert assigned({"fc2": ONE, "loss": ONE}).placements["fc2"].sync == "none"
    own = resolve_pins({"fc2": Placement(state="batch")}, LAYERS)
    made = assigned({"fc2": GROUPED, "loss": GROUPED}, 2, pins=own)
    assert made.placements["fc2"].sync == "all_reduce", "each rank has its own examples"


def test_branches_share_a_role_where_they_are_as_far_from_the_data() -> None:
    program = small_program(
        (
            Row("stem", ("images",), parameters=9, width=8),
            Row("left", ("stem",), parameters=9, width=4),
            Row("right", ("stem",), parameters=9, width=4),
            Row("join", ("left", "right"), parameters=9, width=4),
            Row("loss", ("join", "labels")),
        )
    )
    made = assigned({"left": GROUPED, "right": GROUPED}, program=program)
    assert roles(made) == {"stem": "stage0", "left": "stage1", "right": "stage1", "join": "stage2", "loss": "stage2"}


def test_layers_that_share_a_parameter_cannot_be_in_different_places() -> None:
    program = small_program(
        (
            Row("embed", ("images",), parameters=9, width=8),
            Row("body", ("embed",), parameters=9, width=8),
            Row("head", ("body",), width=8, shares="embed"),
            Row("loss", ("head", "labels")),
        )
    )
    with pytest.raises(PlacementError, match="embed and head cannot be in different places: embed and head share"):
        assigned({"head": ONE, "loss": ONE}, program=program)
    with pytest.raises(PlacementError, match=r"before and after .* another place: embed and head share embed.weight"):
        assigned({"body": GROUPED}, program=program)


def test_what_reads_a_value_without_examples_stays_where_the_data_is() -> None:
    program = small_program(
        (
            Row("table", ("images",), parameters=9, width=8, batched=False),
            Row("reads", ("table",), parameters=9, width=8),
            Row("loss", ("reads", "labels")),
        )
    )
    with pytest.raises(PlacementError, match=r"table and reads cannot be in different places: reads .* no examples"):
        assigned({"reads": ONE, "loss": ONE}, program=program)


def test_a_global_batch_is_shared_out_to_all_and_whole_on_one() -> None:
    made = assigned({"fc1": GROUPED, "fc2": ONE, "loss": ONE}, global_batch=10)
    assert made.batch_offsets == {"stage0": (0, 3, 6, 8, 10), "stage1": (0, 3, 6, 8, 10), "stage2": (0, 10)}


# -- pins --------------------------------------------------------------------------------------------------------------


def where(pin: str | Placement, world: int = 4) -> int:
    pins = resolve_pins({"fc1": pin}, LAYERS)
    return where_to_run(Request(separable(), small_cluster(), world, pins), "fc1")


def test_a_pin_to_the_first_role_is_on_all_ranks_and_to_the_second_on_one() -> None:
    for first, second in (("conv", "fc"), ("trunk", "head"), ("stage0", "stage1")):
        assert (where(first), where(second)) == (ALL, ONE)
    assert where(Placement(sync="late_multiply")) == ALL


def test_a_pin_to_be_sharded_is_in_groups_on_all_ranks() -> None:
    assert where(Placement(holding="sharded")) == where(Placement(split="rows")) == 2
    assert where(Placement(holding="sharded", group=4)) == where(Placement(group=4)) == 4
    assert where(Placement(role="fc", holding="sharded")) == 2
    assert where(Placement(holding="replicated")) == where(Placement(group=1)) == ALL


def test_groups_of_a_pin_without_a_size_are_the_smallest_that_divide_the_ranks() -> None:
    assert [where(Placement(holding="sharded"), world) for world in (2, 3, 9)] == [2, 3, 3]
