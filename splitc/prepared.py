"""`splitc.prepare`: from the objects of a DistributedDataParallel script to a worker and its batches."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

from torch import nn
from torch.utils.data import DataLoader

from splitc.api import compile
from splitc.capture.example.example import Loss
from splitc.compiled import Factory
from splitc.deferred import DeferredProgram
from splitc.errors import ArgumentError, LaunchError
from splitc.ir.decode import Limit, typed
from splitc.runtime.launch.failures import guard_script
from splitc.runtime.loader import Loader, taken_over
from splitc.runtime.transport.distributed import init, started_world
from splitc.runtime.worker import Worker

_Loader = Annotated[DataLoader[Any], Limit(lambda loader: True, "of torch; worker.loader takes datasets")]


@typed
def prepare(model: nn.Module, optimizer: Factory, loss: Loss, loader: _Loader, **options: Any) -> tuple[Worker, Loader]:
    """Compile a model for the processes that torchrun started, and divide its data among them.  Collective.

    The global batch is that of DistributedDataParallel, the loader's batch times the number of processes, divided among
    those that read data.  Rank 0 compiles on the first batch.

    model: on the CPU; a copy on a GPU would stay there beside what the rank trains.
    optimizer: makes the optimizer of the named parameters that it is given.
    loss: a function of (output, target), or of the output alone; None where the model returns it.
    loader: a plain DataLoader, whose batches are the inputs, followed by the targets that the loss takes.
    options: of `compile` (cluster, strategy, pins, global_batch, ...) and of its worker (clip_norm, accumulate,
    backend, device, ...).  seed: also of the order of the examples.

    Raises LaunchError outside torchrun.
    """
    if started_world():
        guard_script()
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise LaunchError("prepare takes the plain model, without DistributedDataParallel around it")
    of_compile = inspect.signature(compile).parameters.keys() - {"world", "example", "target", "plan", "watch"}
    made_here = {"program", "transport", "weights", "keys"}
    of_worker = {*inspect.signature(Worker).parameters, "backend", "device"} - made_here
    if unknown := [name for name in options if name not in of_compile | of_worker]:
        raise ArgumentError(f"prepare has no option {', '.join(unknown)}; {', '.join(sorted(of_compile | of_worker))}")
    batch = taken_over(loader)[1]["batch_size"]
    world = started_world() or init().world
    asked = {"global_batch": batch * world, "loss": loss}
    asked |= {name: given for name, given in options.items() if name in of_compile}
    program = compile(model, world, **asked)
    assert isinstance(program, DeferredProgram)
    worker = program.worker(optimizer, **{name: options[name] for name in options if name in of_worker})
    batches = worker.loader(loader, seed=options.get("seed", 0))
    return worker.ready, batches
