"""Regret of what `auto` chooses, by plans measured on a testbed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cases import Case
from benchmarks.figures import Cell
from benchmarks.regret import File, Measured, Regret, Settings, plans_of, report
from splitc.cost_models.clusters.named import load_cluster
from splitc.ir.plan import Plan
from tests.benchmarks.testbeds import skip_without_a_testbed

CELL = Cell("mlp", "auto", 2, "230Mbit")


@pytest.fixture(scope="module")
def plans() -> list[Measured]:
    return plans_of(Case("mlp"), CELL, load_cluster("cpu16-1gbe"), 6)


@pytest.mark.slow
def test_the_plan_of_auto_leads_distinct_plans_that_were_simulated(plans: list[Measured]) -> None:
    assert [each.chosen for each in plans] == [True] + [False] * (len(plans) - 1)
    assert 2 <= len({each.plan for each in plans}) == len(plans) <= 6
    auto, *others = plans
    fastest = max(each.samples / each.predicted for each in others)
    assert auto.samples / auto.predicted >= fastest * (1 - 1e-9)
    assert {Plan.from_json(each.plan).strategy for each in plans} >= {auto.strategy}


@pytest.mark.slow
def test_regret_counts_the_medians_of_the_second_set_alone(plans: list[Measured], tmp_path: Path) -> None:
    auto, other, third = plans[:3]
    auto = replace(auto, samples=100, first=0.1, again=(1.0, 1.0, 9.0))
    other = replace(other, samples=100, first=9.0, again=(0.8, 0.9, 0.8))
    file = File(tmp_path / "regret.json")
    file.put(CELL, [auto, other, replace(third, first=0.01)])
    text = report(File(tmp_path / "regret.json").cells)
    assert "regret: median 25.0%, worst 25.0% of 1 cells" in text
    assert [cell.strip() for cell in report({CELL: [auto]}).splitlines()[2].split("|")[-4:-1]] == [
        *("the same", "100", "0.0%")
    ]


@pytest.mark.slow
def test_plans_are_measured_on_a_testbed(tmp_path: Path) -> None:
    skip_without_a_testbed()
    file = File(tmp_path / "regret.json")
    settings = Settings(plans=2, best=1, rounds=2, budget=2.0, foreign=1.0)
    Regret(settings, file, lambda line: None).run([CELL])
    assert [len(each.again) for each in file.cells[CELL]] == [2, 2]
    assert "of 1 cells" in report(file.cells)
