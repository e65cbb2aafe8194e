"""What a step of a rank needs in memory, found by running its generated program on tensors without memory.

The very code that will train runs, on one rank alone: parameters and batch are fake tensors, and a transport without
peers takes what is sent and says that all else has arrived.  What is alive is counted storage by storage
(`live_storage`), so all that generated code does is in it: copies of buckets, gathered turns, casts of weights,
what the variables of a forward keep until it returns.

It is what a CPU needs, and a GPU where torch saves the same there.  An LSTM is counted step by step, as torch runs it
without oneDNN or cuDNN, whose workspaces for it cannot be seen; oneDNN's is about twice as large.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from splitc.codegen.rank_file import rank_file, served_file
from splitc.codegen.role_file import part_file
from splitc.cost_models.memory.live_storage import HELD, SAVED, TRAVELS, WORKING, Alive
from splitc.cost_models.memory.memory import RankMemory
from splitc.cost_models.memory.null_transport import NullTransport
from splitc.errors import CostError
from splitc.ir.interpreter import mode_of, quiet
from splitc.ir.program import Program
from splitc.runtime.launch.loader import load_rank
from splitc.runtime.worker import Worker


def memory_of(program: Program, rank: int, optimizer_copies: int = 1, accumulate: int = 1) -> RankMemory:
    """The memory of a rank of a rewritten program; nothing for one without work.

    optimizer_copies: of the trained parameters, in the optimizer's state; from two on, as torch's optimizers of that
    kind do, it counts the steps of each parameter besides.  accumulate: batches to an update.
    Raises CostError when the step cannot be run so.
    """
    if all(rank not in part.ranks for part in program.rank_programs):
        return RankMemory(0, 0, 0, 0, 0, most=0)
    try:
        with ThreadPoolExecutor(1) as alone:  # where no autocast and no no_grad is on, as there may be here
            return alone.submit(_followed, program, rank, optimizer_copies, accumulate).result()
    except (RuntimeError, NotImplementedError) as error:
        raise CostError(
            f"the memory of rank {rank} of {program.name} is not known, since its step does not run on tensors without "
            f"memory: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error


@contextmanager
def _without_onednn() -> Iterator[None]:
    """On fake tensors oneDNN's recurrent layers would seem to keep nothing."""
    (before, *_) = torch.backends.mkldnn.set_flags(_enabled=False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before)


def _followed(program: Program, rank: int, optimizer_copies: int, accumulate: int) -> RankMemory:
    """As many steps as make an update, on fake tensors."""
    with mode_of(program.root), quiet(), _without_onednn():
        return _steps(program, rank, optimizer_copies, accumulate)


def _steps(program: Program, rank: int, optimizer_copies: int, accumulate: int) -> RankMemory:
    alive = Alive()
    updates = _Updates(alive, optimizer_copies)
    transport = NullTransport(rank, program.required_plan, lambda tensors: alive.mark(tensors, TRAVELS))
    worker = Worker(_module(program, rank), transport, _weights(program), {}, updates.optimizer, accumulate=accumulate)
    updates.stage = worker.stage
    parameters, buffers = list(worker.stage.parameters()), list(worker.stage.buffers())
    batch = _batch(program, rank)
    alive.mark([*parameters, *buffers], HELD)
    alive.mark(batch, WORKING)
    with alive:
        for _ in range(accumulate):
            worker.step(*batch)
    updates.note_gradients()
    return RankMemory(
        parameters=_nbytes(parameters),
        gradients=updates.gradients,
        optimizer_state=updates.state,
        activations=alive.most[SAVED],
        communication=alive.most[TRAVELS],
        buffers=_nbytes(buffers),
        most=updates.state + max(alive.peak, updates.most),
    )


def _module(program: Program, rank: int) -> Any:
    """The generated module of a rank."""
    part = program.rank_program(rank)
    files = {f"{part.name}.py": part_file(program, part), f"rank{rank}.py": rank_file(program, rank)}
    if program.required_plan.servers:
        files["served.py"] = served_file(program)
    return load_rank(files, rank)


def _weights(program: Program) -> dict[str, Tensor]:
    """The model's fake parameters and buffers, under all their names."""
    found = {}
    for holding in program.tensors.values():
        path, _, attribute = holding.name.rpartition(".")
        tensor = getattr(program.root.get_submodule(path), attribute)
        found.update(dict.fromkeys((holding.name, *holding.names), tensor))
    return found


def _batch(program: Program, rank: int) -> list[Tensor]:
    """What the rank reads for a step."""
    plan = program.required_plan
    if rank not in plan.roles[plan.reader]:
        return []
    examples = plan.batch(plan.reader, rank)
    return [torch.empty(i.spec.at(examples), dtype=i.spec.dtype) for i in program.inputs]


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class _Updates:
    """Stands in for the optimizers of a rank, and notes what there is when they step.

    gradients: the most bytes that parameters had in `.grad`.  most: alive while an optimizer steps, without its state.
    """

    def __init__(self, alive: Alive, copies: int) -> None:
        self._alive, self._copies = alive, copies
        self.stage = nn.Module()
        self.gradients = 0
        self.most = 0
        self._trained: set[nn.Parameter] = set()
        self._stepped: set[nn.Parameter] = set()

    @property
    def state(self) -> int:
        """Bytes of the optimizers' state: of the parameters that had a gradient."""
        count = torch.get_default_dtype().itemsize if self._copies > 1 else 0
        return sum(self._copies * parameter.nbytes + count for parameter in self._stepped)

    def optimizer(self, named: Sequence[tuple[str, nn.Parameter]]) -> Any:
        """An optimizer of these parameters."""
        parameters = [parameter for _, parameter in named]
        self._trained.update(parameters)
        return _Optimizer(self, parameters)

    def step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note what an update of `parameters` finds, and what it takes for a moment.

        Adam and its like make a copy of all of them at once on a GPU, and two of one after the other on a CPU; weight
        decay that is added to gradients, and not to parameters, would take one more.
        """
        self.note_gradients()
        stepping = [parameter for parameter in parameters if parameter.grad is not None]
        self._stepped.update(stepping)
        sizes = [parameter.nbytes for parameter in stepping]
        made = max(sum(sizes), 2 * max(sizes, default=0)) if self._copies > 1 else 0
        self.most = max(self.most, self._alive.total + made)

    def note_gradients(self) -> None:
        """Note what parameters have in `.grad` now."""
        parameters = {*self._trained, *self.stage.parameters()}
        self.gradients = max(self.gradients, _nbytes(p.grad for p in parameters if p.grad is not None))


class _Optimizer:
    """One of the optimizers that are stood in for."""

    def __init__(self, updates: _Updates, parameters: Sequence[nn.Parameter]) -> None:
        self._updates, self._parameters = updates, parameters

    def step(self) -> None:
        self._updates.step(self._parameters)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
