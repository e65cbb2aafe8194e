"""Run code in a copy of the project to which a patch is applied: what a change costs to make, it shows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests import ROOT

FOLDERS = ("splitc", "passes", "cost_models", "examples", "tests")


def touched(patch: Path) -> list[str]:
    """The files that a patch makes or changes."""
    return [line.split()[1].removeprefix("b/") for line in patch.read_text().splitlines() if line.startswith("+++ ")]


def run_patched(patch: Path, code: str, folder: Path) -> None:
    """Run Python code in a copy with the patch, in `folder`; it must end without an error."""
    for each in FOLDERS:
        shutil.copytree(ROOT / each, folder / each, symlinks=True)
    subprocess.run(["git", "apply", "-C1", str(patch)], cwd=folder, check=True)
    env = {**os.environ, "PYTHONPATH": str(folder), "SPLITC_CACHE": "off"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
