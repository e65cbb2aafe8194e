"""A program that compiles on the first batch of its worker, as torch.compile does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from splitc import units
from splitc.capture.example.division import Batch
from splitc.capture.example.example import LOSS, Example, Inputs, Loss, inputs_and_target
from splitc.compiled import CompiledProgram, Factory, compile_example
from splitc.cost_models.calibration.calibrate import measured_among
from splitc.cost_models.calibration.rank_timer import no_progress
from splitc.cost_models.clusters.named import is_this_machine
from splitc.errors import LaunchError
from splitc.ir.decode import typed
from splitc.ir.plan import Plan
from splitc.runtime.launch.loader import of_rank_0
from splitc.runtime.loader import Loader, taken_over
from splitc.runtime.progress import Step
from splitc.runtime.transport.agreement import agreed
from splitc.runtime.transport.base import Transport
from splitc.runtime.transport.meeting import Call, join
from splitc.runtime.weights import first_names
from splitc.runtime.worker import Worker
from splitc.specialise import Settings


class DeferredProgram:
    """Returned by `splitc.compile` without an example: it has a worker, but no plan yet."""

    def __init__(
        self, model: nn.Module, loss: Loss, settings: Settings, name: str | None, call: Call, batch: Batch = None
    ) -> None:
        self._model, self._loss, self._settings, self._name = model, loss, settings, name
        self._call, self._batch = call, batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(CompiledProgram, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise LaunchError(
            f"program.{name} needs a compiled program: give compile() an example, or train through "
            f"program.worker(...), which compiles on its first batch"
        )

    @typed
    def compile(self, batch: Inputs) -> CompiledProgram:
        """Compile on one reader's batch: the inputs, followed by the targets that a loss takes, most often one.

        The inputs may be a dict of keyword arguments, as in `compile`.
        """
        inputs, target = batch, None
        if self._loss is not None:
            inputs, target = inputs_and_target(self._model, self._loss, batch)
        example = Example.bind(self._model, inputs, target, self._loss, self._batch)
        return compile_example(self._model, example, self._settings, name=self._name)

    @typed
    def worker(
        self,
        optimizer: Factory,
        clip_norm: float | None = None,
        accumulate: int | None = None,
        seed: int = 0,
        backend: str | None = None,
        device: str | None = None,
        **options: Any,
    ) -> DeferredWorker:
        """Make the worker of this process, inside torchrun; it compiles on the first batch.  Collective."""
        transport = join(self._settings.world, backend, device, self._call)
        options |= {"clip_norm": clip_norm, "accumulate": accumulate}
        make = partial(Worker, keys=first_names(self._model.state_dict()), optimizer=optimizer, seed=seed, **options)
        return DeferredWorker(self, transport, make)


class DeferredWorker:
    """A worker that compiles on the first batch: rank 0 plans, and broadcasts programs and weights.

    The other ranks wait as for any message: planning for longer than SPLITC_TIMEOUT seconds needs a larger timeout.
    make: Worker with all arguments but program, transport and weights.
    """

    def __init__(self, program: DeferredProgram, transport: Transport, make: Callable[..., Worker]) -> None:
        self._program, self._transport, self._make = program, transport, make
        self._worker: Worker | None = None

    def step(self, *batch: Any, **named: Any) -> Tensor:
        """Run one training step; the first one takes a batch on every rank and compiles on that of rank 0."""
        if self._worker is None:
            given = (*batch, named) if named else batch
            self._start([given[0] if len(given) == 1 and isinstance(given[0], Mapping) else given])
            batch, named = (batch, named) if self.data_rank is not None else ((), {})
        return self.ready.step(*batch, **named)

    def shard(self, dataset: Any, batch_size: int, **options: Any) -> Iterator[tuple[Tensor, ...]]:
        """As `Worker.shard`; the first call is collective, and rank 0 compiles on the first batch of the dataset."""
        self._start_on(dataset, batch_size, options)
        return self.ready.shard(dataset, batch_size, **options)

    def loader(self, dataset: Any, batch_size: int | None = None, **options: Any) -> Loader:
        """As `Worker.loader`; the first call is collective, and rank 0 compiles on the first batch of the dataset.

        Batches of a DataLoader are as compiled where `compile` was given a global batch.
        """
        if isinstance(dataset, DataLoader):
            dataset, given = taken_over(dataset)
            own_size, options = given.pop("batch_size"), {**options, **given}
            self._start_on(dataset, batch_size or own_size, options)
            batch_size = batch_size or (None if self._program._settings.global_batch else own_size)
        self._start_on(dataset, batch_size, options)
        return self.ready.loader(dataset, batch_size, **options)

    def _start_on(self, dataset: Any, batch_size: int | None, options: Mapping[str, Any]) -> None:
        if self._worker is None:
            if batch_size is None:
                raise LaunchError("the program compiles on the first batch; give batch_size=, a reader's examples")
            self._start(DataLoader(dataset, batch_size=batch_size, collate_fn=options.get("collate_fn")))

    @property
    def ready(self) -> Worker:
        """The worker of the compiled program.  Raises LaunchError before the first batch."""
        if self._worker is None:
            raise LaunchError(
                "the program is not compiled yet: take batches from worker.loader(dataset, batch_size=...) first, or "
                "give compile() an example"
            )
        return self._worker

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.ready, name)

    def _start(self, batches: Iterable[Any]) -> None:
        """Compile on rank 0's first batch, and tune on those of all ranks.  An error of one is raised on every rank."""
        transport, settings = self._transport, self._program._settings
        if transport.broadcast_object(is_this_machine(settings.cluster)):
            measured = measured_among(transport, _say if transport.rank == 0 else no_progress)
            self._program._settings = replace(settings, cluster=measured or settings.cluster)
        if settings.tune:
            patient = transport.side_group() if transport.waits_hold_the_stream else None
            with agreed(patient or transport, "compile the program"):
                program = self._program.compile(_first(batches)).validated()
            self._worker = program.worker_on(transport, self._make)
            return

        def compiled() -> tuple[dict[str, str], Iterator[dict[str, Tensor]]]:
            with Step(f"compiling {type(self._program._model).__name__}", quiet=False):
                made.append(self._program.compile(_first(batches)).validated())
            _say(_chosen(made[0].plan))
            return made[0].files, made[0].parts()

        made: list[CompiledProgram] = []
        part, held = of_rank_0(self._transport, compiled, {"model": self._program._model, LOSS: self._program._loss})
        self._worker = self._make(part, self._transport, held)
        for program in made:
            program.followed(self._worker)


def _chosen(plan: Plan) -> str:
    """`hybrid_single on 2 ranks (all x 2), plan 1a2b, 324 ms a step on v100-10gbe`."""
    roles = ", ".join(f"{role} x {len(ranks)}" for role, ranks in plan.roles.items())
    step = units.seconds(plan.step_seconds)
    chosen = f"{plan.strategy} on {units.numbered(plan.world, 'rank')} ({roles}), plan {plan.hash}"
    return f"{chosen}, {step} a step predicted on {plan.prediction.cluster}"


def _say(text: str) -> None:
    print(f"splitc: {text}", file=sys.stderr, flush=True)


def _first(batches: Iterable[Any]) -> Any:
    for batch in batches:
        return batch
    raise LaunchError("the dataset is empty: there is no first batch to compile on")
