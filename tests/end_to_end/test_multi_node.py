"""The files of examples/multi-node, on network namespaces: stand-ins for ssh and srun run their commands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.hosts import ADDRESSES, environment, stand_in_for_ssh, two_hosts
from tests.support.launched import program

pytestmark = [pytest.mark.slow, pytest.mark.processes]

SRUN = """#!/bin/bash
shift  # --kill-on-bad-exit=...
{lines}
for job in $(jobs -p); do wait "$job" || exit 1; done
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, forking: Path) -> Iterator[Path]:
    """A folder with a build, and with stand-ins that lead to two hosts."""
    folder = tmp_path_factory.mktemp("home")
    program().save(folder / "build")
    with two_hosts() as hosts:
        stand_in_for_ssh(folder, hosts)
        place = "SLURM_NODEID={k} SLURM_PROCID={k} SLURM_LOCALID=0 SLURM_GTIDS={k}"
        lines = [f'{place.format(k=k)} ip netns exec {name} "$@" &' for k, name in enumerate(hosts)]
        (folder / "srun").write_text(SRUN.format(lines="\n".join(lines)))
        (folder / "scontrol").write_text(f'#!/bin/bash\nprintf "%s\\n" {" ".join(ADDRESSES)}\n')
        (folder / "torchrun").write_text(f'#!/bin/bash\nexec {forking} -m torch.distributed.run "$@"\n')
        (folder / "python").write_text(f'#!/bin/bash\nexec {forking} "$@"\n')
        for name in ("srun", "scontrol", "torchrun", "python"):
            (folder / name).chmod(0o755)
        yield folder


def run(home: Path, script: str, **more: str) -> str:
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "multi-node" / script), str(home / "build"), "--steps", "2"],
        cwd=home,
        env=environment(HOME=str(home), PATH=f"{home}{os.pathsep}{os.environ['PATH']}", RANKS="1", **more),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("script", ["slurm.sbatch", "slurm-gpus.sbatch"])
def test_the_slurm_scripts_train_on_every_node(home: Path, script: str) -> None:
    given = {"SLURM_NNODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    given |= {"SLURM_CPUS_PER_TASK": "2", "SLURM_STEP_NODELIST": ",".join(ADDRESSES)}
    output = run(home, script, **given)
    assert re.findall(r"^step (\d)  loss ", output, re.MULTILINE) == ["1", "2"]


def test_the_ssh_script_copies_the_build_and_trains_on_every_host(home: Path) -> None:
    output = run(home, "ssh.sh", HOSTS=" ".join(ADDRESSES), PYTHON=sys.executable)
    assert re.findall(r"^step (\d)  loss ", output, re.MULTILINE) == ["1", "2"]
    assert (home / "splitc-builds" / "build" / "launch.py").is_file()
