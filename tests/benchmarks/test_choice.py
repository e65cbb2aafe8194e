"""Regret of what is chosen: rounds and their statistics, what is resumed, which plans are compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cases import Case
from benchmarks.choice import measure
from benchmarks.choice.__main__ import main
from benchmarks.choice.cases import CELLS, MODELS, decision, proposed, strategies
from benchmarks.choice.figures import AUTO, TUNED, Cell, Figures, Measured, Side, report
from benchmarks.choice.measure import Measuring, Settings, brief, in_rounds, untuned, with_tuned
from benchmarks.errors import BenchmarkError
from benchmarks.overlap.sides import Place
from splitc.cost_models.clusters.named import load_cluster
from splitc.ir.cluster_file import to_toml
from splitc.ir.plan import Plan
from tests.benchmarks.testbeds import skip_without_a_testbed

CELL = Cell("mlp", Place(2, "230Mbit"))
APART = Plan("layer_separation", 3, {"a": (0, 1), "b": (2,)}, {}, {"a": (0, 4, 8), "b": (0, 8)}, 4).to_json()
ALONE = Plan("single_device", 1, {"all": (0,)}, {}, {"all": (0, 8)}).to_json()


def measured(*firsts: float, rounds: tuple[dict[int, float], ...] = ()) -> Measured:
    """Auto's plan, then the tuned one, others and DDP, with the seconds of their brief runs."""
    asked = (AUTO, TUNED, *(f"other {k}" for k in range(len(firsts) - 3)), "DDP")
    sides = [
        Side((name,), "" if name == "DDP" else APART, predicted=1.0, first=first)
        for name, first in zip(asked, firsts, strict=True)
    ]
    return Measured(CELL, 100, tuple(sides), rounds=rounds)


# -- statistics --------------------------------------------------------------------------------------------------------


def test_regret_pairs_the_seconds_of_one_round_and_has_an_interval() -> None:
    slow, fast = {0: 2.0, 1: 1.0, 2: 1.1}, {0: 1.0, 1: 1.0, 2: 1.1}
    found = measured(9.0, 9.0, 9.0, 9.0, rounds=(slow, slow, slow, fast))
    regret = found.regret(AUTO)
    assert regret is not None and regret.best == 1
    assert (regret.regret, regret.high) == (1.0, 1.0) and regret.low <= 0.5 and regret.beyond == max(0.0, regret.low)
    best = found.regret(TUNED)
    assert best is not None and (best.regret, best.best, best.beyond) == (0.0, None, 0.0)


def test_a_choice_without_rounds_has_no_regret_and_its_cell_is_told() -> None:
    found = measured(1.0, 0.0, 1.0, 1.0, rounds=({2: 1.0},))
    assert found.regret(AUTO) is None and found.regret(TUNED) is None
    figures = Figures(Path("nowhere.json"))
    figures.cells[CELL] = replace(found, sides=(replace(found.sides[0], why="no memory"), *found.sides[1:]))
    text = report(figures)
    assert "mlp@2@230Mbit has no rounds" in text and "on mlp@2@230Mbit failed: no memory" in text


# -- what is missing ---------------------------------------------------------------------------------------------------


def test_every_side_runs_briefly_once_unless_it_failed_before() -> None:
    found = measured(1.0, 0.0, 0.0, 0.0)
    sides = list(found.sides)
    sides[1], sides[2] = replace(sides[1], predicted=2.0), replace(sides[2], why="a rank ended")
    assert brief(replace(found, sides=tuple(sides))) == [3, 1]


def test_rounds_are_of_the_choices_and_of_the_shortest_others_while_they_may_be_the_best() -> None:
    settings, firsts = Settings(rounds=6, best=2), (1.5, 1.0, 1.3, 1.2, 1.1, 1.0, 3.0)
    assert in_rounds(measured(*firsts), settings) == [0, 1, 5, 4, 6]
    one = {0: 1.5, 1: 1.0, 4: 1.3, 5: 1.2, 6: 3.0}
    assert in_rounds(measured(*firsts, rounds=(one,) * 4), settings) == [0, 1, 5, 6], "the best, and what is next to it"
    near = {**one, 4: 1.0, 5: 1.0}
    assert in_rounds(measured(*firsts, rounds=(one, near, near, one)), settings) == [0, 1, 5, 4, 6]
    assert in_rounds(measured(*firsts, rounds=(one,) * 5), settings) == [0, 1, 5], "scripts are for scale"
    assert in_rounds(measured(*firsts, rounds=(one,) * 6), settings) == []


def test_what_tuning_chose_is_one_of_the_plans_or_one_more_and_has_rounds_of_its_own() -> None:
    settings, rounds = Settings(rounds=2), ({0: 1.0, 2: 1.0},) * 2
    found = measured(1.0, 1.0, 1.0, 1.0, rounds=rounds)
    found = replace(found, sides=(replace(found.sides[0], asked=(AUTO,)), *found.sides[2:]))
    assert untuned(found, settings) and not untuned(found, Settings(tune=0))
    same, more = (with_tuned(found, Plan.from_json(text), {"seconds": 9.0}) for text in (APART, ALONE))
    assert same.sides[0].asked == (AUTO, TUNED) and len(same.sides) == 3
    assert in_rounds(replace(same, rounds=()), settings) == [0, 1, 2], "each once"
    assert [side.asked for side in more.sides[3:]] == [(TUNED,)] and brief(more) == [3]
    assert not untuned(more, settings)
    ran = replace(more, sides=(*more.sides[:3], replace(more.sides[3], first=1.0)))
    assert set(in_rounds(ran, settings)) >= {0, 3}


