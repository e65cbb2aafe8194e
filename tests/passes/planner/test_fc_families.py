"""What the planner decides for fully connected layers, and what it says of pins that cannot be followed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import PlacementError
from splitc.ir.cluster import Cluster
from splitc.ir.pass_manager import run_pass
from splitc.ir.placements import Placement
from splitc.ir.plan import Plan
from splitc.ir.program import Program
from splitc.passes.place import Place
from splitc.passes.planner.propose import propose
from splitc.passes.planner.request import Request
from splitc.passes.planner.strategy import parse_strategy
from splitc.report.figures import Figures
from splitc.strategies.modulo_shard import ModuloShard
from tests.support.compiled import analyse, compiled
from tests.support.models import Made
from tests.support.paper_models import SplitBrainVGG, splitbrain_vgg


def layers() -> nn.Module:
    """Layers of 256 x 1024, 1024 x 256, 256 x 256 and 256 x 3."""

    def run(m: Any, x: Tensor) -> Tensor:
        return m.narrow(F.relu(m.wide(F.relu(m.down(F.relu(m.up(x)))))))

    sizes = {"up": (256, 1024), "down": (1024, 256), "wide": (256, 256), "narrow": (256, 3)}
    return Made(run, **{name: nn.Linear(*size) for name, size in sizes.items()})


@cache
def wide() -> Program:
    return analyse(layers(), (torch.randn(4, 256),), torch.randint(3, (4,)), F.cross_entropy)


def place(
    program: Program, strategy: str, world: int = 4, cluster: Cluster | str = "v100-10gbe", **options: Any
) -> Plan:
    known = load_cluster(cluster) if isinstance(cluster, str) else cluster
    return run_pass(Place(known, world, parse_strategy(strategy), **options), program).plan


def syncs(plan: Plan) -> dict[str, str | None]:
    return {layer: placement.sync for layer, placement in plan.placements.items() if placement.sync != "none"}


# -- late multiply -----------------------------------------------------------------------------------------------------


def slow(bandwidth: float) -> Cluster:
    """The V100 cluster with a link whose latency is nothing beside its bytes."""
    known = load_cluster("v100-10gbe")
    return replace(known, link=replace(known.link, bandwidth=bandwidth, latency=0.0))


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "expected"), [(2, 3), (63, 3), (66, 2), (101, 2)])
def test_a_layer_is_late_multiplied_where_inputs_and_errors_are_fewer_bytes_than_its_gradient(
    batch: int, expected: int
) -> None:
    """3 b (i + o) < 2 (3 / 4) (i + 1) o on 4 ranks: up to 102, 102 and 64 examples, and 1 for the narrow layer."""
    found = syncs(place(wide(), "late_multiply", global_batch=4 * batch, cluster=slow(1e6)))
    assert [found[layer] for layer in ("up", "down", "wide")].count("late_multiply") == expected
    assert found["narrow"] == "all_reduce"
    assert (found["wide"] == "late_multiply") == (batch < 64)


def test_where_it_is_faster_for_none_all_linear_layers_are_late_multiplied_as_was_asked() -> None:
    plan = place(wide(), "late_multiply", global_batch=40_000)
    assert set(syncs(plan).values()) == {"late_multiply"} and len(syncs(plan)) == 4


def test_late_multiply_is_priced_above_data_parallelism_where_it_sends_more() -> None:
    for batch, cluster, dearer in ((40_000, load_cluster("v100-10gbe"), True), (8, slow(1e7), False)):
        late, data = (
            place(wide(), each, global_batch=batch, cluster=cluster).step_seconds
            for each in ("late_multiply", "data_parallel")
        )
        assert (late > data) == dearer


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_size_of_groups_divides_the_world() -> None:
    for world, sizes in ((3, {3}), (4, {2, 4}), (6, {2, 3, 6})):
        (grouping,) = place(wide(), "modulo_shard", world).groups.values()
        assert grouping.size in sizes and grouping.scheme == "B/K" and grouping.updates == "once"


@pytest.mark.slow
def test_the_size_that_was_left_out_is_the_fastest() -> None:
    by_size = {size: place(wide(), f"modulo_shard(mp={size})").step_seconds for size in (2, 4)}
    assert place(wide(), "modulo_shard").step_seconds == pytest.approx(min(by_size.values()))


def test_worlds_without_room_for_groups_are_refused() -> None:
    for world, strategy, words in (
        (4, "modulo_shard(mp=3)", "groups of mp = 3 do not divide 4 ranks"),
        (2, "modulo_shard(mp=4)", "groups of mp = 4 do not divide 2 ranks"),
        (1, "modulo_shard", "modulo_shard needs at least 2 ranks"),
        (1, "late_multiply", "late_multiply needs at least 2 ranks"),
    ):
        with pytest.raises(PlacementError, match=words):
            place(wide(), strategy, world)


def test_fewer_examples_than_ranks_are_refused() -> None:
    for strategy in ("modulo_shard", "late_multiply", "hybrid_single"):
        with pytest.raises(PlacementError, match="3 examples leave some of 4 ranks without any"):
            place(wide(), strategy, global_batch=3)


def test_a_model_without_linear_layers_is_told_so() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    program = analyse(model, (torch.randn(4, 1, 8, 8),), torch.randint(3, (4,)), F.cross_entropy)
    with pytest.raises(PlacementError, match="no linear layer of the model has parameters of its own"):
        place(program, "modulo_shard")
    with pytest.raises(PlacementError, match="no linear layer or table of the model trains a weight of its own"):
        place(program, "late_multiply")


# -- SplitBrain's VGG variant ------------------------------------------------------------------------------------------

PARTS = [(2, 0.63), (8, 0.35)]
"""The size of groups, and the part of the model's parameters that a rank holds at most (figure 7c)."""


