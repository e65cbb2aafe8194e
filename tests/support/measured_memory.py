"""What ranks really have in memory during a step: threads of this process, or processes under torchrun."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _disable_current_modes

from splitc.compiled import CompiledProgram
from splitc.cost_models.memory.live_storage import HELD, SAVED, LiveStorage
from splitc.runtime.launch.feed import synthetic
from splitc.runtime.launch.main import load_worker
from splitc.runtime.launch.torchrun import torchrun
from splitc.runtime.transport import simulated
from splitc.runtime.transport.distributed import init
from splitc.runtime.transport.simulated import run_ranks
from splitc.runtime.worker import Worker
from tests.support.ranks import sgd, worker_of


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank.  saved: the most that autograd had saved at once.  peak: alive at once, or on a GPU allocated.

    gradients: the most that there were when an optimizer stepped, or at the end.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    saved: int
    peak: int


def measured(program: CompiledProgram, optimizer: Any = sgd, accumulate: int = 1) -> list[Measured]:
    """Every rank of a program, on threads, without the copies of messages that threads make for each other."""
    world = program.plan.world
    with ExitStack() as patched:
        for name in ("_snapshot", "_sum", "_maximum"):
            patched.enter_context(patch.object(simulated, name, _unseen(getattr(simulated, name))))
        return run_ranks(world, lambda t: follow(worker_of(program, t, optimizer, accumulate=accumulate), accumulate))


def _unseen(function: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """The function, of whose tensors `LiveStorage` learns nothing: who frees them, and when, is a matter of timing."""

    def call(given: Any) -> Tensor:
        with _disable_current_modes():
            return function(given)

    return call


def in_processes(program: CompiledProgram, folder: Path) -> list[Measured]:
    """Every rank of a program in a process of its own, under SGD with momentum."""
    program.save(folder)
    done = torchrun(
        ["-m", "tests.support.measured_memory", str(folder), str(program.plan.world)], program.plan.world, quiet=True
    )
    assert not done.returncode, done.stderr
    return [Measured(**json.loads((folder / f"{rank}.json").read_text())) for rank in range(program.plan.world)]


def follow(worker: Worker, accumulate: int = 1) -> Measured:
    """An update of a rank that has made one before, so that its optimizer has its state."""
    batches = synthetic(worker.rank.spec)
    for _ in range(accumulate):
        worker.step(*next(batches))
    parameters, buffers = list(worker.stage.parameters()), list(worker.stage.buffers())
    trained = [p for o in worker._optimizers.values() for group in o.param_groups for p in group["params"]]
    state = [
        t for o in worker._optimizers.values() for kept in o.state.values() for t in kept.values() if _is_tensor(t)
    ]
    found = [0]

    def note(*_: Any) -> None:
        found.append(_nbytes(p.grad for p in {*parameters, *trained} if p.grad is not None))

    for each in worker._optimizers.values():
        each.register_step_pre_hook(note)
    batch = [tensor.to(worker.rank.transport.device) for tensor in next(batches)]
    if worker.rank.transport.device.type == "cuda":
        saved, peak = 0, _allocated(worker, batch, accumulate)
    else:
        saved, peak = _alive(worker, batch, accumulate, [*parameters, *buffers, *state])
    note()
    return Measured(_nbytes(parameters), _nbytes(buffers), max(found), _nbytes(state), saved, peak)


def _alive(worker: Worker, batch: list[Tensor], steps: int, held: list[Tensor]) -> tuple[int, int]:
    for parameter in worker.stage.parameters():
        parameter.grad = None
    alive = LiveStorage()
    alive.mark(held, HELD)
    alive.mark(batch, "working")
    with alive:
        for _ in range(steps):
            worker.step(*batch)
    return alive.most[SAVED], alive.peak


def _allocated(worker: Worker, batch: list[Tensor], steps: int) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        worker.step(*batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def allocator_peak(program: CompiledProgram, optimizer: Any = sgd) -> int:
    """Bytes that the CPU's allocator had handed out at once in a step of the only rank, kernels' own among them."""

    def run(transport: Any) -> int:
        worker = worker_of(program, transport, optimizer)
        batches = synthetic(worker.rank.spec)
        worker.step(*next(batches))
        batch = next(batches)
        for parameter in worker.stage.parameters():
            parameter.grad = None
        gc.collect()
        state = [t for kept in worker.optimizer.state.values() for t in kept.values() if _is_tensor(t)]  # type: ignore[union-attr]
        now = most = _nbytes([*worker.stage.parameters(), *worker.stage.buffers(), *batch, *state])
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            worker.step(*batch)
        for change in sorted(_changes(seen)):
            now += change[1]
            most = max(most, now)
        return most

    return run_ranks(1, run)[0]


def _changes(seen: Any) -> Iterator[tuple[int, int]]:
    """(when, bytes) of everything that was allocated or freed."""
    for k, event in enumerate(seen.profiler.kineto_results.events()):
        if event.name() == "[memory]":
            yield event.start_ns() * 10**6 + k, event.nbytes()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


if __name__ == "__main__":
    build, ranks = Path(sys.argv[1]), int(sys.argv[2])
    this = load_worker(build, init(ranks), sgd)
    (build / f"{this.rank.index}.json").write_text(json.dumps(asdict(follow(this))))
    this.rank.transport.close()
