"""`splitc job`: what Slurm and Kubernetes take has the plan's hosts, and gives every rank its place."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from splitc.cli import main
from splitc.cli.jobs import HostGroup, host_groups
from tests import ROOT
from tests.support.jobs import CONV_FC, build_of, torchruns

Golden = Callable[[str, str], None]
HERE = Path(__file__).parent / "schedulers"
SCHEMAS = json.loads((HERE / "schemas.json").read_text())
MEMORY = (700 << 20, 700 << 20, 700 << 20, 3000 << 20)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user, with a build of three conv ranks and an fc rank, a host each."""
    build_of(tmp_path / "build", CONV_FC, MEMORY, 1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def groups(folder: Path, roles: Mapping[str, list[int]], per_host: int, *memory: int) -> list[HostGroup]:
    return host_groups(build_of(folder, roles, memory, per_host))


def test_hosts_whose_ranks_have_the_same_roles_are_a_group_with_the_memory_of_the_largest(tmp_path: Path) -> None:
    found = groups(tmp_path / "a", CONV_FC, 1, *(each << 20 for each in (1, 5, 1, 9)))
    assert found == [HostGroup("conv", 0, 3, 1, 5 + 1024), HostGroup("fc", 3, 1, 1, 9 + 1024)]


def test_a_host_may_have_ranks_of_several_roles_and_the_last_one_fewer(tmp_path: Path) -> None:
    found = groups(tmp_path / "a", {"conv": [0, 1, 2], "fc": [3, 4]}, 2)
    named = [(group.name, group.first, group.hosts, group.ranks) for group in found]
    assert named == [("conv", 0, 1, 2), ("convfc", 1, 1, 2), ("fc", 2, 1, 1)]
    assert {group.memory for group in found} == {0}
    assert host_groups(build_of(tmp_path / "c", CONV_FC, (1, 2)))[0].memory == 0  # of an edited file
    assert host_groups(build_of(tmp_path / "b", CONV_FC, (), 2), 8) == [HostGroup("convfc", 0, 1, 4, 0)]


def test_names_of_groups_differ_and_are_names_everywhere(tmp_path: Path) -> None:
    roles = {"stage_0": [0, 3], "stage_1": [1, 4], "Head": [5]}
    names = [group.name for group in groups(tmp_path / "a", roles, 1)]
    assert names == ["stage0", "stage1", "idle", "stage0x1", "stage1x1", "head"]


def options(script: str) -> Iterator[str]:
    """The options of the lines for sbatch."""
    for line in re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE):
        yield from [] if line == "hetjob" else re.findall(r"(?:^| )(--?[^\s=]+)", line.split("#")[0])


def test_every_script_for_slurm_is_one_of_bash_with_options_that_sbatch_knows(folder: Path) -> None:
    assert main(["job", "--sbatch", "a.sbatch", "build"]) == 0
    assert main(["job", "--sbatch", "b.sbatch", "--gpus", "1", "build"]) == 0
    known = (HERE / "sbatch-options.txt").read_text().split("\n\n")[1].split()
    scripts = [folder / "a.sbatch", folder / "b.sbatch", *(ROOT / "examples" / "multi-node").glob("*")]
    assert len(scripts) == 5
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
        assert [each for each in options(script.read_text()) if each.removeprefix("--") not in known] == [], script
    assert {"--mem", "--nodes"} < {*options(scripts[0].read_text())}
    assert "--gpus-per-task" in {*options(scripts[1].read_text())} and "--mem" not in scripts[1].read_text()


def test_unequal_roles_are_components_of_one_job_of_slurm(folder: Path, golden: Golden) -> None:
    assert main(["job", "--sbatch", "job.sbatch", "--restarts", "3", "build", "--steps", "1000"]) == 0
    golden("schedulers/job.sbatch", (folder / "job.sbatch").read_text())


