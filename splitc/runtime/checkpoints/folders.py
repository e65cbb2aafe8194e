"""The folder of a run's checkpoints, on every disk that its ranks write to.

    run/step-000020/            a checkpoint: a folder of torch.distributed.checkpoint, and its .manifest
    run/step-000030.*.partial/  one that is being written, or was when its process was killed

Ranks that see the same folder share a disk.  A checkpoint gets its name when all disks have their files.  Where there
are several disks, each file is on two of them, so that losing a disk loses nothing (Stanza 5.3).
"""

from __future__ import annotations

import os
import random
import re
import shutil
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..errors import LaunchError, bullets
from ..transport.base import Transport
from ..whole_state import attempt
from .manifest import MANIFEST, Manifest, checksum, owner

with suppress(ImportError):  # of Unix alone
    import fcntl

METADATA = ".metadata"
FAILURES, AT = "failures.jsonl", ".at"  # of a run's history, which lies beside its checkpoints
AT_ONCE = 1 << 26
"""Bytes of a file that travel in one message."""

_STEP = re.compile(r"step-(\d{6,})(?:\.old)?")
_REMOVED = re.compile(rf"{_STEP.pattern}|step-\d+\.\w+\.partial")
_OURS = re.compile(rf"{_REMOVED.pattern}|step-\d+\.superseded|\.disk-\w+|{re.escape(FAILURES)}|{re.escape(AT)}")


def named(step: int) -> str:
    """The name of the checkpoint after so many steps."""
    return f"step-{step:06d}"


@dataclass
class Disks:
    """Which ranks see the same folder for checkpoints.

    of: rank -> the rank that stands for its disk.  start: of this process, in the names of what it has not completed.
    run: of which checkpoints are written.  known: the owners of those that may be replaced.
    """

    transport: Transport
    folder: Path
    of: Sequence[int]
    start: str
    run: str
    known: set[tuple[str, ...]] = field(default_factory=set)

    def foreign(self) -> list[str]:
        """The checkpoints here that are not of this run."""
        text = "was written by another run, which would lose it; go on from it with resume, or give another folder"
        return [f"{path.name} {text}" for path in steps_in(self.folder).values() if owner(path) not in self.known]

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
        return self.folder / f"{named(step)}.{self.start}.partial"

    def copy(self, path: Path, step: int) -> None:
        """Copy each rank's file to another disk, and what describes them to all, if there are several.  Collective."""
        if len(self.stand) > 1:
            for rank in self.stand:
                if rank != self.of[0]:
                    self.send(path / METADATA, 0, rank)
                    self.send(path / MANIFEST, 0, rank)
            for rank in range(self.transport.world):
                if (partner := self._partner(rank, step)) is not None:
                    self.send(path / f"__{rank}_0.distcp", rank, partner)
            self.transport.barrier()

    def complete(self, step: int, keep: int) -> None:
        """Give a checkpoint its name, then remove all but the last `keep`.  Collective.

        Those of later steps, which the run gave up when it went on from an earlier one, are renamed.
        """
        path, stands = self.folder / named(step), self.transport.rank in self.stand

        def rename() -> list[str]:
            lock = os.open(self.folder, os.O_RDONLY)
            with suppress(OSError, NameError):  # a system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                if problems := self.foreign():
                    return problems
                if path.exists():
                    shutil.rmtree(old := path.with_suffix(".old"), ignore_errors=True)
                    path.rename(old)
                self.partial(step).rename(path)
                return []
            finally:
                os.close(lock)

        attempt(self.transport, f"{self.folder}: no checkpoint was written", rename if stands else list)

        def tidy() -> None:
            steps = steps_in(self.folder)
            for later in (each for each in steps if each > step):
                steps[later].rename(self.folder / f"{named(later)}.superseded")
            kept = {named(each) for each in sorted(each for each in steps if each <= step)[-keep:]}
            for other in self.folder.iterdir():
                if other.name not in kept and _REMOVED.fullmatch(other.name):
                    shutil.rmtree(other, ignore_errors=True)

        # All wait: a folder that is half removed reads as a checkpoint of nobody.
        title = f"{path}: written, but the checkpoints before it could not be removed"
        attempt(self.transport, title, tidy if stands else lambda: None)

    def send(self, path: Path, src: int, dst: int) -> None:
        """Copy a file from one rank's disk to that of another, to the path that this one gives.  Others do nothing."""
        transport = self.transport
        if transport.rank == src:
            nbytes = path.stat().st_size
            transport.isend(torch.tensor([nbytes]), dst).wait()
            for part in torch.from_file(str(path), size=nbytes, dtype=torch.uint8).split(AT_ONCE):
                transport.isend(part, dst).wait()
        elif transport.rank == dst:
            size, aside = torch.zeros(1, dtype=torch.int64), path.with_name(f"{path.name}.partial")
            transport.irecv(size, src).wait()
            path.parent.mkdir(exist_ok=True)
            for part in torch.from_file(str(aside), True, int(size), dtype=torch.uint8).split(AT_ONCE):
                transport.irecv(part, src).wait()
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
    found = Disks(transport, folder, transport.all_gather_objects(int(mark.read_text())), token, run=token)
    if transport.rank in found.stand:
        mark.unlink()
    return found


