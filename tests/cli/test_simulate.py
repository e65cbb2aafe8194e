"""`splitc simulate`: tables over worlds and bandwidths, and the timeline of one plan."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from splitc.cli.simulating import Cell, parse_bandwidths, parse_worlds, sweep, tables
from splitc.cost_models.clusters.named import load_cluster
from splitc.errors import LaunchError
from tests.support.command import splitc
from tests.support.every_strategy import analysed

STRATEGIES = ("parameter_server", "data_parallel", "layer_separation")


def cells(
    worlds: Sequence[int], bandwidths: Sequence[float], strategies: Sequence[str] = STRATEGIES, **options: Any
) -> list[Cell]:
    _, program = analysed()
    return list(sweep(program, load_cluster("v100-10gbe"), worlds, bandwidths, strategies, **options))


def test_worlds_are_numbers_lists_and_ranges() -> None:
    assert [parse_worlds(text) for text in ("16,4,8", "2,4:6", "5:80:25")] == [
        [4, 8, 16],
        [2, 4, 5, 6],
        [5, 30, 55, 80],
    ]
    for text in ("", "0", "x", "8:4", "5:80:0", "4,,8"):
        with pytest.raises(LaunchError, match="--world"):
            parse_worlds(text)


def test_bandwidths_are_bits_per_second_with_a_unit() -> None:
    assert parse_bandwidths("25g,2.6G,100m, 1Gbit/s") == [25e9 / 8, 2.6e9 / 8, 100e6 / 8, 1e9 / 8]
    for text in ("25", "g", "25q", "0g", ""):
        with pytest.raises(LaunchError, match="--bandwidth"):
            parse_bandwidths(text)


def test_gradients_that_are_accumulated_travel_once_for_all_batches() -> None:
    each, once = (cells([4], [1e8], ["data_parallel"], accumulate=number)[0] for number in (1, 4))
    assert once.sent_bytes == pytest.approx(each.sent_bytes / 4, rel=0.2)
    assert once.step_seconds < each.step_seconds
    text = tables([once], ["data_parallel"], None)
    assert "sent a batch" in text and "sent a batch" not in tables([each], ["data_parallel"], None)


@pytest.mark.slow
def test_more_bandwidth_is_never_slower() -> None:
    found = cells([4], [1e6, 1e7, 1e8, 1e9])
    for strategy in STRATEGIES:
        rates = [c.samples_per_second for c in found if c.strategy == strategy]
        assert rates == sorted(rates)


def test_a_world_without_room_for_a_strategy_says_why_in_its_cell() -> None:
    found = cells([1], [1e9], ["layer_separation", "data_parallel"])
    assert found[0].samples_per_second == 0.0
    assert "layer_separation" in found[0].why
    assert found[1].samples_per_second > 0
    text = tables(found, ["layer_separation", "data_parallel"], None)
    assert "no layer_separation at 1: " in text


@pytest.mark.slow
def test_a_thousand_ranks_take_seconds() -> None:
    begin = time.process_time()
    (cell,) = cells([1024], [1e9], ["layer_separation(n_c=960, n_f=64)"])
    assert cell.roles == "960 + 64"
    assert time.process_time() - begin < 30


@pytest.mark.slow
def test_the_command_prints_tables_json_and_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = "examples/mlp.py"
    done = splitc(capsys, f"simulate {model} --world 2,4 --bandwidth 1g,10g --against parameter_server")
    assert done.code == 0, done.err
    assert "1.00 Gbit/s" in done.out
    assert "gain over parameter_server" in done.out
    asked = splitc(capsys, f"simulate {model} --world 2 --strategies data_parallel --json")
    (cell,) = json.loads(asked.out)["models"]["MLP"]
    assert cell["strategy"] == "data_parallel"
    trace = tmp_path / "timeline.json"
    asked = splitc(capsys, f"simulate {model} --world 2 --strategies data_parallel --trace {trace}")
    assert asked.code == 0, asked.err
    assert {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]} == {0, 1}


def test_what_cannot_be_simulated_is_said_before_a_model_is_traced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "none.py").write_text("raise SystemExit")
    for arguments, said in (
        ("--world 4:2", "--world 4:2"),
        ("--world 4 --bandwidth 10", "--bandwidth 10"),
        ("--world 4 --strategies data_parallell", "unknown strategy 'data_parallell'"),
        ("--world 4 --against nothing", "unknown strategy 'nothing'"),
        ("--world 4 --strategies auto --trace nowhere/x.json", "there is no folder"),
        ("--world 4 --trace x.json", "the timeline of one plan"),
    ):
        done = splitc(capsys, f"simulate {tmp_path}/none.py {arguments}")
        assert done.code == 2 and said in done.err


@pytest.mark.slow
def test_options_of_a_strategy_may_have_commas(capsys: pytest.CaptureFixture[str]) -> None:
    several = ["local_sgd(period=4,fragments=2)", "local_sgd(period=4)"]
    options = f"--world 2 --json --strategies {','.join(several)} --against data_parallel"
    done = splitc(capsys, f"simulate examples/mlp.py {options}")
    assert done.code == 0, done.err
    assert [row["strategy"] for row in json.loads(done.out)["models"]["MLP"]] == ["data_parallel", *several]
