"""The folder of a run's checkpoints, on every disk that its ranks write to.

    run/step-000020/            a checkpoint: a folder of torch.distributed.checkpoint
    run/step-000030.*.partial/  one that is being written, or was when its process was killed

Ranks that see the same folder share a disk.  A checkpoint gets its name when all disks have their files.  Where there
are several disks, each file is on two of them, so that losing a disk loses nothing (Stanza 5.3).
"""

from __future__ import annotations

import random
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from ..errors import LaunchError, bullets
from ..transport.base import Transport
from ..whole_state import attempt

METADATA = ".metadata"
_STEP = re.compile(r"step-(\d{6,})(?:\.old)?")
_REMOVED = re.compile(rf"{_STEP.pattern}|step-\d+\.\w+\.partial")
_OURS = re.compile(rf"{_REMOVED.pattern}|step-\d+\.superseded|\.disk-\w+")


def named(step: int) -> str:
    """The name of the checkpoint after so many steps."""
    return f"step-{step:06d}"


class Disks:
    """Which ranks see the same folder for checkpoints.

    of: rank -> the rank that stands for its disk.  token: of this run, in the names of what it has not completed.
    """

    def __init__(self, transport: Transport, folder: Path, of: Sequence[int], token: str) -> None:
        self.transport, self.folder, self.of, self._token = transport, folder, of, token
        self.stands = self.of[transport.rank] == transport.rank

    def through(self, transport: Transport) -> Disks:
        """The same disks, with another transport of the ranks."""
        return Disks(transport, self.folder, self.of, self._token)

    @property
    def stand(self) -> list[int]:
        """The ranks that stand for a disk each."""
        return sorted(set(self.of))

    def _partner(self, rank: int, step: int) -> int | None:
        """A rank of another disk, chosen at random, that keeps a copy of a rank's file; None where there is none."""
        others = [other for other, disk in enumerate(self.of) if disk != self.of[rank]]
        return random.Random(f"{step} {rank}").choice(others) if others else None

    def partial(self, step: int) -> Path:
        """The folder of a checkpoint that is being written."""
        return self.folder / f"{named(step)}.{self._token}.partial"

    def copy(self, path: Path, step: int) -> None:
        """Copy each rank's file to another disk, and what describes them to all, if there are several.  Collective."""
        if len(self.stand) > 1:
            for rank in self.stand:
                if rank != self.of[0]:
                    self.send(path / METADATA, 0, rank)
            for rank in range(self.transport.world):
                if (partner := self._partner(rank, step)) is not None:
                    self.send(path / f"__{rank}_0.distcp", rank, partner)
            self.transport.barrier()

    def complete(self, step: int, keep: int) -> None:
        """Give a checkpoint its name, then remove all but the last `keep`.  Collective.

        Those of later steps, which the run gave up when it went on from an earlier one, are renamed.
        """
        path, old = self.folder / named(step), self.folder / f"{named(step)}.old"

        def rename() -> None:
            if self.stands:
                if path.exists():
                    shutil.rmtree(old, ignore_errors=True)
                    path.rename(old)
                self.partial(step).rename(path)

        attempt(self.transport, f"{self.folder}: no checkpoint was written", rename)
        if self.stands:
            steps = steps_in(self.folder)
            for later in (each for each in steps if each > step):
                steps[later].rename(self.folder / f"{named(later)}.superseded")
            kept = {named(each) for each in sorted(each for each in steps if each <= step)[-keep:]}
            for other in self.folder.iterdir():
                if other.name not in kept and _REMOVED.fullmatch(other.name):
                    shutil.rmtree(other, ignore_errors=True)

    def send(self, path: Path, src: int, dst: int) -> None:
        """Copy a file from one rank's disk to that of another, to the path that this one gives.  Others do nothing."""
        transport = self.transport
        if transport.rank == src:
            nbytes = path.stat().st_size
            transport.isend(torch.tensor([nbytes]), dst).wait()
            transport.isend(torch.from_file(str(path), size=nbytes, dtype=torch.uint8), dst).wait()
        elif transport.rank == dst:
            size, aside = torch.zeros(1, dtype=torch.int64), path.with_name(f"{path.name}.partial")
            transport.irecv(size, src).wait()
            path.parent.mkdir(exist_ok=True)
            transport.irecv(torch.from_file(str(aside), True, int(size), dtype=torch.uint8), src).wait()
            aside.replace(path)


