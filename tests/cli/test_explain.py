"""`splitc explain`: the price of each placement of a layer."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest

from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import PlacementError
from splitc.ir.placements import Placement
from splitc.report.alternatives import Alternative, alternatives
from splitc.report.what_if import simulated_step
from splitc.specialise import Settings
from tests.support.command import splitc
from tests.support.every_strategy import analysed
from tests.support.sampling import along

Capture = pytest.CaptureFixture[str]


@cache
def found_for(world: int, pattern: str, strategy: str = "auto") -> dict[str, Alternative]:
    """`priced`, once for all tests that only read it."""
    return priced(world, pattern, strategy=strategy)


def priced(world: int, pattern: str, **options: object) -> dict[str, Alternative]:
    _, program = analysed()
    place = Settings(world, cluster=load_cluster("v100-10gbe"), **options).place()  # type: ignore[arg-type]
    return {each.placement: each for each in alternatives(place, program, pattern)}


@pytest.mark.slow
def test_the_price_of_a_placement_is_that_of_the_plan_with_its_pin() -> None:
    _, program = analysed()
    found = found_for(2, "fc6")["rows, groups of 2"]
    assert any(each.chosen for each in found_for(2, "fc6").values())
    assert found.pin == Placement(holding="sharded", split="rows", group=2)
    place = Settings(2, cluster=load_cluster("v100-10gbe"), pins={"fc6": found.pin}).place()
    again = place.run(program)
    assert found.step_seconds == simulated_step(again, place.cluster).step_seconds > 0
    assert found.samples_per_second == pytest.approx(again.plan.global_batch / found.step_seconds)
    assert again.plan.placements["fc6"].split == "rows"


@along(0, strategy=["data_parallel", "layer_separation(n_c=3, n_f=1)"], pattern=["fc*", "conv"])
def test_the_plan_that_is_chosen_is_among_the_placements(pattern: str, strategy: str) -> None:
    chosen = [each for each in found_for(4, pattern, strategy).values() if each.chosen]
    assert chosen and len({each.samples_per_second for each in chosen}) == 1


@pytest.mark.slow
def test_a_placement_that_a_layer_cannot_have_says_why() -> None:
    found = found_for(2, "conv")
    assert "only linear layers" in found["late_multiply"].why
    assert found["late_multiply"].samples_per_second == 0
    assert not found["role conv"].why


@pytest.mark.slow
def test_layers_of_one_pattern_are_placed_alike_and_other_pins_stay() -> None:
    _, program = analysed()
    pins = {"fc7": Placement(holding="replicated"), "fc*": Placement(sync="late_multiply")}
    place = Settings(2, cluster=load_cluster("v100-10gbe"), pins=pins).place()
    plan = place.run(program).plan
    assert {plan.placements[layer].sync for layer in ("fc6", "fc7", "fc8")} == {"late_multiply"}
    found = priced(2, "fc*", pins=pins)["late_multiply"]
    assert found.chosen and found.plan.startswith(plan.strategy)
    narrow = {"fc7": Placement(holding="replicated", sync="all_reduce")}  # which an alternative of all layers replaces
    assert priced(2, "fc*", pins=narrow)["late_multiply"].plan == found.plan


def test_an_unknown_layer_is_refused_with_near_names() -> None:
    with pytest.raises(PlacementError, match="no layer matches 'fc66'; did you mean fc6"):
        priced(2, "fc66")


@pytest.mark.slow
@pytest.mark.usefixtures("net")
def test_the_command_prints_a_table_in_80_columns(capsys: Capture) -> None:
    done = splitc(capsys, "explain net.py second --world 2 -q")
    assert done.code == 0
    assert done.out.startswith("Net on 2 ranks of v100-10gbe: second in each placement")
    assert any(line.startswith("* ") for line in done.out.splitlines())
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.usefixtures("net")
def test_the_command_says_where_the_choice_flips_in_80_columns_and_its_figures_as_json(capsys: Capture) -> None:
    data = json.loads(splitc(capsys, "explain net.py se* --world 2 --json -q").out)
    assert (data["schema"], data["layers"]) == (1, ["second"])
    assert any(each["chosen"] for each in data["placements"])
    done = splitc(capsys, "explain net.py --sensitivity --world 2 --strategy data_parallel -q")
    assert done.code == 0 and max(map(len, done.out.splitlines())) <= 80
    assert re.match(r"Net on 2 ranks of v100-10gbe: \w+ [\d+]+\n  bandwidth, now 10.0 Gbit/s; ", done.out)
    assert "nothing fits" in " ".join(done.out.split())
    data = json.loads(splitc(capsys, "explain net.py --sensitivity --world 1 --json -q").out)
    assert data["choice"] == "single_device 1"
    assert {"quantity", "value", "text", "choice", "flips"} == set(data["breakpoints"][0])


@pytest.mark.slow
@pytest.mark.usefixtures("net")
def test_what_is_worth_buying_is_what_gains_two_per_cent_planned_anew(capsys: Capture) -> None:
    asked = "explain net.py --buy --world 2 -q"
    slow = f"{asked} --cluster rtx3090-1gbe --strategy data_parallel"
    done = splitc(capsys, slow)
    assert done.code == 0 and max(map(len, done.out.splitlines())) <= 80
    data = json.loads(splitc(capsys, f"{slow} --json").out)
    found = {each["what"]: each for each in data["changes"]}
    gains = [each["gain"] for each in data["changes"]]
    assert gains == sorted(gains, reverse=True)
    for each in data["changes"]:
        assert each["advised"] is (each["gain"] >= 0.02) and (each["what"] in done.out)
        assert each["gain"] == pytest.approx(each["samples_per_second"] / data["now"]["samples_per_second"] - 1)
    assert found["the plan that auto chooses"]["flips"] and found["network cards of 2.50 Gbit/s"]["gain"] > 0
    card = splitc(capsys, "inspect net.py --world 2 -q --json --cluster rtx3090-2.5gbe --strategy data_parallel")
    rate = json.loads(card.out)["samples_per_second"]
    assert found["network cards of 2.50 Gbit/s"]["samples_per_second"] == pytest.approx(rate, rel=0.01)
    enough = splitc(capsys, f"{asked} --global-batch 1").out
    assert enough.startswith("Net on 2 ranks of v100-10gbe: single_device 1, ") and "one process is enough" in enough


@pytest.mark.usefixtures("net")
@pytest.mark.parametrize("line", ["explain net.py --world 2", "explain net.py first --sensitivity --world 2"])
def test_the_command_asks_for_a_layer_or_for_the_sensitivity(capsys: Capture, line: str) -> None:
    done = splitc(capsys, line)
    assert done.code == 2 and "name a layer" in done.err


@pytest.mark.slow
@pytest.mark.usefixtures("net")
def test_a_report_and_a_build_say_what_would_put_idle_ranks_to_work(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITC_ADVICE", "inf")
    line = "1 of 2 ranks is idle"
    asked = "net.py --world 2 -q --global-batch 1"
    assert line in splitc(capsys, f"inspect {asked}").out
    assert json.loads(splitc(capsys, f"inspect {asked} --json").out)["advice"].startswith(line)
    assert line in splitc(capsys, f"compile {asked}").out
    assert line not in splitc(capsys, f"inspect {asked} --strategy single_device").out
