"""`splitc diff`: what differs between two plans, in words and as an exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from splitc.cli.diffing import Difference, decided, layers
from splitc.ir.plan import Plan
from tests.support.command import splitc
from tests.support.every_strategy import planned

Capture = pytest.CaptureFixture[str]


def plan(strategy: str, world: int = 4) -> Plan:
    return planned(world, strategy).plan


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "plan.json").write_text(plan("layer_separation(n_c=3, n_f=1)").to_json())
    (tmp_path / "b.json").write_text(plan("late_multiply").to_json())
    return tmp_path


def test_the_decisions_that_differ_are_named_with_both_sides() -> None:
    before, after = plan("layer_separation(n_c=3, n_f=1)"), plan("late_multiply(microbatches=2)", 3)
    found = {each.what: each for each in decided(before, after)}
    assert str(found["world"]) == "world: 4 -> 3"
    assert str(found["microbatches"]) == "microbatches: 1 -> 2"
    assert str(found["roles"]) == "roles: conv on ranks 0-2, fc on rank 3 -> all on ranks 0-2"
    assert found["examples"].before == "12: conv 4, 4, 4; fc 12"


def test_consecutive_layers_that_differ_alike_are_one_line() -> None:
    before, after = plan("layer_separation(n_c=3, n_f=1)"), plan("late_multiply")
    found = list(layers(before, after))
    assert Difference("fc6 to fc7 (2 layers)", "conv all_reduce", "all late_multiply") in found
    fewer = replace(after, placements={name: place for name, place in after.placements.items() if name != "fc7"})
    assert list(layers(after, fewer)) == [Difference("fc7", after.placements["fc7"].role + " late_multiply", "")]


def test_builds_and_files_are_compared_and_a_difference_is_exit_code_1(capsys: Capture, files: Path) -> None:
    done = splitc(capsys, "diff a b.json")
    assert (done.code, done.err) == (1, "")
    assert "  strategy: layer_separation -> late_multiply\n" in done.out
    data = json.loads(splitc(capsys, "diff a b.json --json").out)
    assert (data["schema"], data["equal"]) == (1, False)
    assert {"what": "strategy", "before": "layer_separation", "after": "late_multiply"} in data["decided"]


def test_plans_that_decide_the_same_are_exit_code_0_whatever_they_predict(capsys: Capture, files: Path) -> None:
    text = json.loads((files / "b.json").read_text())
    (files / "c.json").write_text(json.dumps({**text, "step_seconds": 9.0, "priced_on": "c0ffee"}))
    done = splitc(capsys, "diff b.json c.json")
    assert done.code == 0
    assert "both decide the same" in done.out and "  step: " in done.out
    assert "cluster: " in done.out and "(c0ffee)" in done.out


def test_a_file_that_is_no_plan_is_exit_code_2(capsys: Capture, files: Path) -> None:
    assert splitc(capsys, "diff a none.json").code == 2
