"""From a DistributedDataParallel script to a worker: few lines change, and the losses stay."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.data import DataLoader, TensorDataset

import splitc
from splitc.errors import ArgumentError, LaunchError

ROOT = Path(__file__).parents[1]
SGD = partial(torch.optim.SGD, lr=0.1)


def changed_lines() -> tuple[list[str], list[str]]:
    """The lines that examples/ddp.py loses, and those that examples/prepared.py has in their place."""
    before, after = ((ROOT / "examples" / name).read_text().splitlines() for name in ("ddp.py", "prepared.py"))
    lines = [line for line in difflib.ndiff(before, after) if line[2:].strip()]
    return [line for line in lines if line[0] == "-"], [line for line in lines if line[0] == "+"]


def test_at_most_ten_lines_of_a_plain_script_change() -> None:
    removed, added = changed_lines()
    assert 0 < len(added) <= len(removed) <= 10


def test_the_docs_show_the_change_as_it_is() -> None:
    text = (ROOT / "docs" / "training.md").read_text()
    shown = [line for line in re.search(r"```diff\n(.*?)```", text, re.DOTALL)[1].splitlines() if line[1:].strip()]  # type: ignore[index]
    for sign, lines in zip("-+", changed_lines(), strict=True):
        assert [line[1:].strip() for line in shown if line[0] == sign] == [line[2:].strip() for line in lines]


def refusals() -> dict[str, tuple[type[Exception], dict[str, Any]]]:
    """What the error says -> its type, and the arguments that are wrong."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    sampled = DataLoader(TensorDataset(torch.zeros(8, 2)), sampler=[1, 2])
    return {
        "not started by torchrun .*run: torchrun --standalone --nproc-per-node 2": (LaunchError, {}),
        r"makes the optimizer of the parameters that a rank has, as lambda params: SGD\(params": (
            ArgumentError,
            {"optimizer": optimizer},
        ),
        "it must be a DataLoader of torch; worker.loader takes datasets": (TypeError, {"loader": sampled.dataset}),
        "prepare has no option clip; accumulate, autocast, backend, batch, c": (TypeError, {"clip": 1.0}),
        "the DataLoader has a list, but worker.loader divides the examples": (LaunchError, {"loader": sampled}),
    }


@pytest.mark.parametrize("message", refusals())
def test_what_prepare_cannot_take_is_told(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    loader = DataLoader(TensorDataset(torch.zeros(8, 2), torch.zeros(8).long()), 4)
    error, wrong = refusals()[message]
    given = {"model": nn.Linear(2, 2), "optimizer": SGD, "loss": F.cross_entropy, "loader": loader, **wrong}
    with pytest.raises(error, match=message):
        splitc.prepare(**given)


def test_the_example_does_not_mix_its_sums_with_losses_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake tensors, whose devices are checked as those of a GPU are."""
    example, reduced = import_module("examples.prepared"), list[Any]()
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda *_: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: reduced.append(tensor.device.type))
    worker = SimpleNamespace(step=lambda *batch: torch.ones((), device="cuda"))
    monkeypatch.setattr(splitc, "prepare", lambda *_: (worker, [(), ()]))
    with FakeTensorMode():
        example.main()
    assert reduced == ["cpu"] * 3  # which a group of the backend "cpu:gloo,cuda:nccl" sums whoever shares a GPU


def printed(example: str, world: int = 2) -> list[float]:
    """The losses of the epochs that an example prints."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*launch, str(ROOT / "examples" / f"{example}.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.from_scratch
def test_both_scripts_run_under_torchrun_and_their_losses_agree() -> None:
    before, after = printed("ddp"), printed("prepared")
    assert len(before) == len(after) == 3
    assert after[0] == pytest.approx(before[0], abs=2e-5)  # later epochs are shuffled differently
    assert after == pytest.approx(before, rel=0.05)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.from_scratch
@pytest.mark.parametrize(("example", "needs"), [("huggingface", "transformers"), ("fabric", "lightning.fabric")])
def test_a_script_of_another_library_learns_where_it_is_installed(example: str, needs: str) -> None:
    pytest.importorskip(needs)
    losses = printed(example)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.from_scratch
def test_an_error_of_a_script_is_told_once_and_torchruns_summary_has_no_traceback_of_it(tmp_path: Path) -> None:
    script = tmp_path / "small.py"
    script.write_text(
        "import torch, splitc\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "loader = DataLoader(TensorDataset(torch.zeros(20, 4), torch.zeros(20).long()), 16, drop_last=True)\n"
        "sgd = lambda params: torch.optim.SGD(params, lr=0.1)\n"
        "loss = torch.nn.functional.cross_entropy\n"
        "splitc.prepare(torch.nn.Linear(4, 3), sgd, loss, loader, cluster='v100-10gbe', strategy='data_parallel')\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    assert done.stderr.count("error: the dataset has 20 examples and a global batch 32, so an epoch has no step") == 1
    assert "[rank" not in done.stderr
