"""The command for machines with GPUs: its table, and its parts on a CPU."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_steps
from benchmarks.gpu import Machine
from benchmarks.gpu_steps import SMALL, Cost, Row

CPU = torch.device("cpu")
TINY = replace(SMALL, layers=1, rounds=1, resnet=1)
MACHINE = Machine(CPU, 0, TINY)
REPORT = """<testsuites><testsuite>
<testcase name="test_a" time="3.2"/>
<testcase name="test_b" time="1"><failure message="AssertionError: 1 | 2&#10;assert"/></testcase>
<testcase name="test_c" time="0"><skipped message="needs 4 GPUs"/></testcase>
<testcase name="test_d" time="0"><skipped message="needs 4 GPUs"/></testcase>
</testsuite></testsuites>"""


def test_without_a_gpu_the_command_says_so_and_ends_with_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "torch sees no GPU here, so nothing was measured" in capsys.readouterr().out


def test_the_page_has_all_rows_and_a_part_that_fails_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(machine: Machine) -> Iterator[Row]:
        yield Row("steps", "a", "1.01", "at most 1.02", True)
        raise RuntimeError("CUDA error | out of memory\nmore")

    monkeypatch.setitem(gpu.PARTS, "steps", fails)
    monkeypatch.setitem(gpu.PARTS, "norms", lambda machine: iter([Row("norms", "b", "2 ms")]))
    output = tmp_path / "gpu.md"
    assert gpu.main(["--device", "cpu", "--small", "--parts", "steps", "norms", "-o", str(output)]) == 1
    text = output.read_text()
    assert "1 of 2 failed; steps: the part itself." in text and f"torch {torch.__version__}" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert rows[1:] == [
        ["steps", "a", "1.01", "at most 1.02", "yes"],
        ["steps", "the part itself", "RuntimeError: CUDA error / out of memory", "", "NO"],
        ["norms", "b", "2 ms", "", ""],
    ]


def test_every_marked_test_has_its_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> None:
        assert any(path.endswith("end_to_end/test_gpu.py") for path in command)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        (option,) = (each for each in command if each.startswith("--junitxml="))
        Path(option.removeprefix("--junitxml=")).write_text(REPORT)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert list(gpu.tests(MACHINE)) == [
        Row("tests", "test_a", "3 s", "passes", True),
        Row("tests", "test_b", "failure: AssertionError: 1 / 2", "passes", False),
        Row("tests", "2 skipped", "needs 4 GPUs"),
    ]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_the_example_has_to_learn_on_a_shared_gpu_and_on_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(arguments: list[str], world: int, quiet: bool) -> subprocess.CompletedProcess[str]:
        seen.append((world, os.environ.get("CUDA_VISIBLE_DEVICES")))
        text = "2 ranks share cuda:0\n" + "".join(f"epoch {k}: loss {2 - k * (3 - world)}.5\n" for k in range(3))
        return subprocess.CompletedProcess(arguments, 0, text, "")

    monkeypatch.setattr(gpu, "torchrun", run)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5")
    shared, own = gpu.prepared(replace(MACHINE, gpus=3))
    assert seen == [(2, "3"), (3, "3,4,5")]
    assert shared.ok and shared.got == "2.5, 1.5, 0.5; 2 ranks share cuda:0"
    assert own.ok is False


@pytest.mark.slow
@pytest.mark.parametrize("part", ["dropout", "norms"])
def test_what_an_op_adds_is_counted_beside_torchs(part: str) -> None:
    *_, row = gpu_steps.PARTS[part](CPU, TINY)
    assert "launches" in row.got and row.ok is None


@pytest.mark.slow
@pytest.mark.parametrize("part", ["steps", "compiled"])
def test_steps_are_compared_with_the_plain_model(part: str) -> None:
    rows = gpu_steps.steps(CPU, TINY) if part == "steps" else gpu_steps.compiled_stages(CPU, TINY, "eager")
    assert {(row.part, row.ok) for row in rows} == {(part, None)}


def test_the_page_names_every_gpu_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda k: "V100" if k else "T4")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    machine = Machine(torch.device("cuda", 0), 3, TINY)
    assert str(machine) == f"1 x T4, 2 x V100, CUDA {torch.version.cuda}, NCCL 2.28.3"


def test_only_a_gpu_has_to_be_as_fast_as_the_plain_model() -> None:
    usual, ours = Cost(1e-3, 10), Cost(1.03e-3, 12)
    assert gpu_steps.compared("steps", "a", usual, ours, CPU).ok is None
    assert gpu_steps.compared("steps", "a", usual, ours, torch.device("cuda")).ok is False
    row = gpu_steps.compared("steps", "a", usual, Cost(1.01e-3, 12), torch.device("cuda"))
    assert row.ok and row.got == "1.010: 1.010 ms, 12 launches; plain 1.000 ms, 10 launches"
