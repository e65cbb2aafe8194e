"""Build folders: write one, and recognise one that splitc wrote."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from splitc.errors import LaunchError, bullets
from splitc.ir.program import Program
from splitc.ir.regions import regions

WEIGHTS = "weights.pt"


def save_build(
    folder: Path, files: Mapping[str, str], weights: Mapping[str, Mapping[str, Tensor]], standalone: bool
) -> Path:
    """Write a build; the same inputs give the same bytes.  An unedited earlier build is replaced.

    weights.pt holds the weights, and digests of the files to detect edited ones.
    Raises LaunchError, and writes nothing, when the folder holds something that splitc did not write.
    """
    texts = {**files, **(_runtime() if standalone else {})}
    if folder.exists() and not folder.is_dir():
        raise LaunchError(f"{folder} is a file; give a folder for the build")
    if folder.is_dir() and any(folder.iterdir()):
        _clear(folder)
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    tensors = {kind: {k: v.cpu().contiguous() for k, v in part.items()} for kind, part in weights.items()}
    torch.save({**tensors, "files": {name: _digest(text.encode()) for name, text in texts.items()}}, folder / WEIGHTS)
    return folder


def require_importable(program: Program, what: str) -> None:
    """Raise LaunchError when other processes cannot import the code of a region, which `what` needs."""
    if problems := [f"{own.path or 'the whole model'}: {own.why}" for _, own in regions(program) if not own.code]:
        title = (
            f"{what} needs the user's own code of these regions, and scripts cannot import it: put the model into a "
            f"file, and give compile() a class or function of it without arguments that makes the model (for a loss: a "
            f"function or an object of a file):"
        )
        raise LaunchError(bullets(title, list(dict.fromkeys(problems))))


def _clear(folder: Path) -> None:
    """Remove an earlier build.  Raises LaunchError, and removes nothing, when a file was added or edited."""
    try:
        written: Mapping[str, str] = torch.load(folder / WEIGHTS, weights_only=True, mmap=True)["files"]
    except Exception as error:
        raise LaunchError(
            f"{folder} is not empty and is no build of splitc, or lost its {WEIGHTS}, which tells what splitc wrote; "
            f"give another folder, nothing was written"
        ) from error
    there = [path for path in sorted(folder.rglob("*")) if not path.is_dir() and "__pycache__" not in path.parts]
    problems = []
    for path in there:
        name = path.relative_to(folder).as_posix()
        if name != WEIGHTS and name not in written:
            problems.append(f"{name} was not written by splitc")
        elif name in written and _digest(path.read_bytes()) != written[name]:
            problems.append(f"{name} was edited")
    if problems:
        title = f"{folder} holds more than a build; give another folder or move these, nothing was written:"
        raise LaunchError(bullets(title, problems))
    for path in there:
        path.unlink()
    for kept in (folder / "splitc", folder / "__pycache__"):
        shutil.rmtree(kept, ignore_errors=True)


def _runtime() -> dict[str, str]:
    """The files of `splitc.runtime`, for builds that must run without splitc."""
    source = Path(__file__).parents[1] / "runtime"
    files = sorted(source.rglob("*.py"))
    texts = {path.relative_to(source.parents[1]).as_posix(): path.read_text(encoding="utf-8") for path in files}
    return {"splitc/__init__.py": '"""The part of splitc that these scripts need."""\n', **texts}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
