"""Build folders: what `save` writes, and how a folder is known as ours."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from splitc.errors import LaunchError
from splitc.plan import Plan

_OWN = {"launch.py", "plan.json", "weights.pt", "__pycache__"}


def save_build(folder: Path, files: Mapping[str, str], weights: Mapping[str, Any], standalone: bool) -> Path:
    """Write a build.  An earlier build is replaced; any other file in the folder is left alone and refused.

    Raises LaunchError when the folder holds something that splitc did not write.
    """
    if folder.exists() and not folder.is_dir():
        raise LaunchError(f"{folder} is a file; give a folder for the build")
    if folder.is_dir() and any(folder.iterdir()):
        _clear(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    torch.save({kind: {k: v.cpu().contiguous() for k, v in part.items()} for kind, part in weights.items()}, folder / "weights.pt")
    if standalone:
        _copy_runtime(folder)
    return folder


def read_plan(folder: Path) -> Plan:
    """The plan of a build.  Raises LaunchError when the folder is none."""
    path = folder / "plan.json"
    if not path.is_file() or not (folder / "launch.py").is_file():
        raise LaunchError(f"{folder} is no build of splitc (it has no plan.json and launch.py); "
                          f"make one with: splitc compile MODEL --world N -o {folder}")
    return Plan.from_json(path.read_text())


def _clear(folder: Path) -> None:
    """Remove an earlier build's own files.  Raises LaunchError when there are others."""
    try:
        plan = read_plan(folder)
    except LaunchError as error:
        raise LaunchError(f"{folder} is not empty and is no build of splitc; give another folder, nothing was written") from error
    own = _OWN | {f"rank{r}.py" for r in range(plan.world)} | {f"{role}.py" for role in (*plan.roles, "idle")} | {"splitc"}
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in own)
    if foreign:
        raise LaunchError(f"{folder} holds files that splitc did not write ({', '.join(foreign[:5])}); give another folder or "
                          f"move them, nothing was written")
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _copy_runtime(folder: Path) -> None:
    """Copy `splitc.runtime` beside the scripts, so that they need torch alone."""
    source = Path(__file__).parent / "runtime"
    target = folder / "splitc" / "runtime"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "splitc" / "__init__.py").write_text('"""The part of splitc that these scripts need."""\n')
