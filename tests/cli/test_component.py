"""The component of TorchX: what its schedulers submit gives every rank its place, and `local_cwd` trains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from splitc.cli.launching import check_build
from tests import ROOT
from tests.cli.test_jobs import SCHEMAS, wrong
from tests.support.jobs import CONV_FC, build_of, torchruns
from tests.support.launched import program

pytest.importorskip("torchx", reason="needs TorchX, the extra torchx")

from torchx.runner import get_runner
from torchx.schedulers import kubernetes_scheduler, slurm_scheduler
from torchx.specs import finder

COMPONENT = f"{ROOT / 'splitc' / 'cli' / 'component.py'}:train"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    build_of(tmp_path / "build", CONV_FC, (700 << 20, 700 << 20, 700 << 20, 3000 << 20), 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kubernetes_scheduler, "make_unique", lambda name: f"{name}-1")
    monkeypatch.setattr(slurm_scheduler.SlurmScheduler, "_partition_memmb", lambda self, partition: None)
    return tmp_path


def dry_run(scheduler: str, *arguments: str, **options: Any) -> Any:
    """What `torchx run -s scheduler --dryrun splitc.train ...` would submit."""
    with get_runner() as runner:
        return runner.dryrun_component(COMPONENT, [*arguments], scheduler, options).request


def test_torchx_finds_the_component_without_losing_its_own() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (table,) = re.findall(r'^\[project.entry-points."torchx.components"\]\n((?:.+\n)+)', text, re.MULTILINE)
    found: dict[str, Any] = {}
    for name, module in re.findall(r'^(\w+) = "([\w.]+)"', table, re.MULTILINE):
        group = "" if name.startswith("_") else name
        found |= {each.name: each for each in finder.ModuleComponentsFinder(module, group).find()}
    assert found["splitc.train"].validation_errors == [] and found["dist.ddp"].validation_errors == []


def test_the_script_for_slurm_has_the_hosts_of_the_plan_and_their_memory(
    folder: Path, golden: Callable[[str, str], None]
) -> None:
    script = dry_run("slurm", "--build", "build", "--max_retries", "3", "--", "--steps", "1000").materialize()
    golden("schedulers/torchx-slurm.sh", script)


def test_every_component_of_the_job_of_slurm_runs_torchrun_of_its_host(folder: Path) -> None:
    script = dry_run("slurm", "--build", "build", "--gpu", "2", "--", "--data", "a:$b").materialize()
    told = torchruns(folder / "bin", ["bash", "-c", script], SLURM_JOB_ID="7", SLURM_JOB_NODELIST_HET_GROUP_0="n8")
    assert sorted(each["--node-rank"] for each in told) == ["0", "1", "2", "3"]
    alike = {"--nnodes": "4", "--nproc-per-node": "1", "--master-addr": "n8", "--master-port": "29500"}
    assert all(each.items() >= alike.items() for each in told)
    assert script.count("--gpus-per-task=2") == 4 and "--mem" not in script and "a:$b" in script


def test_the_job_for_volcano_is_one_by_its_schema_and_its_pods_meet_at_the_first(
    folder: Path, golden: Callable[[str, str], None]
) -> None:
    yaml = pytest.importorskip("yaml", reason="reads YAML by PyYAML")
    pytest.importorskip("kubernetes", reason="needs the client of Kubernetes, of the extra torchx")
    text = str(
        dry_run("kubernetes", "--build", "build", "--max_retries", "0", "--", "--steps", "1000", queue="default")
    )
    golden("schedulers/torchx-kubernetes.yaml", text)
    job = yaml.safe_load(text)
    assert [*wrong(job, SCHEMAS["Job"])] == []
    told = []
    for task in job["spec"]["tasks"]:
        (container,) = task["template"]["spec"]["containers"]
        own = {each["name"]: each["value"] for each in container["env"]}
        hosts = {f"VC_{each['name'].upper().replace('-', '_')}_HOSTS": each["name"] for each in job["spec"]["tasks"]}
        told += torchruns(folder / "bin", container["command"], **hosts, **own)
    assert [each["--node-rank"] for each in told] == ["0", "1", "2", "3"]
    assert [each["--master-addr"] for each in told] == ["localhost", "conv-0", "conv-0", "conv-0"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.from_scratch
def test_local_cwd_trains_a_build_on_two_hosts_that_are_this_one(tmp_path: Path) -> None:
    program().save(tmp_path / "build")
    check_build(tmp_path / "build")
    arguments = ["run", "-s", "local_cwd", "--wait", "--log", "-cfg", "log_dir=logs", COMPONENT, "--build", "build"]
    main = "import sys; from torchx.cli.main import main; main(sys.argv[1:])"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", main, *arguments, "--ranks_per_host", "1", "--", "--steps", "2"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    logs = "".join(each.read_text() for each in (tmp_path / "logs").rglob("stdout.log"))
    assert sorted(re.findall(r"step (\d)  loss ", logs)) == ["1", "2"]
