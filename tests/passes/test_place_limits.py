"""What bounds a plan: the world, pins, ties, and values that cannot cross."""

from __future__ import annotations

from typing import Any

import pytest

from splitc.errors import PlacementError
from splitc.ir.graph import NodeInfo, set_info
from splitc.ir.placements import Placement
from splitc.ir.program import SizeSpec
from splitc.passes.planner.strategy import Strategy
from splitc.strategies.auto import Auto
from splitc.strategies.data_parallel import DataParallel
from splitc.strategies.hybrid_single import HybridSingle
from splitc.strategies.layer_separation import LayerSeparation
from tests.support.small_programs import Row, candidate, fc_layers, place, separable, small_cluster, small_program


def test_a_separation_that_does_not_fit_the_world_is_refused() -> None:
    for world, strategy, words in (
        (1, LayerSeparation(), "a world of 1 cannot be divided"),
        (4, LayerSeparation(n_c=2, n_f=1), "n_c = 2 and n_f = 1 are 3 ranks, but the world has 4"),
        (4, LayerSeparation(n_c=4), "n_c = 4 leaves no rank of 4"),
        (4, LayerSeparation(n_f=9), "n_f = 9 leaves no rank of 4"),
    ):
        with pytest.raises(PlacementError, match=words):
            place(separable(), world, strategy)


def test_a_model_of_one_layer_cannot_be_separated() -> None:
    program = small_program([Row("fc", ("images", "labels"), parameters=10, flops=1e3)])
    with pytest.raises(PlacementError, match="only one layer, fc, has parameters"):
        place(program, 2)


def test_a_model_without_parameters_cannot_be_separated() -> None:
    program = small_program([Row("loss", ("images", "labels"), flops=1e3)])
    with pytest.raises(PlacementError, match="the model has no parameters"):
        place(program, 2)
    assert place(program, 2, DataParallel()).prediction.program_seconds == pytest.approx(4e3 / 1e6)


def test_fewer_examples_than_ranks_that_read_are_refused() -> None:
    with pytest.raises(PlacementError, match="3 examples cannot be shared out to 4 ranks"):
        place(separable(), 4, DataParallel(), global_batch=3)
    with pytest.raises(PlacementError, match="1 examples leave some of 3 ranks without any"):
        place(separable(), 3, LayerSeparation(), global_batch=1)


def test_senseless_requests_are_refused() -> None:
    requests: list[dict[str, Any]] = [{"global_batch": 0}, {"global_batch": 2.5}, {"memory": -1.0}, {"world": 0}]
    for options in requests:
        ((name, value),) = options.items()
        with pytest.raises(PlacementError, match=f"{name} is {value}"):
            place(separable(), **options)


def test_a_pinned_layer_runs_where_it_was_pinned_and_says_so() -> None:
    plan = place(separable(), 4, pins={"conv2": "fc"})
    assert fc_layers(plan) == {"conv2", "fc1", "fc2", "loss"}
    assert plan.prediction.reasons["conv2"].startswith("pinned by 'conv2'; ")


def test_of_pins_that_contradict_each_other_the_later_must_match_fewer_layers() -> None:
    for later in ("fc*", "*2"):
        with pytest.raises(PlacementError, match=r"fc2 has role 'fc' by 'fc2'; give the one for fewer layers last"):
            place(separable(), 4, pins={"fc2": "fc", later: "conv"})


def test_later_pins_win_part_by_part() -> None:
    pins = {"fc*": Placement(role="conv", holding="replicated"), "fc2": "fc"}
    plan = place(separable(), 4, pins=pins)
    assert fc_layers(plan) == {"fc2", "loss"}


def test_a_pin_of_sync_none_keeps_the_layer_on_a_role_of_one_rank() -> None:
    plan = place(separable(), 6, pins={"fc*": Placement(role="fc", sync="none")})
    assert len(plan.roles["head"]) == 1


def test_pins_that_cannot_be_followed_are_told_all_at_once() -> None:
    pins = {"fc3": "fc", "conv1": "cnov", "fc1": Placement(sync="sometimes")}
    with pytest.raises(PlacementError) as error:
        place(separable(), 4, pins=pins)
    message = str(error.value)
    assert "pin 'fc3' matches no layer; near it are fc" in message
    assert "role is 'cnov'; did you mean conv? it must be one of all, worker, conv, fc" in message
    assert "sync is 'sometimes'" in message


def test_pins_that_contradict_the_strategy_are_refused() -> None:
    cases: list[tuple[Strategy, str | Placement, str]] = [
        (DataParallel(), "fc", "asks for role 'fc' of fc1, but data_parallel has only all"),
        (LayerSeparation(), "all", "layer_separation has only trunk, head"),
        (DataParallel(), Placement(holding="sharded"), "holding 'sharded' of fc1"),
        (DataParallel(), Placement(sync="late_multiply"), "sync 'late_multiply' of fc1"),
        (DataParallel(), Placement(sync="none"), "sync 'none' of fc1, whose gradient must be summed"),
        (HybridSingle(), Placement(group=2), "group 2 of fc1"),
    ]
    for strategy, pin, words in cases:
        with pytest.raises(PlacementError, match=words):
            place(separable(), 4, strategy, pins={"fc1": pin})


@pytest.mark.slow
def test_auto_follows_the_pins_and_says_which_families_cannot() -> None:
    plan = place(separable(), 4, Auto(), small_cluster(1e9, 1e-6), pins={"fc1": "fc"})
    assert len(plan.roles) == 2 and plan.placements["fc1"].role == list(plan.roles)[1]
    assert "data_parallel has only all" in candidate(plan, "data_parallel").why


def test_pins_against_the_way_of_the_data_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"no cut .* conv1 is pinned by 'conv1'"):
        place(separable(), 4, pins={"conv1": "fc", "fc2": "conv"})


def test_layers_that_share_a_parameter_have_one_role() -> None:
    rows = [
        Row("conv", ("images",), parameters=10, width=8, flops=1e6),
        Row("embed", ("conv",), parameters=50_000, width=8, flops=1e2),
        Row("head", ("embed",), width=8, flops=1e2, shares="embed"),
        Row("loss", ("head", "labels")),
    ]
    plan = place(small_program(rows), 4)
    assert fc_layers(plan) == {"embed", "head", "loss"}
    with pytest.raises(PlacementError, match=r"embed and head share embed\.weight"):
        place(small_program(rows), 4, pins={"embed": "conv", "head": "fc"})


def test_only_tensors_with_examples_cross() -> None:
    rows = [
        Row("mask", ("images",), parameters=10, width=8, flops=1e6, batched=False),
        Row("fc", ("mask",), parameters=50_000, width=8, flops=1e2),
        Row("loss", ("fc", "labels")),
    ]
    words = r"fc \(model\.py:3\) reads mask, which has no examples to divide"
    with pytest.raises(PlacementError, match=words):
        place(small_program(rows), 4)


def test_sizes_are_made_again_where_they_are_read() -> None:
    program = separable()
    nodes = {node.name: node for node in program.graph.nodes}
    free = place(program, 4)
    nodes["fc2"].args = (nodes["fc1"], nodes["conv1"])
    assert place(program, 4).step_seconds > free.step_seconds
    with program.graph.inserting_after(nodes["conv1"]):
        size = program.graph.call_method("size", (nodes["conv1"], 0))
    set_info(size, NodeInfo(SizeSpec(1), "model.py:9", layer="conv1", copied_to_each_stage=True))
    nodes["fc2"].args = (nodes["fc1"], size)
    assert place(program, 4).step_seconds == pytest.approx(free.step_seconds)
