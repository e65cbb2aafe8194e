"""What ranks write on disk: the whole model's state in one file, and checkpoints of a run with a file for each rank.

Either replaces what is there by a rename, so that a killed process leaves the old or the new one, whole.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import set_default_mmap_options, skip_data

from .checkpoint import attempt, in_memory
from .transport.base import Transport, describe

_MAPPED = 16 << 20  # bytes of tensors that are mapped and filled before the process gives the pages back


class StateFile:
    """A state_dict in a file: made without values, on a disk that has room for them, and filled tensor by tensor.

    The process needs no memory for the whole: `skip_data` (torch 2.6) reads none of the empty tensors, and the file is
    mapped anew as it is filled.
    """

    def __init__(self, path: Path, likes: Mapping[str, Tensor]) -> None:
        with skip_data():
            torch.save(in_memory(likes), path)
        if hasattr(os, "posix_fallocate"):
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        self._path, self._nbytes = path, 0
        self._mapped: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if not self._mapped or self._nbytes > _MAPPED:
            self._mapped, self._nbytes = {}, 0
            with set_default_mmap_options(mmap.MAP_SHARED):
                self._mapped = torch.load(self._path, weights_only=True, mmap=True)
        self._nbytes += self._mapped[name].nbytes
        return self._mapped[name]


def save_run(transport: Transport, folder: Path, run: Mapping[str, Any]) -> None:
    """Write each rank's `run` into `folder`, in place of the checkpoint that may be there.  Collective.

    Raises LaunchError, on every rank, when that fails; then the earlier checkpoint is still there.
    """
    aside, old = beside(folder, "partial"), beside(folder, "old")
    title, path = f"{folder}: no checkpoint was written", aside / f"rank{transport.rank}.pt"

    def write() -> None:
        aside.mkdir(parents=True, exist_ok=True)
        torch.save(dict(run), path)
        torch.load(path, weights_only=True, mmap=True)  # so that what could not be read again is said now

    def replace() -> None:
        for name in os.listdir(folder) if folder.exists() else ():
            if not re.fullmatch(r"rank\d+\.pt", name):
                raise FileExistsError(f"{name} is no part of a checkpoint; give a folder of its own")
        if len(os.listdir(aside)) < transport.world:
            raise OSError("other ranks wrote elsewhere; give a folder on a file system that all of them share")
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        aside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)

    attempt(transport, title, write)
    attempt(transport, title, replace if transport.rank == 0 else lambda: None)


def load_run(transport: Transport, folder: Path, own: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of the checkpoint in `folder`, for a rank that is as `own`.  Collective.

    Raises LaunchError, on every rank, that says what is missing or differs on any of them.
    """
    old, run = beside(folder, "old"), {}
    source = old if old.exists() and not folder.exists() else folder  # where replacing it was broken off

    def placed(storage: Any, place: str) -> Any:
        return storage if place == "cpu" else storage.to(device=transport.device)

    def read() -> Iterator[str]:
        run.update(torch.load(source / f"rank{transport.rank}.pt", placed, weights_only=True))
        was, now = _facts(run), _facts(own)
        for name in (name for name in {**now, **was} if was.get(name) != now.get(name)):
            yield f"rank {transport.rank}: {name}: the checkpoint has {was.get(name)}, this run {now.get(name)}"

    attempt(transport, f"{folder}: training cannot go on from this checkpoint, and nothing was changed", read)
    return run


def _facts(run: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal in two runs of which one goes on with the other's state."""
    optimizers = {f"optimizer {role}".strip(): each["of"] for role, each in run["optimizers"].items()}
    return {**run["settings"], **optimizers, **{name: describe(tensor) for name, tensor in run["tensors"].items()}}


def beside(path: Path, what: str) -> Path:
    """A path in the same folder, of what is not yet or no longer at `path`."""
    return path.with_name(f"{path.name}.{what}")
