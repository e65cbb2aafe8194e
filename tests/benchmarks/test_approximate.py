"""Approximate training against exact: what is read from curves, how campaigns resume, how models are judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.approximate.__main__ import main
from benchmarks.approximate.curves import Bed, Curve, Key, Point, Results
from benchmarks.approximate.data import Data
from benchmarks.approximate.methods import METHODS
from benchmarks.approximate.report import BEGIN, END, report
from benchmarks.approximate.tasks import SAMPLE, TASKS, held_out
from tests.support.sampling import in_one

BED = Bed("mnist", 2, compute=0.02, rate=1e7, cluster="name = 1", about="today, here")


def curve(
    method: str = "ddp", seconds: float = 1.0, seed: int = 0, accuracies: tuple[float, ...] = (0.5, 0.9)
) -> Curve:
    """Points every `seconds` and 100 samples."""
    points = tuple(Point(100 * k, seconds * k, each, 0.1, 1e6 * k) for k, each in enumerate(accuracies, 1))
    return Curve(Key("mnist", 2, method, seed), TASKS["mnist"].recipe(METHODS[method]), "", 0.0, points)


# -- what is read from a curve -----------------------------------------------------------------------------------------


@in_one
@pytest.mark.parametrize(("accuracy", "seconds"), [(0.25, 2.0), (0.5, 2.0), (0.7, 3.0), (0.9, 4.0), (0.95, None)])
def test_the_time_to_an_accuracy_is_linear_between_two_points(accuracy: float, seconds: float | None) -> None:
    assert curve(seconds=2.0).time_to(accuracy) == (None if seconds is None else pytest.approx(seconds))


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_what_a_campaign_has_written_is_not_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    done = curve()
    Results(file).add(BED)
    Results(file).add(done)
    resumed = Results(file)
    assert resumed.beds == {("mnist", 2): BED} and resumed.curves == {done.key: done}
    other = replace(done.key, seed=1)
    assert resumed.missing([(done.key, done.recipe), (other, done.recipe)]) == [other]


def test_a_curve_of_another_recipe_is_measured_again_and_replaces_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    old = replace(curve(), recipe="another rate")
    Results(file).add(old)
    assert Results(file).missing([(old.key, curve().recipe)]) == [old.key]
    Results(file).add(curve(seconds=9.0))
    assert Results(file).curves == {old.key: curve(seconds=9.0)}


# -- tables ------------------------------------------------------------------------------------------------------------


def test_the_table_compares_means_over_the_seeds_with_those_of_ddp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.jsonl"
    results = Results(file)
    curves = [
        curve(seed=0),
        curve(seed=1),
        curve("ist 16", 0.25, 0, (0.5, 0.91)),
        curve("ist 16", 0.25, 1, (0.5, 0.93)),
    ]
    results.add(BED)
    for each in curves:
        results.add(each)
    text = report(results)
    rows = [[word.strip() for word in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert rows[2] == ["2", "ddp", "2", "100", "10.00", "2.0", "-", "1.0", "90.0% ± 0.0%", "+0.0"]
    assert rows[3] == ["2", "ist 16", "2", "400", "10.00", "0.5", "-", "4.1", "92.0% ± 1.4%", "+2.0"]
    assert "2 ranks: 80 Mbit/s a link, a rank computes 20.0 ms" in " ".join(text.split())
    assert main(["--table", "--out", str(file)]) == 0
    assert capsys.readouterr().out == text + "\n"


@pytest.mark.slow
def test_a_page_gets_the_tables_between_its_marks_and_the_same_curves_make_the_same_plot(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    results.add(BED)
    results.add(curve())
    for name in ("a.md", "b.md"):
        (tmp_path / name).write_text(f"Title\n\n{BEGIN}\nold\n{END}\n\nThe rest\n")
        assert main(["--page", str(tmp_path / name), "--out", str(tmp_path / "results.jsonl")]) == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    text = (tmp_path / "a.md").read_text()
    assert text.startswith(f"Title\n\n{BEGIN}\n\n{report(results)}\n\n![")
    assert text.endswith(f"](a.svg)\n\n{END}\n\nThe rest\n") and "old" not in text


# -- training and evaluation -------------------------------------------------------------------------------------------


def test_a_model_is_judged_with_the_means_and_deviations_of_training_examples() -> None:
    """Shifted held-out inputs would be easy with statistics of their own."""
    task = replace(TASKS["mnist"], sizes=(4, 4))
    inputs = torch.randn(SAMPLE, 4)
    labels = inputs.argmax(1)
    state = {"layers.0.weight": torch.eye(4), "layers.0.bias": torch.zeros(4), "norms.0.running_mean": torch.ones(4)}
    accuracy, loss = held_out(task, Data(inputs, labels, inputs, labels), state)
    assert accuracy > 0.95 and loss < 1.0
    shifted = inputs + torch.tensor([100.0, 0, 0, 0])
    assert held_out(task, Data(inputs, labels, shifted, labels), state)[0] < 0.5