def test_equal_hosts_are_one_component(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_of(tmp_path / "build", {"all": [0, 1, 2, 3]}, (), 2)
    monkeypatch.chdir(tmp_path)
    assert main(["job", "--sbatch", "job.sbatch", "build"]) == 0
    text = (tmp_path / "job.sbatch").read_text()
    assert "--nodes=2 --ntasks-per-node=2" in text and "het" not in text


def wrong(value: Any, schema: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Where a value is not as a schema says; names that it does not list are wrong."""
    schema = SCHEMAS[schema["$ref"]] if "$ref" in schema else schema
    kinds = {"string": str, "integer": int}
    if "properties" in schema:
        yield from (f"{at}/{name} is missing" for name in schema.get("required", []) if name not in value)
        for name, each in value.items():
            known = schema["properties"].get(name)
            yield from [f"{at}/{name} is unknown"] if known is None else wrong(each, known, f"{at}/{name}")
    elif "items" in schema:
        for k, each in enumerate(value):
            yield from wrong(each, schema["items"], f"{at}/{k}")
    elif "quantities" in schema:
        yield from (f"{at}: {each}" for each in value.values() if not re.fullmatch(r"\d+(m|M|Mi|G|Gi)?", str(each)))
    elif "pattern" in schema:
        yield from [] if len(value) < 64 and re.fullmatch(schema["pattern"], value) else [f"{at}: {value}"]
    elif "enum" in schema:
        yield from [] if value in schema["enum"] else [f"{at}: {value}"]
    elif "type" in schema:
        yield from [] if type(value) is kinds[schema["type"]] else [f"{at}: {value!r}"]
    elif "any" not in schema:
        yield f"{at} is not described"


def jobset(folder: Path, *more: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="reads YAML by PyYAML")
    asked = ["--jobset", "jobset.yaml", "--image", "me/net:1", "--restarts", "3", *more]
    assert main(["job", *asked, "build", "--steps", "1000"]) == 0
    found: dict[str, Any] = yaml.safe_load((folder / "jobset.yaml").read_text())
    return found


def test_a_jobset_is_one_by_its_schema(folder: Path, golden: Golden) -> None:
    found = jobset(folder)
    assert [*wrong(found, SCHEMAS["JobSet"])] == []
    golden("schedulers/jobset.yaml", (folder / "jobset.yaml").read_text())
    assert [*wrong(jobset(folder, "--gpus", "2"), SCHEMAS["JobSet"])] == []
    found["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 0
    assert [*wrong(found, SCHEMAS["JobSet"])] == ["/spec/replicatedJobs/0/template/spec/backofLimit is unknown"]


def test_the_pods_of_a_jobset_are_the_hosts_in_their_order_and_meet_at_the_first(folder: Path) -> None:
    told, pods = [], []
    found = jobset(folder)
    for each in found["spec"]["replicatedJobs"]:
        spec = each["template"]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        for index in range(spec["completions"]):  # as Kubernetes starts and names them
            run = [*container["command"], *container["args"]]
            told += torchruns(folder / "bin", run, JOB_COMPLETION_INDEX=str(index))
            pods.append(f"{found['metadata']['name']}-{each['name']}-0-{index}.{found['metadata']['name']}")
    assert [each["--node-rank"] for each in told] == ["0", "1", "2", "3"]
    alike = {"--nnodes": "4", "--nproc-per-node": "1", "--master-addr": pods[0], "--master-port": "29500"}
    assert all(each.items() >= alike.items() for each in told)


def test_what_cannot_be_a_job_is_refused_before_anything_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, message in (
        (["build"], "give the file to write: --sbatch job.sbatch, or --jobset jobset.yaml with --image NAME"),
        (["--jobset", "a.yaml", "build"], "--jobset jobset.yaml with --image NAME"),
        (["--sbatch", "no/a", "build"], "--sbatch no/a: there is no folder"),
        (["--sbatch", "a", "nothing"], "nothing is no build of splitc"),
        (["--sbatch", "a", "build", "--stepps", "3"], "launch.py has no option --stepps; did you mean --steps?"),
        (["--sbatch", "a", "build", "--epochs", "3"], "--epochs needs --data"),
    ):
        assert main(["job", *more]) == 2
        assert message in (errors := capsys.readouterr().err), errors
    assert not (folder / "a").exists()
