"""Build folders: write one, and recognise one that splitc wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from splitc.codegen.build_folder import WEIGHTS, WORLDS, no_build, replaced, require_writable
from splitc.errors import LaunchError, bullets
from splitc.ir.program import Program
from splitc.ir.regions import regions


def save_build(
    folder: Path,
    files: Mapping[str, str],
    weights: Mapping[str, Mapping[str, Tensor]],
    standalone: bool,
    worlds: Mapping[int, Mapping[str, str]],
) -> Path:
    """Write a build; the same inputs give the same bytes.  An unedited earlier build is replaced.

    weights.pt holds the weights, and digests of the files to detect edited ones.
    worlds: number of ranks -> the files of a build for it, which goes into worlds/N with a link to weights.pt.
    Raises LaunchError, and changes nothing, when the folder holds something that splitc did not write, or the disk is
    full.
    """
    runtime = _runtime() if standalone else {}
    parts = {"": files, **{f"{WORLDS}/{world}/": own for world, own in worlds.items()}}
    texts = {f"{part}{name}": text.encode() for part in parts for name, text in {**parts[part], **runtime}.items()}
    require_writable(folder)
    if folder.is_dir() and any(folder.iterdir()):
        _require_unedited(folder)
    tensors = {kind: {k: v.cpu().contiguous() for k, v in part.items()} for kind, part in weights.items()}
    nbytes = sum(map(len, texts.values())) + sum(v.nbytes for part in tensors.values() for v in part.values())
    with replaced(folder, nbytes) as new:
        for name, text in texts.items():
            path = new / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
        torch.save({**tensors, "files": {name: _digest(text) for name, text in texts.items()}}, new / WEIGHTS)
        for world in worlds:
            (new / WORLDS / str(world) / WEIGHTS).symlink_to(Path("..", "..", WEIGHTS))
    return folder


def require_importable(program: Program, what: str) -> None:
    """Raise LaunchError when other processes cannot import the code of a region, which `what` needs."""
    if problems := [f"{own.path or 'the whole model'}: {own.why}" for _, own in regions(program) if not own.code]:
        title = (
            f"{what} needs the user's own code of these modules, and scripts cannot import it: put the model into a "
            f"file, and give compile() a class or function of it without arguments that makes the model (for a loss: a "
            f"function or an object of a file):"
        )
        raise LaunchError(bullets(title, list(dict.fromkeys(problems))))


def _require_unedited(folder: Path) -> None:
    """Raise LaunchError when a file was added to an earlier build, or edited."""
    try:
        written: Mapping[str, str] = torch.load(folder / WEIGHTS, weights_only=True, mmap=True)["files"]
    except Exception as error:
        raise no_build(folder) from error
    there = [path for path in sorted(folder.rglob("*")) if not path.is_dir() and "__pycache__" not in path.parts]
    problems = []
    for path in there:
        name = path.relative_to(folder).as_posix()
        is_link = path.is_symlink() and path.name == WEIGHTS
        if name != WEIGHTS and name not in written and not is_link:
            problems.append(f"{name} was not written by splitc")
        elif name in written and _digest(path.read_bytes()) != written[name]:
            problems.append(f"{name} was edited")
    if problems:
        title = f"{folder} holds more than a build; give another folder or move these, nothing was written:"
        raise LaunchError(bullets(title, problems))


def _runtime() -> dict[str, str]:
    """The files of `splitc.runtime`, for builds that must run without splitc."""
    source = Path(__file__).parents[1] / "runtime"
    files = sorted(source.rglob("*.py"))
    texts = {path.relative_to(source.parents[1]).as_posix(): path.read_text(encoding="utf-8") for path in files}
    return {"splitc/__init__.py": '"""The part of splitc that these scripts need."""\n', **texts}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
