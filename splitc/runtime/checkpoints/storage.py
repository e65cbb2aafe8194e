"""Write and read a checkpoint with torch.distributed.checkpoint, over a transport."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from ..transport.base import Transport
from ..whole_state import attempt
from .folders import METADATA, Disks, begin, complete
from .piece import Piece, unpacked


class _SavePlanner(DefaultSavePlanner):
    """Of pieces: the writer asks for what an item of the plan writes."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        piece: Piece = self.state_dict[index.fqn]
        return piece.tensor


class _LoadPlanner(DefaultLoadPlanner):
    """Of pieces, by their full names: the reader asks for what it fills."""

    def __init__(self, pieces: Mapping[str, Piece], metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state_dict, self.metadata = dict(pieces), metadata

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        piece: Piece = self.state_dict[index.fqn]
        return piece.tensor


def write(transport: Transport, folder: Path, step: int, state: Mapping[str, Any], keep: int) -> None:
    """Write each rank's own pieces of `state`, nested dicts by name, as the checkpoint after `step`.  Collective.

    Raises LaunchError, on every rank, when that fails; then the earlier checkpoints are still there.
    """
    disks = Disks(transport, folder)
    path, title = begin(disks, step), f"{folder}: no checkpoint was written"
    planner, writer = _SavePlanner(), FileSystemWriter(path)
    made: list[Any] = []

    def write_own() -> None:
        planner.set_up_planner(dict(state))
        writer.set_up_storage_writer(transport.rank == 0)
        others = [SavePlan([])] * transport.rank
        plan = writer.prepare_global_plan([*others, planner.create_local_plan()])[-1]  # which names the rank's file
        made.append((plan, writer.write_data(planner.finish_plan(plan), planner).value()))

    def write_metadata() -> None:
        if every is not None:
            metadata = planner.create_global_plan([plan for plan, _ in every])[1]  # checks that the pieces are wholes
            writer.finish(metadata, [results for _, results in every])

    attempt(transport, title, write_own)
    every = transport.gather_objects(made[0])
    attempt(transport, title, write_metadata)
    for rank in disks.stand:
        if rank != disks.of[0]:
            disks.send(path / METADATA, 0, rank)
    for rank in range(transport.world):
        if (partner := disks.partner(rank, step)) is not None:
            disks.send(path / f"__{rank}_0.distcp", rank, partner)
    transport.barrier()
    complete(disks, step, keep)


class Saved:
    """A checkpoint on this rank's disk.  Its `.metadata` is a pickle: read those that you trust."""

    def __init__(self, path: Path) -> None:
        self._reader = FileSystemReader(path)
        self._metadata: Metadata = self._reader.read_metadata()

    def like(self, name: str) -> Tensor | None:
        """A meta tensor of the shape and dtype of a whole tensor; None where there is no such tensor."""
        found = self._metadata.state_dict_metadata.get(name)
        if not isinstance(found, TensorStorageMetadata):
            return None
        return torch.empty(found.size, dtype=found.properties.dtype, device="meta")

    def read(self, pieces: Mapping[str, Piece]) -> None:
        """Fill pieces, by their full names, which the checkpoint must have in these shapes."""
        planner = _LoadPlanner(pieces, self._metadata)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        self._reader.read_data(planner.finish_plan(plan), planner).wait()

    def unpacked(self, name: str) -> Any:
        """What was packed under a name; raises KeyError where nothing was."""
        if (like := self.like(name)) is None:
            raise KeyError(f"the checkpoint has no {name}")
        data = torch.empty_like(like, device="cpu")
        self.read({name: Piece(data)})
        return unpacked(data)
