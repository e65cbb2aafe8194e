"""Save and resume the run of a worker."""

from __future__ import annotations

import copy
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ..errors import MEMORY, SHM, LaunchError
from ..transport.base import Transport
from ..whole_state import attempt, attempted
from . import restore
from .contents import Contents, Counts
from .folders import Disks, find_disks, found_in, newest, steps_in
from .manifest import owner
from .piece import Piece
from .storage import Saved, write


class Checkpoints:
    """The checkpoints of a rank; its methods are collective."""

    def __init__(self, transport: Transport, contents: Contents) -> None:
        self._transport, self._contents = transport, contents
        self._side_group: Transport | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._disks: dict[Path, Disks] = {}
        self._run = ""
        self._known: set[tuple[str, ...]] = set()
        self._saved = -1  # steps of the checkpoint that was begun last
        self._is_copy = self._is_told = False  # whether the one being written is in memory; whether one could not be
        self.memory, self._copies = Path(os.environ.get(MEMORY, SHM)), Path()  # of this host; the run's folder there
        self.source: Path | None = None
        self._states: dict[str, Any] = {}  # of objects that are not registered yet

    def register(self, name: str, value: Any) -> None:
        """Let checkpoints hold an object; it takes over its state of the checkpoint that was resumed, if any."""
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(value, method, None)):
                raise LaunchError(f"{name}: a {type(value).__name__} has no {method}, so no checkpoint can hold it")
        objects = self._contents.objects
        free = next(each for k in count(1) if (each := name if k == 1 else f"{name}_{k}") not in objects)
        objects[free] = value
        if free in self._states:
            value.load_state_dict(self._states.pop(free))

    def save(self, folder: Path, counts: Counts, keep: int, asynchronous: bool) -> None:
        """Write a checkpoint; asynchronous: what it holds is copied now, and written by a thread of its own."""
        if type(keep) is not int or keep < 1:
            raise LaunchError(f"keep={keep!r}: give the number of checkpoints to keep, at least 1")
        self.wait()
        disks = self._disks[folder] = self._disks.get(folder) or find_disks(self._contents.rank.by_hosts(), folder)
        self._run = disks.run = self._run or disks.run
        self._write(disks, counts, keep, asynchronous)

    def copy(self, counts: Counts, asynchronous: bool) -> None:
        """Write a checkpoint into the memory of hosts, in place of the one there, unless one of this step was begun.

        Where that fails rank 0 warns, once, and training goes on.
        """
        if not self._run:
            raise LaunchError("a copy in memory is of a run: save a checkpoint of it, or resume it, first")
        self.wait()
        if self._saved == counts["steps"]:
            return
        self._copies, hosts = self.memory / f"splitc-{self._run}", self._contents.rank.by_hosts()
        try:
            disks = self._disks.get(self._copies) or find_disks(hosts, self._copies, is_private=True)
            self._disks[self._copies], disks.run, self._is_copy = disks, self._run, True
            self._write(disks, counts, 1, asynchronous)
        except LaunchError as error:
            self._tell(error)

    def _tell(self, error: LaunchError) -> None:
        if not self._is_told and self._transport.rank == 0:
            warnings.warn(f"{error}\ntraining goes on, and tries again at the next copy into memory", stacklevel=4)
        self._is_told = True

    def _write(self, disks: Disks, counts: Counts, keep: int, asynchronous: bool) -> None:
        self._saved = counts["steps"]
        if asynchronous and self._writer is None:
            self._side_group, device = self._transport.side_group(), self._transport.device
            begin = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
            self._writer = ThreadPoolExecutor(1, "checkpoint", begin)
        self._known.add((disks.run, disks.start))
        disks.known = self._known
        title, contents = f"{disks.folder}: no checkpoint was written", self._contents
        attempt(self._transport, title, disks.foreign)

        def collect() -> tuple[dict[str, Any], tuple[Any, ...]]:
            pieces, shared = contents.pieces(counts, disks.of), contents.shared()
            return (_copied(pieces), copy.deepcopy(shared)) if asynchronous else (pieces, shared)

        own, step = attempted(self._transport, title, collect), counts["steps"]
        combine = partial(contents.run, counts=counts)
        if not asynchronous or self._side_group is None or self._writer is None:
            write(disks, step, *own, combine, keep)
            return
        beside = replace(disks, transport=self._side_group)
        self._writing = self._writer.submit(write, beside, step, *own, combine, keep)
        if self._transport.rank == 0 and not self._is_copy:
            self._writing.add_done_callback(tell)

    def wait(self) -> None:
        """Return when the checkpoint that is being written is complete.  Raises its error."""
        writing, is_copy, self._writing, self._is_copy = self._writing, self._is_copy, None, False
        if writing is not None:
            try:
                writing.result()
            except LaunchError as error:
                if not is_copy:
                    raise
                self._tell(error)

    def close(self) -> None:
        """Wait, and remove what is in the memory of hosts."""
        self.wait()
        if self._copies != Path():
            self._transport.barrier()
            shutil.rmtree(self._copies, ignore_errors=True)
            self._disks.pop(self._copies, None)

    def resume(self, folder: Path) -> Mapping[str, int]:
        """Take over the newest checkpoint of a run, or that of one step if `folder` is one; returns its counts.

        The newest may be in the memory of hosts; what is there else is removed.
        Raises LaunchError, on every rank and before anything is changed, when training cannot go on from it.
        """
        self.wait()
        at = re.fullmatch(r"step-(\d+)", folder.name)
        folder = folder.parent if at else folder
        hosts, step = self._contents.rank.by_hosts(), int(at[1]) if at else None
        there = any(hosts.all_gather_objects(folder.is_dir()))
        found = found_in(find_disks(hosts, folder), step) if there else {}
        if not found:
            raise LaunchError(f"{folder} has no checkpoint{f' after step {step}' if at else ''}")
        run_id = next((each.run for _, each in found.values() if each), "")
        copies = self.memory / f"splitc-{run_id}"
        is_there = any(hosts.all_gather_objects(bool(run_id) and copies.is_dir()))
        if at is None and is_there:
            found, self._copies = {**found_in(find_disks(hosts, copies, is_private=True)), **found}, copies
        path, passed = newest(found)
        self.source = path.parent
        if is_there and self.source != copies:
            shutil.rmtree(copies, ignore_errors=True)
            self._disks.pop(copies, None)
        if passed and self._transport.rank == 0:
            warnings.warn(f"{folder}: {'; '.join(passed)}; {path.name} is taken instead", stacklevel=3)
        opened: list[Any] = []

        def check() -> list[str]:
            saved = Saved(path)
            opened.extend([saved, saved.unpacked("run")])
            return list(restore.problems(self._contents, saved, opened[1]))

        attempt(self._transport, f"{path}: training cannot go on from this checkpoint, and nothing was changed", check)
        saved, run = opened
        attempt(
            self._transport,
            f"{path}: the checkpoint could not be read, and the ranks have parts of it; start them again",
            lambda: self._states.update(restore.restore(self._contents, saved, run)),
        )
        self._run = owner(path)[0]
        owners = [owner(each) for there in {folder, self.source} for each in steps_in(there).values()]
        self._known |= {each for each in owners if each[0] == self._run or len(each) == 1}
        averaged = any(self._transport.all_gather_objects(bool(self._contents.averages())))
        for text in self._unlike(saved, run, averaged) if self._transport.rank == 0 else ():
            warnings.warn(text, stacklevel=3)
        objects = self._contents.objects
        for name in objects.keys() & self._states.keys():
            objects[name].load_state_dict(self._states.pop(name))
        return {name: run[name] for name in ("steps", "examples")}

    def _unlike(self, saved: Saved, run: Mapping[str, Any], averaged: bool) -> Iterator[str]:
        """In what training goes on otherwise than the run before would.  averaged: whether this run averages."""
        was, now = run["global_batch"], self._contents.rank.spec.batch_offsets[-1]
        if was != now:
            yield (
                f"the checkpoint was made with global batches of {was} examples, and this run has {now}: it goes on, "
                f"but not as the run before would; compile with global_batch={was} for that"
            )
        if not averaged and any(name.startswith("averages.") for name in saved.metadata.state_dict_metadata):
            yield "the checkpoint has averages of the parameters, which this run drops; give ema= to keep them"
        for name in sorted(self._contents.objects.keys() - self._states.keys()):
            yield f"{name}: the checkpoint has none of it, so it begins anew"


def tell(writing: Future[None]) -> None:
    """Print at once why a checkpoint was not written; the next save, which may be long after, raises it."""
    if error := writing.exception():
        print(f"{error}\n  training goes on up to the next checkpoint, and ends there", file=sys.stderr, flush=True)


def _copied(pieces: Any) -> Any:
    return pieces.copied() if isinstance(pieces, Piece) else {name: _copied(each) for name, each in pieces.items()}
