"""Count the launches of a step: the kernels that a GPU would start for it, and the bytes that they read and write.

One op that torch dispatches counts as one launch, a foreach or fused op of many tensors too (on a GPU it is one for
each hundred of them).  Views and memory that is only set aside count nothing.  What an op of ours costs its module
says, in `KERNELS`: a function of the op's arguments, by their names, and of what it `made`.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from splitc.compiled import CompiledProgram
from splitc.cost_models.compute.op_bytes import bytes_accessed, name_of
from splitc.cost_models.memory.null_transport import NullTransport
from splitc.runtime.launch.feed import synthetic
from splitc.runtime.transport.base import Work
from splitc.runtime.worker import Worker
from tests.support.ranks import sgd, worker_of

OURS = "splitc::"
DECLARED = "splitc.runtime.seeded.kernels"
"""The module whose `KERNELS` has, for each op of ours, its `launches` and `nbytes`."""


class Launches(TorchDispatchMode):
    """Counts what is dispatched in this thread while it is entered.

    ops: name of an op -> its launches.  nbytes: of all of them.  kernels: name of an op of ours -> what it declares.
    Raises AssertionError for an op of ours that declares nothing.
    """

    def __init__(self, kernels: Mapping[str, Any] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: Counter[str] = Counter()
        self.nbytes = 0.0
        self._kernels = declared() if kernels is None else kernels

    @property
    def number(self) -> int:
        return self.ops.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, nbytes = name_of(func), bytes_accessed(func, args, kwargs or {}, out)
        if name.startswith(OURS):
            name = name.removeprefix(OURS)
            assert name in self._kernels, f"{OURS}{name} is not in KERNELS of {DECLARED}"
            cost = _called(self._kernels[name], func, args, kwargs or {}, out)
            self.ops[name] += cost.launches
            self.nbytes += cost.nbytes
        elif nbytes is not None:
            self.ops[name] += 1
            self.nbytes += nbytes
        return out


def _called(cost: Callable[..., Any], func: Any, args: Any, kwargs: Mapping[str, Any], made: Any) -> Any:
    """What a call of an op costs."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs, "made": made}
    return cost(**{name: given.get(name) for name in signature(cost).parameters})


def declared() -> Mapping[str, Any]:
    """What our ops declare; nothing where there are none."""
    if importlib.util.find_spec(DECLARED) is None:
        return {}
    kernels: Mapping[str, Any] = importlib.import_module(DECLARED).KERNELS
    return {name.removeprefix(OURS): cost for name, cost in kernels.items()}


def launches(run: Callable[[], object]) -> Launches:
    """What a call launches."""
    with Launches() as counted:
        run()
    return counted


def of_step(program: CompiledProgram, rank: int = 0, optimizer: Any = sgd, **options: Any) -> Launches:
    """What the second step of a rank launches, whose messages launch nothing."""
    with alone(program, rank, optimizer, **options) as worker:
        batches = synthetic(worker.rank.spec)
        worker.step(*next(batches))
        batch = next(batches)
        return launches(lambda: worker.step(*batch))


class Echo(NullTransport):
    """Peers who send nothing, and of whom a gather finds the same as this rank gives."""

    def _all_gather(self, outputs: list[Tensor], tensor: Tensor, ranks: tuple[int, ...]) -> Work:
        with _disable_current_modes():
            for output in outputs:
                output.detach().copy_(tensor.detach())
        return super()._all_gather(outputs, tensor, ranks)


@contextmanager
def alone(program: CompiledProgram, rank: int, optimizer: Any, **options: Any) -> Iterator[Worker]:
    """The worker of a rank without peers: what it sends is dropped, what it receives is there at once."""
    transport = Echo(rank, program.plan, lambda tensors: None)
    with torch.random.fork_rng():
        yield worker_of(program, transport, optimizer, **options)
