"""A run that loses a host and gets it back: its model, its data, and a stand-in for ssh without networks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from splitc.compiled import CompiledProgram
from splitc.runtime.worker import Worker
from tests.support.compiled import compiled

HOSTS = ("127.0.0.1:3", "127.0.0.2:1")
FOLDER = (
    "SPLITC_WORLDS_FOLDER"  # names the folder of what a run leaves, and of the file `lost` while the second host is
)
STEPS = 40


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.first, self.second = nn.Linear(6, 8).double(), nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(self.first(x).relu(), 0.3, self.training))


class Numbered(Dataset[tuple[Tensor, Tensor]]):
    """30 examples, of which 12 make a batch; the first number of each is its own."""

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        x[0] = k / 30
        return x, torch.tensor(k % 3)

    def __len__(self) -> int:
        return 30


@cache
def program(strategy: str = "layer_separation", **options: Any) -> CompiledProgram:
    x, y = zip(*(Numbered()[k] for k in range(4)), strict=True)
    return compiled(Dropping(), (torch.stack(x),), torch.stack(y), F.cross_entropy, 4, strategy, **options)


def data(worker: Worker) -> Any:
    """The examples.

    Where fewer ranks may go on the second host is lost in step 8 of all ranks, with its memory, and comes back in step
    11 of the others, which wait until that is seen, and then go slowly.
    """
    folder, world = Path(os.environ[FOLDER]), worker.rank.spec.world
    loses = "SPLITC_MIN_WORLD" in os.environ

    def before(made: int) -> None:
        if loses and (world, made, worker.rank.index) == (4, 8, 3):
            (folder / "lost").touch()
            shutil.rmtree(os.environ["SPLITC_MEMORY"])
            os.kill(os.getpid(), signal.SIGKILL)
        if loses and world == 3 and made >= 11:
            (folder / "lost").unlink(missing_ok=True)
            deadline = time.monotonic() + 60
            while not (folder / "back").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.3)

    return noting(worker, before)


def noting(worker: Worker, before: Callable[[int], object]) -> Dataset[tuple[Tensor, Tensor]]:
    """The examples; each step notes those that it is given, and calls `before` with its number."""
    folder, step, world = Path(os.environ[FOLDER]), worker.step, worker.rank.spec.world

    def noted(*batch: Tensor) -> Tensor:
        made = worker.steps + 1
        if batch:
            line = {"step": made, "world": world, "examples": (batch[0][:, 0] * 30).round().int().tolist()}
            with (folder / f"seen-{worker.data_rank}").open("a") as file:
                file.write(json.dumps(line) + "\n")
        before(made)
        return step(*batch)

    vars(worker)["step"] = noted
    return Numbered()


def seen(folder: Path) -> dict[tuple[int, int], list[int]]:
    """World and step -> the examples of its global batch, in their order; those of the last time that it was made."""
    found: dict[tuple[int, int], dict[Path, list[int]]] = {}
    for path in sorted(folder.glob("seen-*")):
        for line in map(json.loads, path.read_text().splitlines()):
            found.setdefault((line["world"], line["step"]), {})[path] = line["examples"]
    return {made: [each for part in parts.values() for each in part] for made, parts in found.items()}


def of_readers(worker: Worker) -> Any:
    """A DataLoader, whose batches are those of each reader."""
    return DataLoader(Numbered(), 4)


def stand_in_for_ssh(place: Path, folder: Path) -> None:
    """An `ssh` that runs commands here, where each host has its memory.

    The second one cannot be reached while a file `lost` is in the folder.
    """
    second = HOSTS[1].partition(":")[0]
    script = f"""#!/bin/bash
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
if [ $host = {second} ] && [ -e {folder}/lost ]; then
    touch {folder}/refused; echo "ssh: connect to host $host: No route to host" >&2; exit 255
fi
export SPLITC_MEMORY={folder}/memory-$host; mkdir -p $SPLITC_MEMORY
sh -c "$*"; code=$?
[ $host = {second} ] && [ $code = 0 ] && [ -e {folder}/refused ] && touch {folder}/back
exit $code
"""
    (place / "ssh").write_text(script)
    (place / "ssh").chmod(0o755)
