"""Every code block of the README and the docs runs: Python as it stands, commands through the command line."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from splitc.cli import main
from splitc.runtime.transport.base import Transport
from splitc.runtime.worker import Worker
from tests import ROOT
from tests.support.compiled import compiled
from tests.support.ranks import on_ranks, worker_of
from tests.support.sampling import sampled

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Block(NamedTuple):
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(*found) for found in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)]


def commands(block: Block) -> list[str]:
    return [
        line.partition(" #")[0]
        for line in block.text.splitlines()
        if line.split()[:1] and line.split()[0] in ("splitc", "torchrun", "make")
    ]


def test_every_block_of_a_page_says_what_it_is_and_every_product_file_that_it_names_exists() -> None:
    for page in PAGES:
        assert {block.language for block in blocks(page)} <= {"python", "sh", "toml", "json", "text", "diff"}
        names = re.findall(r"\b(?:splitc|passes|cost_models|tests|benchmarks)/[\w/.-]+\.py\b", page.read_text())
        assert [name for name in names if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading_in_it(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        if not link.startswith("https://"):
            target = page if not path else page.parent / path
            assert target.exists(), link
            assert not anchor or anchor in headings(target), link


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


LONG = ("README.md", "clusters.md", "commands.md", "papers.md", "strategies.md", "tutorial.md")
"""Pages whose commands train on real ranks, measure this machine or compile large models."""


@sampled("page", PAGES, everyday=[page for page in PAGES if page.name not in LONG], whole=True, ids=lambda p: p.name)
def test_the_commands_and_the_python_of_a_page_run_in_its_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPLITC_CACHE", str(tmp_path / "cache"))  # a page has many commands about one model
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    _shrink(tmp_path / "examples")
    for block in blocks(page):
        if block.language == "sh":
            for line in commands(block):
                if _in_process(line):
                    assert main(shlex.split(_small(line))[1:]) == 0, f"{line}\n{capsys.readouterr().err}"
                if line.startswith("splitc example "):
                    _shrink(tmp_path)
        elif block.language == "json":
            (tmp_path / "mine.json").write_text(block.text)
        elif block.language == "python":
            _run_python(page, block, tmp_path)


def _shrink(folder: Path) -> None:
    """Make the models of examples small, with layers of the same names."""
    for name, sizes in (("alexnet", "width=0.1"), ("mlp", "hidden=(64, 256)")):
        with (folder / f"{name}.py").open("a") as file:
            file.write(f"\n\nmodel = lambda: {name}({sizes})\n")


def _in_process(line: str) -> bool:
    """Commands that start processes or install have tests of their own."""
    return (
        line.startswith("splitc")
        and line.split()[1] not in ("try", "run", "tune", "calibrate", "doctor", "demo")
        and "--processes" not in line
    )


def _small(line: str) -> str:
    """The same command on this test's time: a cluster that is not measured, few and small images."""
    if line.startswith("splitc example"):
        return line
    if "--world" in line and "--cluster" not in line:
        line += " --cluster v100-10gbe"
    if line.startswith("splitc explain"):
        line = re.sub(r"--world \d", "--world 2", line)
    if "--sensitivity" in line or "--buy" in line:
        line = line.replace("alexnet.py", "mlp.py")
    return line + (" --input 4x3x64x64" if "alexnet" in line else " --input 4x3x32x32" if "mlp.py" in line else "")


class Neighbours(nn.Module):
    """Classifies nodes by the sum of their neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 10)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]]))[seeds]


def _run_python(page: Path, block: Block, folder: Path) -> None:
    name = re.match(r"# file: (\S+)", block.text)
    if name is not None:
        (folder / name[1]).write_text(block.text)
        if "torchrun" in page.read_text() and "worker" in block.text:
            return  # runs under torchrun, in the test of processes below
    if "def step(comm" in block.text:
        return  # an excerpt of a generated file, held by the golden files
    names: dict[str, Any] = {
        "model": nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 10)),
        "images": torch.randn(8, 3, 2, 2),
        "labels": torch.randint(0, 10, (8,)),
        "dataset": TensorDataset(torch.randn(32, 3, 2, 2), torch.randint(0, 10, (32,))),
        "test": TensorDataset(torch.randn(11, 3, 2, 2), torch.randint(0, 10, (11,))),
        "F": F,
        "gnn": Neighbours(),
        "x": torch.randn(6, 4),
        "edge_index": torch.randint(0, 6, (2, 9)),
        "seeds": torch.arange(8) % 6,
        "bags": nn.EmbeddingBag(20, 10),
        "indices": torch.randint(0, 20, (24,)),
        "offsets": torch.arange(0, 24, 3),
    }
    text = block.text.split("# or train with it")[0]
    if page.name == "training.md":
        _run_on_a_rank(page, text, names)
        return
    exec(compile(text, f"{page.name} block", "exec"), names)


def _run_on_a_rank(page: Path, text: str, names: dict[str, Any]) -> None:
    """Run a block about workers on a simulated rank, with a `program`, its `worker` and an `other` one."""
    program = compiled(names["model"], (names["images"],), names["labels"], F.cross_entropy, 1, "single_device")

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    def make(transport: Transport, optimizer: Any = sgd, **options: Any) -> Worker:
        return worker_of(program, transport, optimizer=optimizer, **options)

    def run(transport: Transport) -> None:
        given = SimpleNamespace(worker=lambda optimizer, **options: make(transport, optimizer, **options))
        own = {"program": given, "worker": make(transport), "other": make(transport), "torch": torch}
        exec(compile(text, f"{page.name} block", "exec"), {**names, **own})

    on_ranks(1, run)


@pytest.mark.processes
@pytest.mark.slow
def test_the_tutorial_trains_under_torchrun(tmp_path: Path) -> None:
    page = ROOT / "docs" / "tutorial.md"
    for block in blocks(page):
        if name := re.match(r"# file: (\S+)", block.text):
            (tmp_path / name[1]).write_text(block.text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "train.py"]
    paths = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=paths, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"epoch 1: loss \d", done.stdout)
