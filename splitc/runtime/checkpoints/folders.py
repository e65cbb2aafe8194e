"""The folder of a run's checkpoints, on every disk that its ranks write to.

    run/step-000020/            a checkpoint: a folder of torch.distributed.checkpoint, and its .manifest
    run/step-000030.*.partial/  one that is being written, or was when its process was killed

Ranks that see the same folder share a disk.  A checkpoint gets its name when all disks have their files.  Where there
are several disks, each file is on two of them, so that losing a disk loses nothing (Stanza 5.3).  Memory of a host that
is no process's serves as a disk too.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..errors import LaunchError, bullets
from ..files import beside
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

    of: rank -> the rank that stands for its disk, or for the memory of its host.
    start: of this process, in the names of what it has not completed.
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

    def partial(self, step: int) -> Path:
        """The folder of a checkpoint that is being written."""
        return self.folder / f"{named(step)}.{self.start}.partial"

    def spread(self, path: Path, manifest: Manifest, whole: Sequence[str], least: int) -> list[str]:
        """Send the files of a checkpoint until each is on `least` disks, in the order of these.  Collective.

        whole: those that this rank knows to be on its disk.  Returns those that no disk has whole; then none is sent.
        Raises LaunchError, on every rank and before any is sent, where a disk has no room.
        """
        transport, there = self.transport, dict[str, dict[int, int]]()  # file -> disk -> bytes
        every = transport.all_gather_objects({name: (path / name).stat().st_size for name in whole})
        for disk, sizes in zip(self.of, every, strict=True):
            for name, nbytes in sizes.items():
                there.setdefault(name, {})[disk] = nbytes
        if missing := sorted(manifest.files.keys() - there.keys()):
            return missing
        moves: list[tuple[Path, int, int, int]] = []
        for name, on in sorted(there.items()):
            first = self.stand.index(min(on))
            others = [disk for disk in self.stand[first:] + self.stand[:first] if disk not in on]
            moves += [(path / name, max(on.values()), min(on), disk) for disk in others[: max(0, least - len(on))]]

        def make_room() -> None:
            if transport.rank in self.stand:
                path.mkdir(exist_ok=True)
                if Manifest.of(path) != manifest:
                    manifest.write(path)
            for file, nbytes, _, disk in moves:
                if disk == transport.rank:
                    with beside(file, "partial").open("wb") as empty:
                        if hasattr(os, "posix_fallocate"):  # a full disk would end what writes into the map of a file
                            os.posix_fallocate(empty.fileno(), 0, nbytes)

        attempt(transport, f"{path}: no room", make_room)
        works = []
        for file, nbytes, source, disk in moves:
            if transport.rank in (source, disk):
                own = file if transport.rank == source else beside(file, "partial")
                data = torch.from_file(str(own), transport.rank == disk, nbytes, dtype=torch.uint8)
                for part in data.split(AT_ONCE):
                    sends = transport.rank == source
                    works.append(transport.isend(part, disk) if sends else transport.irecv(part, source))
        for work in works:
            work.wait()
        for file, _, _, disk in moves:
            if disk == transport.rank:
                beside(file, "partial").replace(file)
        transport.barrier()
        return []

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


def find_disks(transport: Transport, folder: Path, is_private: bool = False) -> Disks:
    """Find which ranks share a folder, which is made where there is none.  Collective.

    is_private: this user alone may use it, and the folder around it is there.
    Raises LaunchError, on every rank, where the folder cannot be written to, or holds something else.
    """
    token = transport.broadcast_object(uuid.uuid4().hex[:8])
    mark = folder / f".disk-{token}"

    def claim() -> None:
        if is_private:
            with suppress(FileExistsError):
                folder.mkdir(0o700)
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.getuid():
                raise PermissionError("others have access to it; remove it")
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


Found = Mapping[int, tuple[Disks, Manifest | None]]
"""Steps -> where the checkpoint after them is, and what it says of itself."""


def found_in(disks: Disks, at: int | None = None) -> Found:
    """The checkpoints that any rank has.  Collective.

    at: the number of their steps, None: any.
    Raises LaunchError, on every rank, where they are of several runs.
    """
    own = {step: Manifest.of(path) for step, path in steps_in(disks.folder).items() if at in (None, step)}
    every = [pair for table in reversed(disks.transport.all_gather_objects(own)) for pair in table.items()]
    if len(runs := {each.run: named(step) for step, each in every if each}) > 1:
        raise LaunchError(
            f"{disks.folder} holds {' and '.join(runs.values())} of different runs; name the one to resume"
        )
    return {step: (disks, each) for step, each in sorted(every, key=lambda pair: pair[1] is not None)}


def newest(found: Found) -> tuple[Path, list[str]]:
    """The newest whole checkpoint, all of it on this rank's disk now, and what is wrong with later ones.  Collective.

    Raises LaunchError, on every rank, where none is whole.
    """
    problems: list[str] = []
    for step in sorted(found, reverse=True):
        disks, manifest = found[step]
        path = steps_in(disks.folder).get(step, disks.folder / named(step))
        try:
            wrong = _brought(disks, path, manifest) if manifest else [f"{MANIFEST} (new in this version)"]
        except LaunchError as error:
            wrong = [str(error)]
        if not wrong:
            return path, problems
        problems.append(f"{path.name}: missing or damaged: {', '.join(wrong)}")
    raise LaunchError(bullets(f"{disks.folder}: no checkpoint is whole on these disks:", problems))


def _brought(disks: Disks, path: Path, manifest: Manifest) -> list[str]:
    """Bring the whole files of a checkpoint to every disk; returns those that no disk has whole, and then brings none.

    Ranks that share a disk share the reading.
    """
    readers = [rank for rank, disk in enumerate(disks.of) if disk == disks.of[disks.transport.rank]]
    part = sorted(manifest.files)[readers.index(disks.transport.rank) :: len(readers)]
    whole = [name for name in part if 0 <= checksum(path / name) == manifest.files[name]]
    return disks.spread(path, manifest, whole, len(disks.stand))
