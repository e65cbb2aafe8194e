"""Approximate training against exact: what is read from curves, how campaigns resume, how models are judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.approximate.__main__ import main
from benchmarks.approximate.campaign import wanted
from benchmarks.approximate.curves import Bed, Curve, Key, Point, Results
from benchmarks.approximate.data import Data, digits
from benchmarks.approximate.methods import METHODS
from benchmarks.approximate.report import BEGIN, END, report, time_to
from benchmarks.approximate.tasks import SAMPLE, TASKS, Task, batch_indices, held_out
from benchmarks.errors import BenchmarkError

BED = Bed("mnist", 2, compute=0.02, rate=1e7, cluster="name = 1", about="today, here")


def curve(
    method: str = "ddp", seconds: float = 1.0, seed: int = 0, accuracies: tuple[float, ...] = (0.5, 0.9)
) -> Curve:
    """Points every `seconds` and 100 samples."""
    points = tuple(Point(100 * k, seconds * k, each, 0.1, 1e6 * k) for k, each in enumerate(accuracies, 1))
    return Curve(Key("mnist", 2, method, seed), TASKS["mnist"].recipe(METHODS[method]), "", 0.0, points)


# -- what is read from a curve -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("accuracy", "seconds"), [(0.25, 2.0), (0.5, 2.0), (0.7, 3.0), (0.9, 4.0), (0.95, None)])
def test_the_time_to_an_accuracy_is_linear_between_two_points(accuracy: float, seconds: float | None) -> None:
    assert curve(seconds=2.0).time_to(accuracy) == (None if seconds is None else pytest.approx(seconds))


def test_an_accuracy_that_is_lost_again_was_reached() -> None:
    assert curve(accuracies=(0.5, 0.9, 0.6, 0.95)).time_to(0.9) == pytest.approx(2.0)


def test_the_mean_time_of_seeds_is_none_where_one_of_them_never_comes_there() -> None:
    assert time_to([curve(), curve(seconds=3.0)], 0.9) == pytest.approx(4.0)
    assert time_to([curve(), curve(accuracies=(0.5, 0.8))], 0.9) is None


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


def test_a_line_that_was_cut_off_is_dropped_and_the_next_one_stands_alone(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    Results(file).add(BED)
    file.write_text(file.read_text() + '{"kind": "cur')
    results = Results(file)
    results.add(curve())
    assert len(Results(file).curves) == len(results.beds) == 1


@pytest.mark.parametrize("line", ["hello", "[]", '{"kind": "plan"}', '{"kind": "bed", "task": "mnist"}'])
def test_a_file_of_anything_else_is_refused_by_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(BenchmarkError, match=r"results\.jsonl:1 is no line of a campaign"):
        Results(file)


def test_seeds_come_one_after_the_other_so_that_a_campaign_that_is_stopped_has_whole_ones() -> None:
    keys = wanted(["mnist"], [2, 8], ["ddp", "ist 4", "auto"], seeds=2)
    assert [(key.world, key.seed) for key in keys] == [(2, 0)] * 3 + [(2, 1)] * 2 + [(8, 0)] * 3
    assert len(set(keys)) == 8 and Key("mnist", 2, "auto", 1) not in keys


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


def test_a_curve_is_evaluated_between_rounds_often_at_first_and_at_the_end() -> None:
    assert METHODS["ist 64"].evaluations(384) == [64, 128, 192, 256, 384]
    for method in METHODS.values():
        found = method.evaluations(384)
        assert found[-1] == 384 and len(found) < 20 and all(step % method.period == 0 for step in found)
    assert METHODS["ddp"].evaluations(10) == [4, 6, 8, 10]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_every_task_has_whole_rounds_equal_parts_and_a_rate_for_each_method(task: Task) -> None:
    assert all(task.steps % method.period == 0 and method.family in task.rates for method in METHODS.values())
    assert all(task.batch % world == 0 for world in (2, 4, 8))


def test_every_epoch_reads_each_example_once_but_for_its_odd_end() -> None:
    steps = [batch_indices(10, batch=4, step=step, seed=3) for step in range(4)]
    assert len(set(torch.cat(steps[:2]).tolist())) == len(set(torch.cat(steps[2:]).tolist())) == 8
    assert not torch.equal(steps[0], steps[2]) and not torch.equal(steps[0], batch_indices(10, 4, 0, seed=4))


def test_digits_are_held_out_from_every_class_alike_and_from_training() -> None:
    found = digits(held_out=1000)
    assert (len(found.labels), torch.bincount(found.held_out_labels).tolist()) == (4000, [100] * 10)


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
