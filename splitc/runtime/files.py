"""The whole model's state in one file."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.serialization import set_default_mmap_options, skip_data

from .whole_state import in_memory

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


def beside(path: Path, what: str) -> Path:
    """A path in the same folder, of what is not yet or no longer at `path`."""
    return path.with_name(f"{path.name}.{what}")
