"""The table of what `auto` gains over the strategies of the papers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import never_worse
from benchmarks.never_worse import PAPERS, Cell, Result

CELL = Cell("mlp", "v100-10gbe", 2)


def test_a_plan_of_the_papers_that_is_faster_than_auto_is_named() -> None:
    rates = {"data_parallel": 50.0, "late_multiply": 100.0}
    assert not Result(CELL, 100.0, "late_multiply", rates, rates).worse
    (line,) = Result(CELL, 100.0, "late_multiply", rates, {**rates, "hybrid_single": 101.0}).worse
    assert line == (
        "mlp on 2 of v100-10gbe: auto 100 samples/s (late_multiply), hybrid_single, by itself: 101 samples/s"
    )
    assert len(Result(CELL, among=rates, why="no plan").worse) == 2


def test_the_command_goes_on_from_its_file_and_exits_with_1_where_auto_is_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, rates = tmp_path / "found.jsonl", {"data_parallel": 50.0}
    file.write_text(json.dumps(asdict(Result(CELL, 100.0, "mixed", rates, {}))) + "\n", encoding="utf-8")
    planned: list[Cell] = []

    def result(cell: Cell) -> Result:
        planned.append(cell)
        return Result(cell, 40.0, "mixed", rates, {})

    monkeypatch.setattr(never_worse, "result", result)
    command = ["--examples", "mlp", "--clusters", "v100-10gbe", "--from", str(file), "--worlds"]
    assert never_worse.main([*command, "2"]) == 0
    assert never_worse.main([*command, "2,4", "--markdown", str(tmp_path / "page.md")]) == 1
    assert "| mlp | 0.80 to 2.00 (0.8 to 2.0) |" in " ".join((tmp_path / "page.md").read_text().split())
    assert planned == [Cell("mlp", "v100-10gbe", 4)]
    assert "| mlp | v100-10gbe | 2.00 (2.0) | 0.80 (0.8) |" in " ".join(capsys.readouterr().out.split())
    assert set(never_worse.read(file)) == {CELL, Cell("mlp", "v100-10gbe", 4)}


@pytest.mark.slow
def test_auto_is_never_below_a_strategy_of_the_papers() -> None:
    (found,) = never_worse.measure([CELL], jobs=1)
    assert not found.worse
    assert found.auto > 0 and set(found.among) | set(found.alone) == set(PAPERS)
