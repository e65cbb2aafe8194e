"""A strategy is one file and one line of the registry: a patch of these two makes one that compiles and verifies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

PATCH = Path(__file__).parent / "every_second_rank.patch"

VERIFY = """
import splitc, torch
from tests.support.models import CASES

model, images, labels, loss = CASES["alexnet"].make(torch.float64)
asked = dict(world=4, example=images, target=labels, loss=loss, cluster="v100-10gbe")
program = splitc.compile(model, strategy="every_second_rank(microbatches=1)", **asked)
assert program.plan.roles == {"all": (0, 2)}, program.plan.roles
done = program.verify(dtype=torch.float64)
assert done.holds, str(done)
assert "every_second_rank" in [each.strategy for each in splitc.compile(model, **asked).plan.candidates]
"""


def test_the_patch_touches_the_file_of_the_strategy_and_the_registry() -> None:
    touched = [line.split()[1] for line in PATCH.read_text().splitlines() if line.startswith("+++ ")]
    assert touched == ["b/splitc/strategies/every_second_rank.py", "b/passes/planner/registry.py"]


@pytest.mark.slow
def test_a_strategy_of_one_file_and_one_line_compiles_verifies_and_is_compared(tmp_path: Path) -> None:
    for folder in ("splitc", "passes", "cost_models", "examples", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", str(PATCH)], cwd=tmp_path, check=True)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "SPLITC_CACHE": "off"}
    done = subprocess.run(
        [sys.executable, "-c", VERIFY], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
