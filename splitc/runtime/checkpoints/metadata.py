"""Read the `.metadata` of a checkpoint: torch.distributed.checkpoint writes a pickle, which could run any code."""

from __future__ import annotations

import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from .manifest import is_beside

_VALUES = {
    "torch": {name for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)} | {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}
"""Module -> its names that only hold values, and of which a description of tensors is made."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # so Python 3.11.0 to 3.11.3 write the member of an enum
            return lambda enum, member: enum.__members__[member]
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return PurePath
        if name not in _VALUES.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which describes no tensor; nothing was run")
        return super().find_class(module, name)


def read_metadata(path: Path) -> Metadata:
    """The description of a checkpoint's tensors, and where they are in the files beside it.

    Raises ValueError where a file holds anything else.
    """
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
        if elsewhere := [each for each in found.storage_data.values() if not is_beside(each.relative_path)]:
            raise pickle.UnpicklingError(f"it has tensors in {elsewhere[0].relative_path!r}, outside the checkpoint")
    except Exception as error:  # of a damaged pickle any
        raise ValueError(f"{path}: no description of a checkpoint: {error}; give another checkpoint") from error
    return found
