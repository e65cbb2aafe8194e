"""`--require` and several clusters in one request: bounds are read strictly, and missed by a number on a cluster."""

from __future__ import annotations

import json

import pytest

from splitc.cli.comparing import QUANTITIES, judged, parse_bound
from splitc.errors import LaunchError
from tests.support.command import splitc

Capture = pytest.CaptureFixture[str]
ROW = {"cluster": "there", "step_seconds": 0.05, "samples_per_second": 400.0, "memory_bytes": 16e9}
TOLD = {49_999.0: "4,999,900%"}  # a far miss without parts of a percent


def test_a_bound_is_met_or_missed_by_a_part_of_it() -> None:
    row = {**dict.fromkeys(key for key, *_ in QUANTITIES.values()), **ROW}
    for text, by in (
        ("samples/s>=400", 0.0),
        ("samples/s >= 500", 0.2),
        ("step<=50ms", 0.0),
        ("Step <= 40000 us", 0.25),
        ("memory<=8GB", 1.0),
        ("step<=1us", 49_999.0),
        ("memory<=16e9", 0.0),
        ("xddp>=2", None),
        ("sends<=1MB", None),
    ):
        (found,) = judged([text], [row])
        assert found["met"] is (by == 0) and found["by"] == (by if by is None else pytest.approx(by)), text
        end = "met" if by == 0 else "not known; not met" if by is None else f"not met, by {TOLD.get(by, f'{by:.2%}')}"
        assert found["text"].startswith(f"there: {text}: ") and found["text"].endswith(end), text


def test_what_is_no_bound_is_said_with_what_there_is() -> None:
    for text, said in (
        ("samples/sec>=400", "unknown quantity 'samples/sec'; did you mean samples/s? there are step, samples/s"),
        *((text, "write QUANTITY>=NUMBER or <=") for text in ("samples/s=>400", "samples/s>400", "samples/s>=-4", "")),
        *((text, "above 0 and with its unit") for text in ("samples/s>=nan", "samples/s>=0", "samples/s>=4ms")),
        *((text, "'step<=50ms', 'memory<=16GB'") for text in ("step<=50", "memory<=16ms", "step<=1e", "step<=50msx")),
    ):
        with pytest.raises(LaunchError) as error:
            parse_bound(text)
        assert f"--require {text}: " in str(error.value) and said in str(error.value), text


def test_wrong_input_ends_with_2_with_a_requirement_too(capsys: Capture) -> None:
    for line in (
        "inspect none.py --world 2 --require step<=1s",
        "inspect --require=step<=1s",
        "inspect none.py --world 2 --require step",
        "compile none.py --world 2 --require speed>=1",
        "inspect none.py --world 2",
    ):
        done = splitc(capsys, line)
        assert done.code == 2 and done.err.startswith("splitc: "), line
    done = splitc(capsys, "inspect none.py --world 2 --cluster v100-10gbe,nowhere")
    assert done.code == 2 and "unknown cluster 'nowhere'" in done.err


@pytest.mark.slow
@pytest.mark.usefixtures("net")
def test_clusters_are_compared_best_first_and_the_best_ones_report_follows(capsys: Capture) -> None:
    asked = "inspect net.py --world 2 -q --cluster rtx3090-1gbe,v100-10gbe --strategy data_parallel"
    done = splitc(capsys, f"{asked} --require samples/s>=1 --require step<=200us")
    rows = [line.split()[0] for line in done.out.split("\n\n")[0].splitlines()[2:]]
    assert rows == ["v100-10gbe", "rtx3090-1gbe"] and "Net on 2 ranks of v100-10gbe" in done.out
    assert done.code == 1 and max(map(len, done.out.splitlines())) <= 80
    (missed,) = [line for line in done.out.splitlines() if "not met" in line]
    assert missed.startswith("rtx3090-1gbe: step<=200us: step is ") and ", by " in missed
    data = json.loads(splitc(capsys, f"{asked} --json --require samples/s>=1").out)
    assert data["cluster"] == "v100-10gbe" and [each["cluster"] for each in data["clusters"]] == rows
    assert data["clusters"][0]["samples_per_second"] == pytest.approx(data["samples_per_second"])
    assert data["clusters"][0]["times_ddp"] == pytest.approx(1.0)
    assert [each["met"] for each in data["required"]] == [True, True]
    assert data["request"] in splitc(capsys, "inspect net.py --world 2 -q --strategy data_parallel").out


@pytest.mark.slow
@pytest.mark.usefixtures("net")
def test_a_build_that_misses_a_bound_is_not_written(capsys: Capture) -> None:
    done = splitc(capsys, "compile net.py --world 2 -q --require memory<=1kB")
    assert done.code == 1 and "memory is" in done.out and "wrote" not in done.out
    done = splitc(capsys, "compile net.py --world 2 -q --require memory<=1GB")
    assert done.code == 0 and "; met" in done.out and "wrote build/" in done.out


@pytest.mark.slow
@pytest.mark.usefixtures("net")
def test_a_cluster_without_a_plan_is_a_row_with_the_reason(capsys: Capture) -> None:
    done = splitc(capsys, "clusters v100-10gbe")
    with open("small.toml", "w") as file:
        file.write(done.out.replace("memory = 16000000000.0", "memory = 100.0"))
    asked = "inspect net.py --world 2 -q --cluster small.toml,v100-10gbe --require step<=1s"
    done = splitc(capsys, asked)
    assert done.code == 1 and "small.toml  not possible" in done.out and "  small.toml: " in done.out
    assert "small.toml: step<=1s: step is not known; not met" in done.out
