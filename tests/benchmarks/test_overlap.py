"""Steps beside DDP's: pairs and their intervals, what is resumed, which sides are measured where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.overlap.__main__ import at, main
from benchmarks.overlap.figures import Figures, Measured, interval, report
from benchmarks.overlap.measure import wanted
from benchmarks.overlap.sides import BASE, PLACES, SIDES, Place, Side
from benchmarks.session import Run
from tests.support.sampling import in_one

PLACE = Place(2, "80Mbit")
OTHERS = [Side(BASE, script="ddp"), Side("mine", strategy="data_parallel", against="hand"), Side("hand", script="rows")]


def run(seconds: float, foreign: float = 0.0) -> Run:
    """Two ranks: 0.1 s on processors, 1 MB out and 2 MB in of the busier one."""
    return Run(
        begins=((0.0,),) * 2,
        ends=((seconds,),) * 2,
        sent=(9e5, 1e5),
        processor=(0.1, 0.05),
        carried=(1e6, 1e5),
        foreign=foreign,
        arrived=(2e6, 1e5),
    )


def measured(*alternations: dict[str, Run], cpus: float = 2.0) -> Measured:
    return Measured(PLACE, 32, cpus, 0.05, alternations=alternations)


# -- statistics --------------------------------------------------------------------------------------------------------


def test_a_ratio_pairs_the_runs_of_one_alternation() -> None:
    found = measured({BASE: run(2.0), "mine": run(1.0)}, {BASE: run(9.0)}, {BASE: run(3.0), "mine": run(2.0)})
    assert found.ratios("mine") == [2.0, 1.5]
    assert found.ratios("mine", "hand") == []
    assert found.seconds("mine") == 1.5


def test_a_run_that_was_disturbed_counts_nowhere() -> None:
    busy, idle = run(9.0, foreign=0.06), run(1.0, foreign=0.04)
    found = measured({BASE: run(2.0), "mine": busy}, {BASE: busy, "mine": idle}, {BASE: run(3.0), "mine": idle})
    assert found.ratios("mine") == [3.0]
    assert found.runs("mine") == [idle, idle]


@in_one
@pytest.mark.parametrize(("cpus", "seconds"), [(2.0, 0.2), (0.5, 0.4)])
def test_the_bound_is_the_busier_way_of_a_link_or_processor_time_by_its_share(cpus: float, seconds: float) -> None:
    assert measured({BASE: run(1.0)}, cpus=cpus).bound(BASE) == pytest.approx(seconds)


def test_the_interval_holds_the_median_and_narrows_with_more_pairs() -> None:
    few = interval([1.0, 1.1, 1.2, 1.3, 1.4])
    many = interval([1.0, 1.1, 1.2, 1.3, 1.4] * 20)
    assert few[0] <= 1.2 <= few[1] and few[0] <= many[0] <= 1.2 <= many[1] <= few[1]
    assert many[1] - many[0] < few[1] - few[0]
    assert interval([1.5] * 15) == (1.5, 1.5)


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_a_side_with_too_few_pairs_is_measured_again_beside_ddp() -> None:
    pair = {BASE: run(2.0), "mine": run(1.0)}
    found = measured(pair, {BASE: run(2.0), "mine": run(1.0, foreign=0.5)})
    rounds = [[side.name for side in each] for each in wanted(found, OTHERS, 2)]
    assert rounds == [[BASE, "mine", "hand"], [BASE, "hand"]]
    assert wanted(replace(found, missing={"hand": "no"}), OTHERS, 1) == []
    assert len(wanted(measured(pair), OTHERS[:1], 3)) == 2


def test_a_file_is_read_as_it_was_written_and_a_side_can_be_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "overlap.json"
    found = replace(measured({BASE: run(2.0), "mine": run(1.0)}), predicted={"mine": 1.1}, missing={"hand": "no"})
    figures = Figures(file)
    figures.about = {"date": "today"}
    figures.put(found)
    assert Figures(file).places == {PLACE: found} and Figures(file).about == figures.about
    figures.forget("mine")
    assert Figures(file).places[PLACE].alternations == ({BASE: run(2.0)},)


# -- sides -------------------------------------------------------------------------------------------------------------


def test_every_side_is_measured_somewhere_and_compared_with_what_is_measured_there() -> None:
    for side in SIDES:
        places = [place for place in PLACES if side in at(place, SIDES, [])]
        assert places and {str(place) for place in places} >= set(side.places)
        assert all(side.against in ["", *(each.name for each in at(place, SIDES, []))] for place in places)


# -- tables ------------------------------------------------------------------------------------------------------------


def test_the_table_has_ratios_with_intervals_bounds_and_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "overlap.json"
    figures = Figures(file)
    one = {BASE: run(2.0), "mine": run(0.5), "hand": run(0.4)}
    figures.put(replace(measured(one, one), predicted={"mine": 0.55}, missing={"rows": "pins have no state"}))
    text = report(figures, {"mine": "hand"})
    rows = [[word.strip() for word in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert rows[3] == [
        "2@80Mbit", "mine", "500 ms", "4.000 [4.000, 4.000]", "0.800 [0.800, 0.800]", "200 ms", "2.50", "+10.0%", "2"
    ]  # fmt: skip
    assert "32 examples a rank, 224 x 224" in text and "- not measured: 2@80Mbit rows: pins have no state" in text
    assert main(["--table", "-o", str(file)]) == 0 and "500 ms" in capsys.readouterr().out
