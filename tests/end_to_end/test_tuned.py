"""Tuning on real ranks: the command, its memory, and finalists that fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from splitc.cli.plan_file import read_plan_file
from tests import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.processes]

MODEL = """
import torch, torch.nn.functional as F
from torch import nn
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2000))
loss, example, target = F.cross_entropy, torch.randn(16, 64), torch.randint(0, 2000, (16,))
"""

SCRIPT = """
import os, sys, torch
from m import model, loss, example, target
import splitc
made = []
def sgd(parameters):
    made.append(optimizer := torch.optim.SGD(parameters, lr=0.1))
    if len(made) == 2 and os.environ["RANK"] == "1":
        def step(): raise MemoryError("planted")
        optimizer.step = step
    return optimizer
program = splitc.compile(model(), 2, (example,), target, loss, cluster="cpu16-10gbe", tune=3)
worker = program.worker(sgd, elementwise=True)
for _ in range(2):
    worker.step(*((example, target) if worker.data_rank is not None else ()))
if worker.rank.index == 0:
    print(sum(bool(each.failed) for each in program.plan.prediction.tried), "failed")
"""


def run(folder: Path, *command: str, cache: str = "off") -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SPLITC_CACHE": cache, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "m.py").write_text(MODEL)
    return tmp_path


def test_the_command_writes_a_build_of_the_fastest_and_remembers_it(folder: Path) -> None:
    command = ["splitc.cli", "tune", "m.py", "--world", "2", "--cluster", "cpu16-10gbe", "--budget", "2"]
    cache = str(folder / "cache")
    first = run(folder, *command, cache=cache)
    plan = read_plan_file(folder / "build" / "plan.json")
    ran = {each.plan: each.global_batch / each.measured for each in plan.prediction.tried if each.measured}
    assert len(ran) > 1
    assert max(ran, key=lambda each: ran[each]) == plan.hash
    again = run(folder, *command, cache=cache)
    assert again == first, "the table is the one that is remembered, to the digit"
    assert "step 2" in run(folder, "splitc.cli", "run", "build", "--steps", "2")


def test_a_finalist_that_fails_on_one_rank_is_out_and_training_goes_on(folder: Path) -> None:
    (folder / "s.py").write_text(SCRIPT)
    said = run(folder, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "s.py")
    assert "is out: MemoryError: planted" in said
    assert said.endswith("1 failed\n")


def test_a_finalist_in_which_a_rank_is_killed_is_out(folder: Path) -> None:
    """The command starts the ranks anew without it."""
    killing = "import os, signal, sys\nfrom splitc.runtime import tuning\nrows = tuning.rows_of\n"
    (folder / "sitecustomize.py").write_text(
        f"{killing}def dying(spec, tensors):\n"
        "    if spec.index == 1 and not os.path.exists('died') and '--out' not in sys.argv:\n"
        "        open('died', 'w').close()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return rows(spec, tensors)\n"
        "tuning.rows_of = dying\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "SPLITC_CACHE": "off", "OMP_NUM_THREADS": "1"}
    command = ["splitc.cli", "tune", "m.py", "--world", "2", "--cluster", "cpu16-10gbe", "--budget", "2"]
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "died").exists()
    assert "is out: the ranks ended while it ran" in done.stdout
