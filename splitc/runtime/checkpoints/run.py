"""Save and resume the run of a worker."""

from __future__ import annotations

import copy
import re
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

from ..errors import LaunchError
from ..transport.base import Transport
from ..whole_state import attempt
from . import restore
from .contents import Contents, Counts
from .folders import Disks, find_disks, newest, steps_in
from .manifest import owner
from .piece import Piece
from .storage import Collect, Collected, Saved, write


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
        if asynchronous and self._writer is None:
            self._side_group, device = self._transport.side_group(), self._transport.device
            begin = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
            self._writer = ThreadPoolExecutor(1, "checkpoint", begin)
        disks = self._disks[folder] = self._disks.get(folder) or find_disks(self._contents.rank.by_hosts(), folder)
        self._run = disks.run = self._run or disks.run
        self._known.add((disks.run, disks.start))
        disks.known = self._known
        attempt(self._transport, f"{folder}: no checkpoint was written", disks.foreign)

        def collect() -> Collected:
            return Collected(self._contents.pieces(counts), self._contents.shared())

        combine = partial(self._contents.run, counts=counts)
        if not asynchronous or self._side_group is None or self._writer is None:
            write(disks, counts["steps"], collect, combine, keep)
            return
        self._writing = self._writer.submit(
            write, replace(disks, transport=self._side_group), counts["steps"], _taken(collect), combine, keep
        )
        if self._transport.rank == 0:
            self._writing.add_done_callback(tell)

    def wait(self) -> None:
        """Return when the checkpoint that is being written is complete.  Raises its error."""
        if (writing := self._writing) is not None:
            self._writing = None
            writing.result()

    def resume(self, folder: Path) -> Mapping[str, int]:
        """Take over the newest checkpoint of a run, or that of one step if `folder` is one; returns its counts.

        Raises LaunchError, on every rank and before anything is changed, when training cannot go on from it.
        """
        self.wait()
        at = re.fullmatch(r"step-(\d+)", folder.name)
        folder = folder.parent if at else folder
        hosts, step = self._contents.rank.by_hosts(), int(at[1]) if at else None
        there = any(hosts.all_gather_objects(folder.is_dir()))
        found = newest(find_disks(hosts, folder), step) if there else None
        if found is None:
            raise LaunchError(f"{folder} has no checkpoint{f' after step {step}' if at else ''}")
        path, passed = found
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
        self._known |= {
            each for each in map(owner, steps_in(folder).values()) if each[0] == self._run or len(each) == 1
        }
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


def _taken(collect: Collect) -> Collect:
    """What `collect` gives now, as copies, for another thread; the error that it raises is raised there."""
    try:
        now = collect()
        copied = Collected(_copied(now.pieces), copy.deepcopy(now.shared))
    except Exception as error:
        failure = error

        def fail() -> Collected:
            raise failure

        return fail
    return lambda: copied


def _copied(pieces: Any) -> Any:
    return pieces.copied() if isinstance(pieces, Piece) else {name: _copied(each) for name, each in pieces.items()}
