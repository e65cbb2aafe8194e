"""Roles from choices: what runs where, what the roles are called, and which choices contradict each other."""

from __future__ import annotations

import pytest

from splitc.errors import PlacementError
from splitc.ir.placements import Grouping, LayerPlacement, Placement
from splitc.ir.plan import Plan
from splitc.ir.program import Program
from splitc.passes.planner.assign_roles import ALL, ONE, LayerChoice, apply_pins, assign_roles
from splitc.passes.planner.pins import resolve_pins
from splitc.passes.planner.request import Request
from tests.support.small_programs import Row, separable, small_cluster, small_program

LAYERS = ("conv1", "conv2", "fc1", "fc2", "loss")


def assigned(
    choices: dict[str, LayerChoice],
    world: int = 4,
    program: Program | None = None,
    scheme: str = "B/K",
    **options: object,
) -> Plan:
    """The plan of these choices; other layers run on all ranks."""
    program = program or separable()
    everything = {layer.name: choices.get(layer.name, LayerChoice()) for layer in program.layers}
    return assign_roles(Request(program, small_cluster(), world, **options), "by hand", everything, scheme)  # type: ignore[arg-type]


def roles(made: Plan) -> dict[str, str]:
    return {layer: place.role for layer, place in made.placements.items()}


GROUPED = LayerChoice(group=2)
SHARDED = LayerChoice(group=2, holding="sharded", split="columns")
ALONE = LayerChoice(ONE)


def test_one_choice_of_all_is_the_role_all() -> None:
    made = assigned({})
    assert made.roles == {"all": (0, 1, 2, 3)} and made.groups == {}
    assert made.batch_offsets == {"all": (0, 4, 8, 12, 16)}
    assert {place.sync for layer, place in made.placements.items() if layer != "loss"} == {"all_reduce"}
    assert made.placements["loss"].sync == "none", "it has nothing to sum"


def test_layers_after_each_other_with_one_choice_are_one_role_and_roles_are_named_in_the_datas_way() -> None:
    made = assigned({"fc1": SHARDED, "fc2": LayerChoice(), "loss": ALONE})
    assert roles(made) == {"conv1": "stage0", "conv2": "stage0", "fc1": "stage1", "fc2": "stage2", "loss": "stage3"}
    assert list(made.roles) == ["stage0", "stage1", "stage2", "stage3"]
    assert made.roles["stage3"] == (0,) and made.roles["stage2"] == (0, 1, 2, 3)
    assert made.batch_offsets["stage3"] == (0, 16) and made.batch_offsets["stage1"] == made.batch_offsets["stage0"]


def test_a_role_for_the_data_is_there_even_when_no_layer_choices_for_it() -> None:
    made = assigned(dict.fromkeys(LAYERS, ALONE), 2)
    assert made.roles == {"trunk": (0, 1), "head": (0,)}
    assert set(roles(made).values()) == {"head"}


def test_groups_that_hold_the_loss_work_in_turns_and_others_on_everything_at_once() -> None:
    inner = assigned({"fc1": SHARDED, "fc2": GROUPED, "loss": GROUPED})
    assert inner.groups == {"head": Grouping(2, "B/K")}
    outer = assigned({"fc1": SHARDED})
    assert outer.groups == {"stage1": Grouping(2, "BK")}
    both = assigned({"conv2": SHARDED, "fc2": SHARDED, "loss": GROUPED}, scheme="B")
    assert both.groups == {"stage1": Grouping(2, "BK"), "stage3": Grouping(2, "B")}


def test_what_only_one_rank_holds_is_not_summed() -> None:
    made = assigned({"fc1": SHARDED, "fc2": GROUPED, "loss": GROUPED}, 2)
    assert made.placements["fc1"] == LayerPlacement("head", "sharded", "none", 2, "columns")
    assert made.placements["fc2"] == LayerPlacement("head", "replicated", "none"), "its group has the gradient whole"
    assert assigned({"fc1": SHARDED}, 4).placements["fc1"].sync == "all_reduce"
    assert assigned({"fc2": ALONE, "loss": ALONE}).placements["fc2"].sync == "none"


