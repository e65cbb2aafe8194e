"""A rank's part of a tensor, in the form in which torch.distributed.checkpoint writes and reads parts."""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..spec import Shard


class Piece:
    """A part of a tensor of shape `whole`, which begins at `offsets`."""

    def __init__(
        self, tensor: Tensor, shard: Shard | None = None, size: int = 0, writers: tuple[int, ...] = ()
    ) -> None:
        """shard: the part of the whole that `tensor` is, None: all of it.  size: of the whole along the shard's dim.

        writers: the ranks that write it, each to its disk; (): the one that has it.
        """
        self.tensor, self.writers = tensor.detach(), writers
        self.whole, self.offsets = tensor.shape, torch.Size([0] * tensor.dim())
        if shard is not None and tensor.dim():
            self.whole = torch.Size(size if d == shard.dim else n for d, n in enumerate(tensor.shape))
            self.offsets = torch.Size(shard.first if d == shard.dim else 0 for d in range(tensor.dim()))

    def copied(self) -> Piece:
        """The same part, as a copy on the CPU that later steps leave alone."""
        made = Piece(self.tensor.to("cpu", copy=True), writers=self.writers)
        made.whole, made.offsets = self.whole, self.offsets
        return made

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        data = TensorWriteData(self._chunk, TensorProperties.create_from_tensor(self.tensor), self.whole)
        return [WriteItem(MetadataIndex(name, self.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk]

    @property
    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(self.offsets, self.tensor.shape)


def packed(value: Any) -> Tensor:
    """Numbers, texts, containers and tensors as bytes that `unpacked` reads without running code.

    Raises ValueError for other objects.
    """
    file = io.BytesIO()
    torch.save(value, file)
    data = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    try:
        unpacked(data)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = found[1] if found else str(error).splitlines()[0]
        raise ValueError(f"{what}: a checkpoint holds numbers, texts, containers and tensors") from error
    return data


def unpacked(data: Tensor) -> Any:
    """What was packed, on the CPU."""
    return torch.load(io.BytesIO(data.numpy().tobytes()), "cpu", weights_only=True)
