"""The distributions: a wheel with one package in it, beside which a project may have packages of our folders' names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests import ROOT

MODEL = """\"\"\"A model file that reads the project's own `passes` and `cost_models`.\"\"\"

import cost_models
import passes
import torch
import torch.nn.functional as F
from torch import nn

model = lambda: nn.Sequential(nn.Linear(6, passes.WIDTH), nn.ReLU(), nn.Linear(passes.WIDTH, cost_models.CLASSES))
loss = F.cross_entropy


def example(batch=4):
    return (torch.randn(batch, 6),)


def target(batch=4):
    return torch.randint(cost_models.CLASSES, (batch,))
"""

DATA = """\"\"\"The batches that the ranks train on.\"\"\"

import cost_models
import passes
import torch

import splitc.cost_models
import splitc.passes


def batches(worker):
    assert passes.WIDTH == 8 and passes is not splitc.passes and cost_models is not splitc.cost_models
    while True:
        yield torch.ones(4, 6), torch.arange(4) % cost_models.CLASSES
"""

COMPILE = """
import model, splitc
splitc.compile(model.model(), 2, model.example(), model.target(), model.loss, cluster="v100-10gbe")
"""


def run(*command: object, cwd: Path, **environment: str) -> str:
    """What a command prints; its output is shown where it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as in a fresh clone: setuptools leaves files where it builds."""
    clone = tmp_path_factory.mktemp("clone") / "splitc"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "golden")
    shutil.copytree(ROOT, clone, symlinks=True, ignore=ignored)
    return clone


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    """The wheel of the checkout, built without a network by the setuptools that torch brings."""
    pytest.importorskip("setuptools", minversion="77")
    return build(checkout, "wheel")


def build(source: Path, kind: str) -> Path:
    """Build the wheel or the sdist of a folder."""
    out = source.parent / f"{source.name}-{kind}"
    run(sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})", cwd=source)
    (built,) = out.iterdir()
    return built


def product_files() -> set[str]:
    """The files of splitc, passes and cost_models by the paths at which they are imported or read."""
    rooms = {"splitc": ROOT / "splitc", "splitc/passes": ROOT / "passes", "splitc/cost_models": ROOT / "cost_models"}
    rooms["splitc/cli/examples"] = ROOT / "examples"
    return {
        f"{room}/{path.relative_to(folder).as_posix()}"
        for room, folder in rooms.items()
        for path in folder.rglob("*")
        if path.suffix in (".css", ".html", ".js", ".py", ".pyi", ".toml", ".typed")
        or path.parent.name in ("manual", "templates")
    }


@pytest.mark.slow
def test_the_wheel_holds_one_package_with_every_file_of_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        files = {name for name in names if ".dist-info/" not in name}
        assert files == product_files()
        assert "splitc/py.typed" in files and "splitc/cost_models/clusters/v100-10gbe.toml" in files
        assert all(archive.getinfo(name).file_size > 0 for name in files if "/passes/" in name)  # no links
        (top_level,) = (name for name in names if name.endswith("top_level.txt"))
        assert archive.read(top_level).decode().split() == ["splitc"]


@pytest.mark.slow
def test_the_page_of_the_index_has_urls_and_no_link_into_the_checkout(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    for name in ("Homepage", "Documentation", "Changelog", "Issues"):
        assert re.search(rf"^Project-URL: {name}, https://", text, re.MULTILINE)
    page = text.partition("\n\n")[2]
    links = re.findall(r"^\[\w+\]: (\S+)$", page, re.MULTILINE)
    assert {*re.findall(r"\]\[(\w+)\]", page)} == {*re.findall(r"^\[(\w+)\]: ", page, re.MULTILINE)}
    links += re.findall(r"\]\(([^)]+)\)", page)
    assert links and [link for link in links if not link.startswith("https://")] == []
    for path in (link.partition("/main/")[2].partition("#")[0] for link in links if "/main/" in link):
        assert (ROOT / path).exists(), path


@pytest.mark.slow
def test_the_sdist_makes_the_same_wheel(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build(checkout, "sdist")) as archive:
        assert not any(member.issym() for member in archive.getmembers())
        there = {name.partition("/")[2] for name in archive.getnames()}
        pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
        assert pages | {"Makefile", "CHANGELOG.md", "constraints.txt", "examples/mlp.py", "tests/__init__.py"} <= there
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(build(unpacked, "wheel")) as again:
        assert sorted(ours.namelist()) == sorted(again.namelist())
        assert all(ours.read(name) == again.read(name) for name in ours.namelist() if name.startswith("splitc/"))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.from_scratch
def test_a_project_with_its_own_passes_and_cost_models_compiles_and_trains(wheel: Path, tmp_path: Path) -> None:
    site, project = tmp_path / "site", tmp_path / "project"
    install = ("pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--target", site)
    run(sys.executable, "-m", *install, wheel, cwd=tmp_path)
    (project / "passes").mkdir(parents=True)
    (project / "passes" / "__init__.py").write_text("WIDTH = 8\n")
    (project / "cost_models.py").write_text("CLASSES = 3\n")
    (project / "model.py").write_text(MODEL)
    (project / "data.py").write_text(DATA)

    def there(*command: object) -> str:
        return run(sys.executable, *command, cwd=project, PYTHONPATH=f"{site}{os.pathsep}{project}")

    assert there("-c", "import splitc.passes; print(splitc.passes.__file__)").startswith(str(site))
    assert re.search(r"^alexnet +\S", there(site / "bin" / "splitc", "example"), re.MULTILINE)
    there(site / "bin" / "splitc", "example", "alexnet")
    assert (project / "alexnet.py").read_bytes() == (ROOT / "examples" / "alexnet.py").read_bytes()
    asked = ("--world", 2, "--strategy", "data_parallel", "--cluster", "v100-10gbe")
    there(site / "bin" / "splitc", "compile", "model.py", *asked, "-o", "build")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    said = there(*launch, "build/launch.py", "--steps", 2, "--data", "data:batches")
    assert "step 2  loss" in said
    there("-c", COMPILE)