def find_disks(transport: Transport, folder: Path) -> Disks:
    """Find which ranks share a folder, which is made where there is none.  Collective.

    Raises LaunchError, on every rank, where the folder cannot be written to, or holds something else.
    """
    token = transport.broadcast_object(uuid.uuid4().hex[:8])
    mark = folder / f".disk-{token}"

    def claim() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if others := sorted(path.name for path in folder.iterdir() if not _OURS.fullmatch(path.name)):
            raise FileExistsError(f"{others[0]} is no checkpoint of a run; give a folder of its own")
        with suppress(FileExistsError), mark.open("x") as file:
            file.write(str(transport.rank))

    attempt(transport, f"{folder}: no folder for checkpoints", claim)
    found = Disks(transport, folder, transport.all_gather_objects(int(mark.read_text())), token)
    if found.stands:
        mark.unlink()
    return found


def steps_in(folder: Path) -> dict[int, Path]:
    """Steps -> the checkpoint after them, of those that a folder holds."""
    there = sorted(folder.iterdir(), reverse=True) if folder.is_dir() else []  # .old before what replaces it
    return {int(found[1]): path for path in there if (found := _STEP.fullmatch(path.name))}


def newest(disks: Disks, at: int | None = None) -> Path | None:
    """The newest checkpoint that has all its files, all of them on this rank's disk now.  Collective.

    at: the number of its steps, None: any.  None where there is no checkpoint.
    Raises LaunchError, on every rank, that names what is missing, where none has all its files.
    """
    own = {step: path for step, path in steps_in(disks.folder).items() if at in (None, step)}
    steps = {step for each in disks.transport.all_gather_objects(list(own)) for step in each}
    problems: list[str] = []
    for step in sorted(steps, reverse=True):
        path = own.get(step, disks.folder / named(step))
        if not (missing := _gathered(disks, path)):
            return path
        problems.append(f"{path.name} lacks {', '.join(missing)}")
    if problems:
        raise LaunchError(bullets(f"{disks.folder}: no checkpoint has all its files on these disks:", problems))
    return None


def _gathered(disks: Disks, path: Path) -> list[str]:
    """Bring the files of a checkpoint to every disk; returns those that no disk has, and then brings none."""
    if missing := _bring(disks, path, {METADATA: 1}):
        return missing
    needed: dict[str, int] = {}
    for info in FileSystemReader(path).read_metadata().storage_data.values():
        needed[info.relative_path] = max(info.offset + info.length, needed.get(info.relative_path, 0))
    return _bring(disks, path, needed)


def _bring(disks: Disks, path: Path, needed: Mapping[str, int]) -> list[str]:
    """`_gathered` of files with at least so many bytes."""
    own = {name for name, nbytes in _sizes(path) if nbytes >= needed.get(name, nbytes + 1)}
    there: list[set[str]] = disks.transport.all_gather_objects(own)
    if missing := sorted(needed.keys() - set().union(*there)):
        return missing
    for name in sorted(needed):
        source = next(rank for rank, names in enumerate(there) if name in names)
        for rank in disks.stand:
            if name not in there[rank]:
                disks.send(path / name, source, rank)
    disks.transport.barrier()
    return []


def _sizes(path: Path) -> Iterator[tuple[str, int]]:
    for each in path.iterdir() if path.is_dir() else ():
        yield each.name, each.stat().st_size
