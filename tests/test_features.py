"""Features of training: what is left of the product without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from splitc.runtime.features import FEATURES as IN_THE_RUNTIME
from tests import ROOT

STRATEGIES = {
    "servers": ["parameter_server"],
    "subnets": ["independent_subnets"],
    "rounds": ["local_sgd", "modulo_shard", "sites", "in_rounds"],
}
"""Feature -> the modules of strategies whose plans may have it."""

NEEDED_BY = {"rounds": ["subnets"]}
"""Feature -> those that are parts of it."""

SCRIPT = """
import sys
import torch
import torch.nn.functional as F
import splitc
from splitc.features import FEATURES
from tests.support.models import SmallAlexNet
assert not {*FEATURES}.intersection(sys.argv)
images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
for strategy in ("data_parallel", "auto"):
    program = splitc.compile(SmallAlexNet(), world=2, example=(images,), target=labels, loss=F.cross_entropy,
                             cluster="v100-10gbe", strategy=strategy, name="small")
    program.save(f"build_{strategy}")
    program.report()
    assert (done := program.verify(steps=2)).holds, done
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("feature", STRATEGIES)
def test_without_its_folders_and_its_lines_the_rest_compiles_and_trains(feature: str, tmp_path: Path) -> None:
    gone = [feature, *NEEDED_BY.get(feature, [])]
    strategies = [strategy for each in gone for strategy in STRATEGIES[each]]
    for folder in ("splitc", "passes", "cost_models", "tests/support"):
        ignore = shutil.ignore_patterns(*gone, *(f"{each}.py" for each in (*gone, *strategies)))
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignore)
    (tmp_path / "tests" / "__init__.py").write_text((ROOT / "tests" / "__init__.py").read_text())
    for file, names in {
        "splitc/features.py": [f'"{each}"' for each in gone],
        "splitc/runtime/features.py": [of.__name__ for of in IN_THE_RUNTIME if of.__module__.split(".")[2] in gone],
        "passes/planner/registry.py": [f'"{strategy}"' for strategy in strategies],
    }.items():
        registry = tmp_path / file
        kept = [line for line in registry.read_text().splitlines() if not any(name in line for name in names)]
        registry.write_text("\n".join(kept) + "\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT, *gone]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
