"""Measure the memory of a rank's step by running its generated program on fake tensors.

The generated code itself runs, for a single rank, an update, and what begins and ends a round: parameters and batch
are fake tensors, and `NullTransport` completes every message.  `live_storage` tracks each storage, so everything that
the generated code allocates is included: copies of buckets, gathered microbatches, casts of weights, local variables of
a forward until it returns.

The result holds for a CPU, and for a GPU where torch saves the same tensors.  An LSTM is counted step by step, as torch
runs it without oneDNN or cuDNN, whose workspaces are invisible here; oneDNN's is about twice as large.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from splitc.capture.example.example import LOSS
from splitc.codegen.features import features
from splitc.codegen.rank_file import rank_file
from splitc.codegen.role_file import role_file
from splitc.cost_models.memory.live_storage import HELD, SAVED, TRAVELS, WORKING, LiveStorage
from splitc.cost_models.memory.memory import RankMemory
from splitc.cost_models.memory.null_transport import NullTransport
from splitc.errors import CostError
from splitc.ir.fake_mode import KERNELS
from splitc.ir.interpreter import mode_of, quiet
from splitc.ir.program import LoweredProgram, PlacedProgram, Program
from splitc.ir.wire import nbytes_trained
from splitc.runtime.launch.loader import load_rank
from splitc.runtime.worker import Worker


def memory_of(
    program: LoweredProgram, rank: int, optimizer_copies: int = 1, accumulate: int | None = None
) -> RankMemory:
    """Return the memory of a rank of a lowered program; zero for a rank without work.

    optimizer_copies: copies of the trained parameters in the optimizer state; from two on a step counter for each
    parameter is added, as torch's Adam has.  accumulate: batches for each update; None: as planned, two for more.
    Raises CostError when the step does not run on fake tensors.
    """
    accumulate = accumulate or min(program.plan.accumulate, 2)
    if all(rank not in part.ranks for part in program.rank_programs):
        return RankMemory(0, 0, 0, 0, 0, 0, peak=0)
    try:
        with ThreadPoolExecutor(1) as thread:  # a new thread: the caller's may be under autocast or no_grad
            return thread.submit(_measure, program, rank, optimizer_copies, accumulate).result()
    except (RuntimeError, NotImplementedError) as error:
        raise CostError(
            f"the memory of rank {rank} of {program.name} is unknown, since its step does not run on fake tensors: "
            f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Disable oneDNN, whose recurrent layers appear to save nothing on fake tensors."""
    with KERNELS:
        (before, *_) = torch.backends.mkldnn.set_flags(_enabled=False)  # `flags` warns of TF32 without Intel's GPUs
        try:
            yield
        finally:
            torch.backends.mkldnn.set_flags(_enabled=before)


def _measure(program: LoweredProgram, rank: int, optimizer_copies: int, accumulate: int) -> RankMemory:
    """Run the steps of one update on fake tensors."""
    with mode_of(program.root), quiet(), _without_onednn():
        return _steps(program, rank, optimizer_copies, accumulate)


def _steps(program: LoweredProgram, rank: int, optimizer_copies: int, accumulate: int) -> RankMemory:
    live = LiveStorage()
    updates = _Updates(live, optimizer_copies, program.plan.deals)
    transport = NullTransport(rank, program.plan, lambda tensors: live.mark(tensors, TRAVELS))
    module, weights, make = _module(program, rank), _weights(program), cast(Any, partial(_Optimizer, updates))
    worker = Worker(module, transport, weights, {}, make, accumulate=accumulate, elementwise=True)
    parameters, buffers = list(worker.stage.parameters()), list(worker.stage.buffers())
    updates.watched.update(parameters)
    batch = _batch(program, rank)
    live.mark([*parameters, *buffers], HELD)
    live.mark(batch, WORKING)
    if program.plan.deals:  # slices are held as parameters are
        begin = module.begin_round
        module.begin_round = lambda *given: live.mark([begin(*given), *parameters][1:], HELD)
    with live:
        for _ in range(2 if program.plan.deals else 1):  # from the second round on the optimizer's state is dealt too
            for _ in range(accumulate):
                worker.step(*batch)
            worker.end_round()
    updates.note_gradients()
    dealt = [(stage, name) for stage in program.stages for name in stage.dealt if program.tensors[name].parameter]
    slices = sum(nbytes_trained(program, *each, rank) for each in dealt)
    return RankMemory(
        parameters=_nbytes(parameters) + slices,
        gradients=updates.gradients,
        optimizer_state=updates.state + optimizer_copies * slices,
        activations=live.most[SAVED],
        communication=live.most[TRAVELS],
        buffers=_nbytes(buffers),
        peak=max(live.peak, updates.most) + (0 if program.plan.deals else updates.state),
    )


