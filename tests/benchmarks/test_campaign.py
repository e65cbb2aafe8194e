"""The accuracy campaign: its cells, statistics, table and JSON, and how its runs are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks import accuracy
from benchmarks.accuracy import cells, predicted_again
from benchmarks.campaign import LEAST, Campaign, Settings
from benchmarks.cases import Case, predictions
from benchmarks.errors import BenchmarkError
from benchmarks.figures import MEDIAN, WORST, Cell, Figures, Result, report
from benchmarks.session import Run, Session
from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import PlacementError
from splitc.ir.cluster_file import to_toml
from tests.support.sampling import in_one

CELL = Cell("mlp", "data_parallel", 2, "230Mbit")
MODEL = """
import torch
from torch import nn

model = lambda: nn.Sequential(nn.Linear(32, 200), nn.ReLU(), nn.Linear(200, 4))
loss = nn.functional.cross_entropy
example = lambda batch=8: torch.randn(batch, 32)
target = lambda batch=8: torch.randint(4, (batch,))
"""


def run(seconds: float, foreign: float = 0.0, steps: int = 1) -> Run:
    """Two ranks that take `seconds` for each step."""
    begins = tuple(k * seconds for k in range(steps))
    ends = tuple((k + 1) * seconds for k in range(steps))
    return Run((begins,) * 2, (ends,) * 2, (10.0,) * 2, (0.1,) * 2, (11.0,) * 2, foreign)


def result(*seconds: float, cell: Cell = CELL, predicted: float | None = None, foreign: Sequence[float] = ()) -> Result:
    loads = (*foreign, *[0.0] * (len(seconds) - len(foreign)))
    runs = tuple(run(each, load) for each, load in zip(seconds, loads, strict=True))
    return Result(cell, "", {} if predicted is None else {"roofline": predicted, "closed": predicted * 2}, runs)


def timed(what: str, measured: float, fitted: float) -> dict[str, Any]:
    return {"what": what, "measured": measured, "fitted": fitted}


def figures(*results: Result) -> Figures:
    clusters = {"2 230Mbit": "name = 1"}
    residuals = {"2 230Mbit": [timed("send", 1.0, 1.1), timed("receive", 2.0, 1.0)], "2 none": []}
    return Figures({"machine": "this one"}, 0.05, clusters, residuals, results)


# -- cells -------------------------------------------------------------------------------------------------------------


def test_what_no_bed_and_no_planner_knows_is_refused_before_anything_is_launched() -> None:
    with pytest.raises(PlacementError, match="unknown strategy 'data_paralel'"):
        cells(["mlp"], ["data_paralel"], [2], ["none"])
    with pytest.raises(BenchmarkError, match="'fast' is no rate"):
        cells(["mlp"], ["data_parallel"], [2], ["fast"])
    with pytest.raises(BenchmarkError, match="rate: 2 values for 4 ranks"):
        cells(["mlp"], ["data_parallel"], [2, 4], ["230Mbit,100Mbit"])
    assert cells(["mlp"], ["data_parallel"], [2], ["230Mbit,100Mbit"])[0].rate == "230Mbit,100Mbit"


# -- statistics --------------------------------------------------------------------------------------------------------


def test_a_step_of_all_ranks_lasts_from_the_last_begin_to_the_last_end() -> None:
    """Rank 1 ends later at first, rank 0 in the end: three steps from 0.5 to 9.5."""
    both = Run(((0.0, 2.0, 6.0), (0.5, 3.5, 6.5)), ((2.0, 6.0, 9.5), (3.5, 6.5, 9.0)), (), (), (), 0.0)
    assert both.step_seconds == pytest.approx((3.0 + 3.0 + 3.0) / 3)
    assert both.seconds == ((2.0, 4.0, 3.5), (3.0, 3.0, 2.5))


def test_one_run_out_of_line_moves_neither_the_median_nor_the_noise() -> None:
    calm, startled = result(1.0, 1.1, 1.2, 1.3, 1.4), result(1.0, 1.1, 1.2, 1.3, 99.0)
    assert calm.measured == startled.measured == pytest.approx(1.2)
    assert calm.noise == startled.noise == pytest.approx(0.1 / 1.2)
    assert result(1.0).noise == 0.0


@in_one
@pytest.mark.parametrize(
    ("errors", "within"),
    [
        ((MEDIAN, MEDIAN, WORST), True),
        ((-MEDIAN, -MEDIAN, -WORST), True),
        ((0.0, 0.0, WORST + 0.01), False),
        ((0.0, -MEDIAN - 0.01, MEDIAN + 0.01), False),
    ],
)
def test_predictions_are_within_when_the_median_and_the_worst_are(errors: tuple[float, ...], within: bool) -> None:
    results = [result(1.0, cell=replace(CELL, world=n), predicted=1 + e * (1 - 1e-12)) for n, e in enumerate(errors, 2)]
    assert figures(*results).within is within
    assert not figures(*results, Result(Cell("other", "data_parallel", 2, "none"))).within, "a cell is missing"


# -- table and JSON ----------------------------------------------------------------------------------------------------


def test_the_table_shows_each_cell_marks_disturbed_ones_and_names_what_is_missing() -> None:
    text = report(
        figures(
            result(0.1, 0.1, predicted=0.11, foreign=(0.2,)),
            result(0.4, cell=Cell("vgg", "late_multiply", 4, "none"), predicted=0.3),
            replace(result(), cell=Cell("mlp", "modulo_shard", 3, "none"), why="3 ranks make no groups"),
        )
    )
    rows = [[word.strip() for word in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert rows[0] == [
        *("model", "strategy", "ranks", "network", "measured", "noise"),
        *("roofline", "error", "program", "error"),
    ]
    assert rows[2:4] == [
        ["mlp", "data_parallel", "2", "230Mbit", "100 ms*", "0.0%", "110 ms", "+10.0%", "220 ms", "+120.0%"],
        ["vgg", "late_multiply", "4", "unshaped", "400 ms", "-", "300 ms", "-25.0%", "600 ms", "+50.0%"],
    ]
    assert rows[4] == ["2 ranks", "network", "mlp"] and rows[6] == ["data_parallel", "230Mbit", "100 ms, +10.0%"]
    assert rows[7] == ["4 ranks", "network", "vgg"] and rows[9] == ["late_multiply", "unshaped", "400 ms, -25.0%"]
    assert "- roofline: error median 17.5%, worst -25.0% (vgg late_multiply, 4 ranks, unshaped)" in text
    assert "more than 5% of the processors in 1 of 3 runs" in text
    assert "- calibration of 2 ranks, 230Mbit: fits miss by 30.0%, at worst -50.0% (receive)" in text
    assert "- not measured: mlp modulo_shard, 3 ranks, unshaped: 3 ranks make no groups" in text


def test_figures_read_back_from_their_json_are_equal() -> None:
    made = figures(result(0.1, 0.2, predicted=0.11), Result(CELL, why="no plan"))
    assert Figures.from_json(made.to_json(), "here") == made


@in_one
@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1}', '{"schema": 1, "results": [{}]}', '{"schema": 2}'])
def test_a_text_that_is_no_figures_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(BenchmarkError, match=r"^some\.json "):
        Figures.from_json(text, "some.json")


def test_the_table_is_made_again_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    made = figures(result(1.0, 1.0, predicted=1.05))
    file.write_text(made.to_json())
    assert accuracy.main(["--from", str(file)]) == 0
    assert capsys.readouterr().out == f"machine: this one\n\n{report(made)}\n"
    file.write_text(figures(result(1.0, 1.0, predicted=2.0)).to_json())
    assert accuracy.main(["--from", str(file)]) == 1
    assert accuracy.main(["--from", str(tmp_path / "other.json")]) == 2
    assert "error: cannot read" in capsys.readouterr().err


@pytest.mark.slow
def test_plans_of_an_earlier_campaign_are_predicted_again_on_its_clusters(tmp_path: Path) -> None:
    model = tmp_path / "tiny_perceptron.py"
    model.write_text(MODEL)
    cell, cluster = Cell(str(model), "data_parallel", 2, "none"), load_cluster("v100-10gbe")
    case = Case(cell.model)
    compiled = case.compile(cell, cluster)
    measured = Result(cell, compiled.plan.to_json(), {"roofline": 9.0}, (run(1.0),))
    before = replace(figures(measured), clusters={"2 none": to_toml(cluster)})
    after = predicted_again(before).results[0]
    assert after.predicted == predictions(compiled.program, cluster)
    assert replace(after, predicted=measured.predicted) == measured, "nothing else changes"


# -- runs --------------------------------------------------------------------------------------------------------------


class Rehearsal:
    """In the place of a session and its testbed: runs that take `seconds` a step, beside the given foreign loads."""

    def __init__(self, seconds: float, *loads: float) -> None:
        self.seconds, self.loads, self.asked = seconds, list(loads), list[int]()
        self.testbed = self
        self.rates: list[object] = []

    def set_rate(self, rate: object) -> None:
        self.rates.append(rate)

    def load(self, name: str, folder: Path) -> None:
        self.loaded = [name]

    def unload(self, name: str) -> None:
        self.loaded.remove(name)

    def run(self, name: str, steps: int, warm_up: int) -> Run:
        assert name in self.loaded
        self.asked.append(steps)
        return run(self.seconds, self.loads.pop(0) if self.loads else 0.0, steps)


def campaign(tmp_path: Path) -> Campaign:
    return Campaign([CELL], Settings(), tmp_path, lambda line: None)


def measure(made: Campaign, session: Rehearsal) -> Run:
    return made._measure(cast(Session, session), CELL, Path("build"))


def test_a_run_is_repeated_while_others_disturb_it_and_the_rate_is_the_cells(tmp_path: Path) -> None:
    session = Rehearsal(1.0, 0.5, 0.06, 0.05, 0.0)
    assert measure(campaign(tmp_path), session).foreign == 0.05
    assert (session.asked, session.rates) == ([LEAST] * 3, [28.75e6])


def test_a_cell_with_short_steps_is_run_again_with_more_and_keeps_their_number(tmp_path: Path) -> None:
    made, session = campaign(tmp_path), Rehearsal(0.125)
    found = [measure(made, session) for _ in range(3)]
    assert session.asked == [LEAST, 8, 8, 8]
    assert all(len(each.ends[0]) == 8 for each in found)
