"""Starts of a build's launch.py as torchrun's agent makes them, by a process that has torch already and forks ranks.

    python -m tests.support.restarted BUILD FOLDER

A start begins all ranks and ends them when one fails.  What came of each scenario is written to FOLDER/found.json.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import checkpoint

from splitc.compiled import CompiledProgram
from splitc.runtime.launch import main as launching
from splitc.runtime.worker import Worker
from tests.support.compiled import compiled
from tests.support.launched import SEPARATION, WORLD, Examples

STEPS, EVERY = 12, 3
HOW = "RESTARTED_HOW"


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(self.first(x).relu(), 0.3, self.training))


def program() -> CompiledProgram:
    x, y = Examples()[:4]
    return compiled(Dropping(), (x,), y, F.cross_entropy, WORLD, SEPARATION)


def data(worker: Worker) -> Any:
    """The examples; before that what the scenario wants to happen to this start is prepared."""
    how, start = os.environ.get(HOW, ""), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    prepared: dict[str, Callable[[Worker, int], None]] = {
        "killed": killed,
        "fails": fails,
        "slow": slow,
        "copied": copied,
    }
    if how in prepared:
        prepared[how](worker, start)
    return Examples()


def before(act: Callable[[], object], call: Callable[..., Any]) -> Callable[..., Any]:
    def both(*given: Any, **options: Any) -> Any:
        act()
        return call(*given, **options)

    return both


def killed(worker: Worker, start: int) -> None:
    """One rank in its forward, the other one in an exchange, then one while a checkpoint is written."""

    def die(step: int) -> None:
        if worker.steps + 1 >= step:
            os.kill(os.getpid(), signal.SIGKILL)

    rank, stage, transport = worker.rank.index, worker.stage, worker.rank.transport
    if (start, rank) == (0, 1):
        patch(stage, "forward", lambda: die(5))
    elif (start, rank) == (1, 0):
        patch(transport, "isend", lambda: die(8))
    elif (start, rank) == (2, 1):
        writer: Any = checkpoint
        write = writer.FileSystemWriter.write_data
        writer.FileSystemWriter.write_data = before(lambda: die(10), write)


def copied(worker: Worker, start: int) -> None:
    """One rank before step 9."""
    if (start, worker.rank.index) == (0, 1):
        patch(worker, "step", lambda: os.kill(os.getpid(), signal.SIGKILL) if worker.steps == 8 else None)


def patch(value: Any, name: str, act: Callable[[], object]) -> None:
    vars(value)[name] = before(act, getattr(value, name))


def fails(worker: Worker, start: int) -> None:
    def fail() -> None:
        if worker.steps == 4:
            raise ValueError("rank 1 has had enough")

    if worker.rank.index == 1:
        patch(worker, "step", fail)


def slow(worker: Worker, start: int) -> None:
    patch(worker, "step", lambda: time.sleep(0.1))


# -- the agent ---------------------------------------------------------------------------------------------------------


def start(build: Path, number: int, how: str, options: list[str], log: Path, act: Callable[[list[int]], None]) -> Any:
    """Exit statuses of the ranks in their order, and the seconds from the first one that failed to the last."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    attempt = log.parent / "attempts" / log.stem / str(number)
    ranks = []
    for rank in range(WORLD):
        (attempt / str(rank)).mkdir(parents=True)
        ranks.append(pid := os.fork())
        if not pid:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RESTART_COUNT=str(number),
                TORCHELASTIC_MAX_RESTARTS="9", TORCHELASTIC_ERROR_FILE=str(attempt / str(rank) / "error.json"),
            )  # fmt: skip
            os.environ.update({HOW: how, "TORCH_CPP_LOG_LEVEL": "ERROR"})  # the store is rank 0's, and ends with it
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
            torch.set_num_threads(1)
            sys.argv = [str(build / "launch.py"), *options]
            runpy.run_path(sys.argv[0], run_name="__main__")
            sys.stdout.flush()
            os._exit(0)
    act(ranks)
    codes: dict[int, int] = {}
    failed = 0.0
    while len(codes) < len(ranks):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] and not failed:
            failed = time.monotonic()
            for other in set(ranks) - codes.keys():
                os.kill(other, signal.SIGTERM)
    return [codes[pid] for pid in ranks], time.monotonic() - failed if failed else 0.0


def scenarios(build: Path, folder: Path) -> Iterator[tuple[str, Any]]:
    def starts(
        name: str, numbers: range, how: str, *more: str, act: Callable[[list[int]], None] = lambda _: None
    ) -> Any:
        options = ["--steps", str(STEPS), "--data", "tests.support.restarted:data", "--save-every", str(EVERY)]
        options += ["--checkpoints", str(folder / name), "--save", str(folder / f"{name}.pt"), *more]
        return [start(build, number, how, options, folder / f"{name}.log", act) for number in numbers]

    yield "undisturbed", starts("undisturbed", range(1), "")
    yield "killed", starts("killed", range(4), "killed")
    os.environ["SPLITC_MEMORY"] = str(folder / "memory")
    (folder / "memory").mkdir()
    yield "copied", starts("copied", range(2), "copied", "--neighbour-copy", "5", "--save-every", "100")
    yield "fails", starts("fails", range(4), "fails")
    yield "wrong", starts("wrong", range(2), "", "--eval-data", "tests.support.restarted:data_of_nobody")

    def terminate(ranks: list[int]) -> None:
        log = folder / "stopped.log"
        while "step 4 " not in (log.read_text() if log.exists() else ""):
            time.sleep(0.01)
        os.kill(ranks[1], signal.SIGTERM)

    yield "stopped", [*starts("stopped", range(1), "slow", act=terminate), *starts("stopped", range(1, 2), "")]


if __name__ == "__main__":
    assert launching
    found = dict(scenarios(Path(sys.argv[1]), Path(sys.argv[2])))
    (Path(sys.argv[2]) / "found.json").write_text(json.dumps(found))