def _module(program: LoweredProgram, rank: int) -> Any:
    """Return the generated module of a rank."""
    part = program.rank_program(rank)
    files = {f"{part.name}.py": role_file(program, part), f"rank{rank}.py": rank_file(program, rank)}
    for feature in features():
        files |= feature.files(program)
    return load_rank(files, rank, {"model": program.root, LOSS: program.root._modules.get(LOSS)})


def _weights(program: Program) -> dict[str, Tensor]:
    """Return the model's fake parameters and buffers, under all their names."""
    found = {}
    for state in program.tensors.values():
        path, _, attribute = state.name.rpartition(".")
        found.update(dict.fromkeys((state.name, *state.names), getattr(program.root.get_submodule(path), attribute)))
    return found


def _batch(program: PlacedProgram, rank: int) -> list[Tensor]:
    """Return the rank's batch, empty for a rank that reads no data."""
    plan = program.plan
    if rank not in plan.roles[plan.reader]:
        return []
    examples = plan.batch(plan.reader, rank)
    return [torch.empty(i.spec.at(examples), dtype=i.spec.dtype) for i in program.inputs]


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor._values().nbytes if tensor.is_sparse else tensor.nbytes for tensor in tensors)


class _Updates:
    """Replace the optimizers of a rank, and record memory when they step.  dealt: their state travels with slices.

    gradients: peak bytes in `.grad` of those `watched`.  most: peak live bytes during an optimizer step, without the
    optimizer state.
    """

    def __init__(self, live: LiveStorage, copies: int, dealt: bool) -> None:
        self._live, self.copies, self.dealt = live, copies, dealt
        self.gradients = 0
        self.most = 0
        self.watched: set[nn.Parameter] = set()
        self._stepped: set[nn.Parameter] = set()

    @property
    def state(self) -> int:
        """Bytes of the optimizer state of all parameters that were updated."""
        count = torch.get_default_dtype().itemsize if self.copies > 1 else 0
        return sum(self.copies * parameter.nbytes + count for parameter in self._stepped)

    def step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record the memory of an update of `parameters`, with the optimizer's temporaries.

        Adam and its variants copy all parameters at once on a GPU, and make two copies of one parameter at a time on a
        CPU; weight decay that is added to gradients, and not to parameters, would take one copy more.
        """
        self.note_gradients()
        stepping = [parameter for parameter in parameters if parameter.grad is not None]
        self._stepped.update(stepping)
        sizes = [parameter.nbytes for parameter in stepping]
        temporary = max(sum(sizes), 2 * max(sizes, default=0)) if self.copies > 1 else 0
        self.most = max(self.most, self._live.total + temporary)

    def note_gradients(self) -> None:
        """Record the present bytes in `.grad`."""
        self.gradients = max(self.gradients, _nbytes(p.grad for p in self.watched if p.grad is not None))


class _Optimizer:
    """An optimizer that only records."""

    def __init__(self, updates: _Updates, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._updates, self._parameters = updates, [parameter for _, parameter in named]
        updates.watched.update(self._parameters)
        self.param_groups = [{"params": self._parameters}]
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    def step(self) -> None:
        self._updates.step(self._parameters)
        if self._updates.dealt:  # the state travels, so it is there
            for p in (p for p in self._parameters if p.grad is not None and p not in self.state):
                self.state[p] = {f"copy{k}": torch.empty_like(p) for k in range(self._updates.copies)}

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