def held(size: int, **pins: Placement) -> float:
    """The part of the variant's parameters that the fullest of 8 ranks holds."""
    x, y = torch.randn(2, 3, 32, 32), torch.randint(10, (2,))
    strategy = f"modulo_shard(mp={size})"
    program = compiled(SplitBrainVGG(), (x,), y, F.cross_entropy, 8, strategy, analysed=splitbrain_vgg(), pins=pins)
    figures = Figures(program.program)
    whole = sum(h.nbytes for h in splitbrain_vgg().tensors.values())
    return float(max(figures.rank(rank)["parameter_bytes"] for rank in range(8)) / whole)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "most"), PARTS)
def test_groups_divide_the_memory_of_the_variants_parameters(size: int, most: float) -> None:
    assert held(size, **{"fc*": Placement(holding="sharded", group=size)}) <= most
    assert held(size) <= most, "as the planner divides them"


@pytest.mark.slow
def test_a_layer_is_divided_for_memory_only_where_groups_were_asked_for_by_name() -> None:
    """fc1 has 4 MB and puts out 8 kB for a rank's batch of 2; gathering them takes longer than dividing it saves."""
    request = Request(splitbrain_vgg(), load_cluster("v100-10gbe"), 8)
    priced = {by_name: propose(request, ModuloShard(8), by_name=by_name)[0] for by_name in (True, False)}
    holdings = {by_name: each.plan and each.plan.placements["fc1"].holding for by_name, each in priced.items()}
    assert holdings == {True: "sharded", False: "replicated"}
    assert priced[False].seconds < priced[True].seconds


# -- mixed precision ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "dtype"),
    [("a100-100gbe", "bfloat16"), ("v100-10gbe", "float32")],  # a V100 computes no faster in bfloat16
)
def test_layers_under_autocast_are_priced_at_its_rate_where_the_device_has_one(cluster: str, dtype: str) -> None:
    given = layers(), (torch.randn(4, 256),), torch.randint(3, (4,)), F.cross_entropy
    known = load_cluster(cluster)
    narrow = Request(analyse(*given, autocast=torch.bfloat16), known, 2)
    assert {layer: narrow.dtypes[layer] for layer in ("up", "down", "wide", "narrow")} == dict.fromkeys(
        ("up", "down", "wide", "narrow"), dtype
    )
    assert set(Request(wide(), known, 2).dtypes.values()) == {"float32"}
