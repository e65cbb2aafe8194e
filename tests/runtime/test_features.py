"""Features of training: what is left of the runtime without them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from splitc.runtime.features import FEATURES
from tests.support.ranks import plain

SCRIPT = """
from pathlib import Path
import torch
from splitc.runtime.launch.trial import run_trial
from splitc.runtime.transport.simulated import run_ranks
weights = torch.load("weights.pt", weights_only=True)
feeds = [[(torch.ones(4, 1, 8, 8), torch.arange(4)) for _ in range(2)]] * 2
trials = run_ranks(2, lambda t: run_trial(Path.cwd(), t, weights, feeds, [4, 4], 0.1, 0.9))
print(*(loss.hex() for loss in trials[0].losses))
"""


def trained(folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_without_the_folders_of_the_features_and_their_lines_data_parallelism_trains_the_same(tmp_path: Path) -> None:
    _, program = plain("data_parallel")
    runs = []
    for name in ("all", "none"):
        folder = program.save(tmp_path / name, standalone=True)
        registry = folder / "splitc" / "runtime" / "features.py"
        for feature in FEATURES if name == "none" else ():
            own = feature.__module__.split(".")[-2]
            shutil.rmtree(registry.parent / own)
            lines = registry.read_text().splitlines(keepends=True)
            registry.write_text("".join(line for line in lines if feature.__name__ not in line))
        runs.append(trained(folder))
    assert runs[0] == runs[1]