def steps_in(folder: Path) -> dict[int, Path]:
    """Steps -> the checkpoint after them, of those that a folder holds."""
    there = sorted(folder.iterdir(), reverse=True) if folder.is_dir() else []  # .old before what replaces it
    return {int(found[1]): path for path in there if (found := _STEP.fullmatch(path.name))}


def newest(disks: Disks, at: int | None = None) -> tuple[Path, list[str]] | None:
    """The newest whole checkpoint, all of it on this rank's disk now, and what is wrong with later ones.  Collective.

    at: the number of its steps, None: any.  None where there is no checkpoint.
    Raises LaunchError, on every rank, where none is whole, or they are of several runs.
    """
    own = {step: path for step, path in steps_in(disks.folder).items() if at in (None, step)}
    tables = disks.transport.all_gather_objects({step: Manifest.of(path) for step, path in own.items()})
    manifests = {step: each for table in reversed(tables) for step, each in table.items() if each}
    if len(runs := {each.run: named(step) for table in tables for step, each in table.items() if each}) > 1:
        raise LaunchError(
            f"{disks.folder} holds {' and '.join(runs.values())} of different runs; name the one to resume"
        )
    problems: list[str] = []
    for step in sorted({step for table in tables for step in table}, reverse=True):
        path = own.get(step, disks.folder / named(step))
        wrong = _brought(disks, path, manifests[step]) if step in manifests else [f"{MANIFEST} (new in this version)"]
        if not wrong:
            return path, problems
        problems.append(f"{path.name}: missing or damaged: {', '.join(wrong)}")
    if problems:
        raise LaunchError(bullets(f"{disks.folder}: no checkpoint is whole on these disks:", problems))
    return None


def _brought(disks: Disks, path: Path, manifest: Manifest) -> list[str]:
    """Bring the whole files of a checkpoint to every disk; returns those that no disk has whole, and then brings none.

    Ranks that share a disk share the reading.
    """
    beside = [rank for rank, disk in enumerate(disks.of) if disk == disks.of[disks.transport.rank]]
    part = sorted(manifest.files)[beside.index(disks.transport.rank) :: len(beside)]
    there: dict[int, set[str]] = {disk: set() for disk in disks.stand}
    whole = [name for name in part if 0 <= checksum(path / name) == manifest.files[name]]
    for disk, names in zip(disks.of, disks.transport.all_gather_objects(whole), strict=True):
        there[disk].update(names)
    if missing := sorted(manifest.files.keys() - set().union(*there.values())):
        return missing
    for name in sorted(manifest.files):
        source = next(disk for disk, names in there.items() if name in names)
        for disk in (disk for disk, names in there.items() if name not in names):
            disks.send(path / name, source, disk)
    if disks.transport.rank in disks.stand and Manifest.of(path) != manifest:
        manifest.write(path)
    disks.transport.barrier()
    return []