def test_what_failed_takes_no_part() -> None:
    found = measured(1.0, 1.0, 1.0, 0.0)
    failed = replace(found, sides=(found.sides[0], replace(found.sides[1], why="a rank ended"), *found.sides[2:]))
    assert in_rounds(failed, Settings()) == [0, 2]


def test_a_file_is_read_as_it_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, rounds = tmp_path / "choice.json", ({0: 0.5, 1: 0.4, 2: 0.4, 3: 2.0},) * 3
    figures = Figures(file)
    found = replace(measured(0.5, 0.4, 0.4, 2.0, rounds=rounds), missing={"hybrid_single": "no cut"})
    figures.clusters["2@230Mbit"] = "toml"
    figures.put(found)
    again = Figures(file)
    assert (again.cells, again.clusters) == ({CELL: found}, figures.clusters)
    assert main(["--table", "-o", str(file)]) == 0
    text = capsys.readouterr().out
    assert "layer_separation 2 + 1, 4 microbatches | 25.0% [25.0%, 25.0%]" in text
    assert "4.00 [4.00, 4.00]" in text and "auto, 1 cells: regret: median 25.0%" in text and "+150.0%" in text
    file.write_text("{}")
    assert main(["--table", "-o", str(file)]) == 2


@pytest.mark.parametrize("text", ["mlp", "mlp@4", "mlp@four@1Mbit", "@4@1Mbit", "mlp@4@fast"])
def test_a_cell_is_a_model_ranks_and_a_rate(text: str) -> None:
    with pytest.raises(BenchmarkError):
        Cell.parse(text)
    assert all(Cell.parse(str(cell)) == cell for cell in CELLS)
    assert len(CELLS) == 4 * 5


def test_there_are_models_of_the_names_that_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="there is no model 'vgg7'"):
        Measuring([Cell("vgg7", CELL.place)], Settings(), Figures(tmp_path / "f.json"), tmp_path, print)


# -- plans -------------------------------------------------------------------------------------------------------------


def test_every_exact_strategy_is_compared_in_microbatches() -> None:
    asked = strategies()
    assert {"late_multiply", "late_multiply(microbatches=2)", "modulo_shard(microbatches=4)"} <= set(asked)
    assert "single_device" in asked and not any("local_sgd" in each or "mixed" in each for each in asked)


@pytest.mark.slow
def test_the_plans_of_a_cell_are_distinct_and_of_one_global_batch() -> None:
    case, cluster = Case(MODELS["mlp"].file), load_cluster("cpu16-1gbe")
    found = proposed(case, CELL, cluster, 6)
    plans = [Plan.from_json(side.plan) for side in found.sides if side.plan]
    assert AUTO in found.sides[0].asked and {plan.global_batch for plan in plans} == {found.examples} == {1024}
    assert len({decision(plan) for plan in plans}) == len(plans) > 2
    fastest = min(plan.step_seconds for plan in plans if plan.exact)
    assert plans[0].step_seconds <= fastest * 1.03
    asked = [each for side in found.sides for each in side.asked]
    assert set(strategies()) <= {*asked, *found.missing} and asked[-1] == "DDP"


@pytest.mark.slow
@pytest.mark.processes
def test_plans_are_tuned_and_measured_on_a_testbed_and_one_that_fails_is_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_a_testbed()
    figures = Figures(tmp_path / "choice.json")
    figures.clusters["2@230Mbit"] = to_toml(load_cluster("cpu16-1gbe"))
    settings, said = Settings(rounds=2, best=1, finalists=2, tune=2.0, foreign=1.0), list[str]()
    monkeypatch.setattr("benchmarks.choice.cases.strategies", lambda: ["data_parallel", "late_multiply"])
    do = measure._Runs._open
    failed: list[int] = []

    def fails(self: measure._Runs, k: int, builds: Path) -> None:
        if k == 1 and not failed:
            failed.append(k)
            self._do(k, lambda: self._session.do("load", None, name="side1", folder="nowhere"))
        do(self, k, builds)

    monkeypatch.setattr(measure._Runs, "_open", fails)
    Measuring([CELL], settings, figures, tmp_path, said.append).run()
    found = Figures(tmp_path / "choice.json").cells[CELL]
    assert "weights.pt is missing" in found.sides[1].why and failed == [1]
    assert any("others are launched" in line for line in said)
    assert len(found.rounds) == 2 and all({0, len(found.sides) - 1} <= each.keys() for each in found.rounds)
    assert found.number(TUNED) is not None and len(found.tuning["tried"]) == 2
    assert all(f"{choice}, 1 cells" in report(figures) for choice in (AUTO, TUNED))
