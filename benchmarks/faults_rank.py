"""What the ranks of `benchmarks.faults` train on, and the fault that one of them meets, once in a run.

FAULT in the environment is the folder of the run, the fault, the rank and the moment; the folder gets word of it.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

from splitc.runtime.transport.sealed import TOKEN
from splitc.runtime.worker import Worker

AT = 5  # the step from which on the fault is met
PAUSE = 0.1  # seconds by which a step is longer where ranks are killed again and again
EXCHANGES = "isend", "irecv", "exchange", "all_reduce", "all_gather", "reduce_scatter", "broadcast"


def images(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(number, 1, 8, 8, generator=generator), torch.randint(0, 5, (number,), generator=generator)


def held_out(worker: Worker) -> TensorDataset:
    return TensorDataset(*images(48))


def data(worker: Worker) -> TensorDataset:
    """The examples; before that the fault is prepared, or the disk that is full gets room again."""
    folder, fault, rank, moment = os.environ["FAULT"].split("|")
    planted = Path(folder, "planted")
    if every := float(os.environ.get("FAULT_EVERY", 0)):
        patch(worker, "step", lambda *_: time.sleep(PAUSE))
        until, index = float(os.environ["FAULT_UNTIL"]), worker.rank.index
        threading.Thread(target=die, args=(every, until, index, worker.rank.spec.world), daemon=True).start()
    if planted.exists() and planted.read_text() != os.environ[TOKEN]:  # that of another start
        with suppress(FileExistsError):
            Path(folder, "again").touch(exist_ok=False)
        Path(folder, "disk", "filler").unlink(missing_ok=True)
    elif rank == str(worker.rank.index):
        prepare(worker, moment, lambda: None if planted.exists() else meet(fault, planted))
    return TensorDataset(*images(96))


def die(every: float, until: float, rank: int, world: int) -> None:
    """Kill one rank, drawn anew, at each multiple of `every` seconds of the clock."""
    while (at := (time.time() // every + 1) * every) < until:
        time.sleep(at - time.time())
        if random.Random(at).randrange(world) == rank:
            os.kill(os.getpid(), signal.SIGKILL)


def meet(fault: str, planted: Path) -> None:
    """Do it; `planted` is the file that tells so, and never empty."""
    partial = planted.with_suffix(".partial")
    partial.write_text(os.environ[TOKEN])
    partial.replace(planted)
    disk = planted.parent / "disk"
    if fault == "torn file":
        *_, last = sorted((disk / "run").glob("step-*[0-9]"))
        file = max(last.glob("*.distcp"), key=lambda path: path.stat().st_size)
        os.truncate(file, file.stat().st_size // 2)
    if fault in ("kill", "torn file"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "exception":
        raise ValueError("an exception was planted")
    elif fault == "disk full":
        with suppress(OSError), (disk / "filler").open("wb", 0) as filler:
            while True:
                filler.write(bytes(4096))
    else:
        time.sleep(2.0)  # meanwhile the line is changed


def prepare(worker: Worker, moment: str, act: Callable[[], object]) -> None:
    """Let `act` be called in a moment, from step AT on."""
    begun: list[bool] = []

    def later(*_: Any) -> None:
        if any(begun) and (moment != "checkpoint" or worker.steps > AT):  # else it may be one that was begun before AT
            act()

    calls: dict[str, list[tuple[Any, str]]] = {
        "exchange": [(worker.rank.transport, name) for name in EXCHANGES],
        "checkpoint": [(checkpoint.FileSystemWriter, "write_data")],  # type: ignore[attr-defined]
        "evaluation": [(worker, "evaluate")],
    }
    if moment == "start":
        act()
        return
    patch(worker, "step", lambda *_: begun.append(worker.steps + 1 >= AT))
    for value, name in calls.get(moment, ()):
        patch(value, name, later)
    if moment == "forward":
        register_module_forward_pre_hook(later)
    elif moment == "optimizer":
        register_optimizer_step_pre_hook(later)


def patch(value: Any, name: str, act: Callable[..., object]) -> None:
    call = getattr(value, name)

    def both(*given: Any, **options: Any) -> Any:
        act(*given)
        return call(*given, **options)

    setattr(value, name, both)
