"""A request that has no plan names the smallest change of it that has one, and with that change it has one."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import nn, randn

from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import PlacementError
from splitc.ir.placements import Placement
from splitc.ir.program import Program
from splitc.ir.short_wire import parse_wire
from splitc.ladder import require_fewer
from splitc.passes.planner.strategy import parse_strategy
from splitc.specialise import Settings, specialise
from tests.support.compiled import analyse


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITC_ADVICE", "inf")


@cache
def model() -> Program:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    return analyse(net, randn(4, 4), randn(4, 4), nn.functional.mse_loss)


SMALL = replace(load_cluster("v100-10gbe"), world=4)
SEPARATION, DOUBLING = "layer_separation", "data_parallel(all_reduce=recursive_doubling)"
KINDS: dict[str, tuple[int, dict[str, Any], str]] = {
    "more ranks than devices": (9, {"strategy": "data_parallel"}, "a world of 4"),
    "too few ranks": (1, {"strategy": SEPARATION}, "a world of 2"),
    "ranks of a role": (4, {"strategy": f"{SEPARATION}(n_c=6)"}, f"strategy {SEPARATION}(n_c=3)"),
    "ranks of two roles": (4, {"strategy": f"{SEPARATION}(n_c=3, n_f=3)"}, f"strategy {SEPARATION}(n_c=1, n_f=3)"),
    "ranks of many roles": (4, {"strategy": f"{SEPARATION}(ranks=4+2+1)"}, f"strategy {SEPARATION}"),
    "groups": (4, {"strategy": "modulo_shard(mp=3)"}, "strategy modulo_shard(mp=2)"),
    "servers": (4, {"strategy": "parameter_server(servers=7)"}, "strategy parameter_server(servers=3)"),
    "fragments": (2, {"strategy": "local_sgd(period=20, fragments=9)"}, "strategy local_sgd(period=20, fragments=6)"),
    "sites": (4, {"strategy": "sites(ranks=3)"}, "strategy sites(period=32, inside=auto, ranks=2)"),
    "microbatches": (2, {"strategy": "data_parallel(microbatches=7)"}, "strategy data_parallel(microbatches=4)"),
    "a small batch": (4, {"strategy": "data_parallel", "global_batch": 1}, "a global batch of 4"),
    "no normalisation": (2, {"strategy": "independent_subnets"}, "strategy auto"),
    "a pin of no layer": (2, {"strategy": SEPARATION, "pins": {"9": "fc"}}, "without the pin '9'"),
    "a pin of no role": (2, {"strategy": SEPARATION, "pins": {"0": "nowhere"}}, "without the pin '0'"),
    "pins apart": (2, {"strategy": SEPARATION, "pins": {"0": "fc", "[0]": "conv"}}, "without the pin '0'"),
    "a pin of a strategy": (2, {"strategy": "data_parallel", "pins": {"2": "fc"}}, "without the pin '2'"),
    "a pin in groups": (
        4,
        {"strategy": "modulo_shard", "pins": {"2": Placement(holding="sharded", group=5)}},
        "without the pin '2'",
    ),
    "a pin without a sum": (
        2,
        {"strategy": "data_parallel", "pins": {"2": Placement(sync="none")}},
        "without the pin '2'",
    ),
    "formats and sums": (2, {"strategy": DOUBLING, "wire": parse_wire("gradients=int8")}, "strategy data_parallel"),
    "updates and batches": (
        2,
        {"strategy": "modulo_shard(updates=every)", "accumulate": 2},
        "strategy modulo_shard",
    ),
    "several at once": (
        2,
        {"strategy": SEPARATION, "pins": {"9": "fc", "8": "fc"}},
        f"strategy {SEPARATION}, without pins",
    ),
}


def changed(settings: Settings, text: str) -> Settings:
    """The settings with the change that a text proposes."""
    if found := re.fullmatch(r"a (world|global batch) of (\d+)", text):
        given: Any = {found[1].replace(" ", "_"): int(found[2])}
        return replace(settings, **given)
    if found := re.fullmatch(r"without the pin '(.+)'", text):
        return replace(settings, pins={name: pin for name, pin in settings.pins.items() if name != found[1]})
    found = re.fullmatch(r"strategy (.+?)(, without pins)?", text)
    assert found is not None, text
    return replace(settings, strategy=found[1], pins={} if found[2] else settings.pins)


@pytest.mark.parametrize(
    "kind", ["groups", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "groups")]
)
def test_what_is_not_possible_names_the_smallest_change_and_that_is_enough(kind: str) -> None:
    world, options, expected = KINDS[kind]
    settings = Settings(world, cluster=SMALL, **options)
    with pytest.raises(PlacementError) as raised:
        specialise(model(), settings)
    (note,) = raised.value.__notes__
    text = note.removeprefix("the smallest change of one part with which there is a plan: ")
    assert text == expected
    specialise(model(), changed(settings, text))


CONTRADICTIONS = {
    "layer_separation(n_c=2, ranks=2+1)": "layer_separation(ranks=2+1)",
    "local_sgd(period=4, sync_batchnorm=True)": "local_sgd(period=4)",
    "modulo_shard(outer_lr=0.5)": "modulo_shard",
    "modulo_shard(mp=1)": "modulo_shard",
    "sites(inside=local_sgd)": "sites(period=32, inside=auto)",
}


def test_options_that_contradict_each_other_name_the_one_to_leave_out() -> None:
    for text, expected in CONTRADICTIONS.items():
        with pytest.raises(PlacementError) as raised:
            parse_strategy(text)
        (note,) = raised.value.__notes__
        assert note.endswith(f": strategy {expected}") and str(parse_strategy(expected)) == expected


def test_a_ladder_that_cannot_be_says_which_can() -> None:
    for min_world, world, asked in ((4, 4, (3, 4)), (0, 2, (1, 2)), (1, 1, (1, 2)), (3, 1, (3, 4))):
        with pytest.raises(PlacementError, match=r"at most \d+$|take a world of \d+$") as raised:
            require_fewer(min_world, world)
        assert str(asked[0] if world > 1 and min_world else asked[1] if min_world else 1) in str(raised.value)
        require_fewer(*asked)


@pytest.mark.slow
def test_a_plan_file_that_does_not_fit_names_the_options_with_which_one_made_anew_does() -> None:
    plan = specialise(model(), Settings(4, cluster=SMALL, strategy="data_parallel")).plan
    for settings, ranks in ((Settings(4, cluster=replace(SMALL, world=2)), 2), (Settings(4, cluster=SMALL), 4)):
        given = plan if ranks == 2 else replace(plan, model="another")
        with pytest.raises(PlacementError) as raised:
            specialise(model(), settings, given)
        (note,) = raised.value.__notes__
        options = f"--world {ranks} --strategy data_parallel --global-batch 16"
        assert note == f"made anew there is a plan, data_parallel {ranks}, with {options} in place of the file"
    with pytest.raises(PlacementError) as raised:
        specialise(model(), Settings(4, cluster=SMALL, memory=1.0), plan)
    assert not getattr(raised.value, "__notes__", []), "nothing fits"