def test_groups_of_another_size_are_another_role() -> None:
    four = LayerChoice(group=4, holding="sharded", split="columns")
    made = assigned({"fc1": four, "fc2": SHARDED, "loss": GROUPED})
    assert made.groups == {"stage1": Grouping(4, "BK"), "stage2": Grouping(2, "B/K")}


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
    made = assigned({"left": SHARDED, "right": SHARDED}, program=program)
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
        assigned({"head": ALONE, "loss": ALONE}, program=program)
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
        assigned({"reads": ALONE, "loss": ALONE}, program=program)


def test_a_global_batch_is_shared_out_to_all_and_whole_on_one() -> None:
    made = assigned({"fc1": SHARDED, "fc2": ALONE, "loss": ALONE}, global_batch=10)
    assert made.batch_offsets == {"stage0": (0, 3, 6, 8, 10), "stage1": (0, 3, 6, 8, 10), "stage2": (0, 10)}


# -- pins --------------------------------------------------------------------------------------------------------------


def pinned(
    pins: dict[str, str | Placement], choices: dict[str, LayerChoice] | None = None, **options: LayerChoice
) -> dict[str, LayerChoice]:
    program = separable()
    request = Request(program, small_cluster(), 4, resolve_pins(pins, LAYERS))
    return apply_pins(request, {**{layer: LayerChoice() for layer in LAYERS}, **(choices or {})}, **options)


def test_a_pin_changes_the_parts_it_names_and_no_others() -> None:
    choices = pinned({"fc1": Placement(sync="late_multiply"), "fc2": Placement(split="rows")}, {"fc2": SHARDED})
    assert choices["fc1"] == LayerChoice(sync="late_multiply")
    assert choices["fc2"] == LayerChoice(ALL, "sharded", "all_reduce", 2, "rows")
    assert choices["conv1"] == LayerChoice()


def test_a_pin_to_fc_is_what_the_strategy_means_by_it() -> None:
    assert pinned({"fc1": "fc"})["fc1"] == LayerChoice(ONE)
    assert pinned({"fc1": "fc"}, second=SHARDED)["fc1"] == SHARDED
    assert pinned({"fc1": "conv"}, {"fc1": GROUPED})["fc1"] == LayerChoice()
    for first, second in (("trunk", "head"), ("stage0", "stage1")):
        assert pinned({"fc1": second}) == pinned({"fc1": "fc"})
        assert pinned({"fc1": first}, {"fc1": GROUPED})["fc1"] == LayerChoice()


def test_a_pin_to_be_sharded_is_in_groups_on_all_ranks() -> None:
    assert pinned({"fc1": Placement(holding="sharded")})["fc1"] == SHARDED
    choice = pinned({"fc1": Placement(holding="sharded", group=4)})["fc1"]
    assert (choice.holding, choice.group, choice.split) == ("sharded", 4, "columns")
    assert pinned({"fc1": Placement(holding="replicated")}, {"fc1": SHARDED})["fc1"] == GROUPED


def test_a_layer_pinned_to_be_whole_or_below_the_groups_keeps_no_split() -> None:
    for pin in ("conv", Placement(group=1), Placement(role="conv", holding="replicated")):
        assert pinned({"fc1": pin}, {"fc1": SHARDED})["fc1"] == LayerChoice()


def test_groups_of_a_pin_without_a_size_are_the_strategys_or_the_smallest_that_divide_the_ranks() -> None:
    pins: dict[str, str | Placement] = {"fc1": Placement(holding="sharded")}
    four = LayerChoice(group=4, holding="sharded", split="columns")
    assert pinned(pins, second=four)["fc1"] == four
    for world, size in ((2, 2), (3, 3), (9, 3)):
        request = Request(separable(), small_cluster(), world, resolve_pins(pins, LAYERS))
        assert apply_pins(request, {layer: LayerChoice() for layer in LAYERS})["fc1"].group == size
