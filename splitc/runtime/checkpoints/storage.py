"""Write and read a checkpoint with torch.distributed.checkpoint, over a transport."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from ..errors import LaunchError
from ..whole_state import attempted
from .folders import METADATA, Disks
from .manifest import Manifest, checksum
from .metadata import read_metadata
from .piece import Piece, packed, unpacked

_FULL = 1e7  # bytes left on a disk, below which it is full


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


def write(
    disks: Disks, step: int, own: Mapping[str, Any], shared: Any, combine: Callable[[list[Any]], Any], keep: int
) -> None:
    """Write the checkpoint after `step`: each rank its pieces, nested by name, rank 0 one item for all.  Collective.

    shared: what this rank gives to that item, `run`, which `combine` makes of what all ranks give.
    Raises LaunchError, on every rank, when that fails on any; then the earlier checkpoints are still there.
    """
    transport, path = disks.transport, disks.partial(step)
    planner, writer = _SavePlanner(), FileSystemWriter(path)

    def title() -> str:
        free = shutil.disk_usage(disks.folder).free
        room = f" (its disk is full: {free / 1e6:.0f} MB are left)" * (free < _FULL)  # torch does not say so
        return f"{disks.folder}: no checkpoint was written{room}"

    def write_own() -> tuple[SavePlan, list[WriteResult], dict[str, int]]:
        pieces = {**own, **({} if given is None else {"run": Piece(packed(combine(given)))})}
        path.mkdir(parents=True, exist_ok=True)
        planner.set_up_planner(pieces)
        writer.set_up_storage_writer(transport.rank == 0)
        plan, files = planner.create_local_plan(), dict[tuple[int, ...], list[WriteItem]]()
        for item in sorted(plan.items, key=lambda each: each.index.fqn):  # so that all that write a file write the same
            files.setdefault(planner.state_dict[item.index.fqn].writers or (transport.rank,), []).append(item)
        first, results, sums = list[WriteItem](), list[WriteResult](), dict[str, int]()
        for ranks, items in files.items():
            prefix = _StoragePrefix(f"__{'-'.join(map(str, ranks))}_")
            made = writer.write_data(replace(plan, items=items, storage_data=prefix), planner).value()
            sums |= {name: checksum(path / name) for name in {each.storage_data.relative_path for each in made}}
            if ranks[0] == transport.rank:
                first, results = first + items, results + made
        return replace(plan, items=first), results, sums

    def write_metadata() -> Manifest | None:
        if every is None:
            return None
        plans, results, sums = zip(*every, strict=True)
        metadata = planner.create_global_plan(list(plans))[1]  # checks that pieces make wholes
        writer.finish(metadata, list(results))
        named = zip(({each.storage_data.relative_path for each in own} for own in results), sums, strict=True)
        files = {name: own[name] for names, own in named for name in names}
        return Manifest(disks.run, disks.start, {METADATA: checksum(path / METADATA), **files})

    try:
        given = transport.gather_objects(shared)
        written = attempted(transport, title, write_own)
        every = transport.gather_objects(written)
        manifest = transport.broadcast_object(attempted(transport, title, write_metadata))
        whole = [name for name, value in written[2].items() if manifest.files[name] == value]
        disks.spread(path, manifest, [*whole, METADATA] if transport.rank == 0 else whole, 2)
        disks.complete(step, keep)
    except LaunchError:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        raise


class Saved:
    """A checkpoint on this rank's disk.  Reading it runs none of what is in it."""

    def __init__(self, path: Path) -> None:
        self._reader = FileSystemReader(path)
        self.metadata = read_metadata(path / METADATA)

    def like(self, name: str) -> Tensor | None:
        """A meta tensor of the shape and dtype of a whole tensor; None where there is no such tensor."""
        found = self.metadata.state_dict_metadata.get(name)
        if not isinstance(found, TensorStorageMetadata):
            return None
        return torch.empty(found.size, dtype=found.properties.dtype, device="meta")

    def read(self, pieces: Mapping[str, Piece]) -> None:
        """Fill pieces, by their full names, which the checkpoint must have in these shapes."""
        planner = _LoadPlanner(pieces, self.metadata)
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        self._reader.read_data(planner.finish_plan(plan), planner).wait()

    def unpacked(self, name: str) -> Any:
        """What was packed under a name; raises KeyError where nothing was."""
        if (like := self.like(name)) is None:
            raise KeyError(f"the checkpoint has no {name}")
        data = torch.empty_like(like, device="cpu")
        self.read({name: Piece(data)})
        return unpacked(data)
