"""A program that compiles on the first batch its worker sees, as torch.compile does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from splitc.api import CompiledProgram, Settings, compile_example
from splitc.capture import Loss
from splitc.errors import LaunchError, SplitcError
from splitc.runtime.data import as_tuple
from splitc.runtime.distributed import init
from splitc.runtime.loader import load_rank
from splitc.runtime.transport import Transport
from splitc.runtime.worker import OptimizerFactory, Worker


class DeferredProgram:
    """What `splitc.compile(model, world=N)` returns without an example: it has a worker, and no plan yet."""

    def __init__(self, model: nn.Module, loss: Loss, settings: Settings, name: str | None) -> None:
        self._model, self._loss, self._settings, self._name = model, loss, settings, name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(CompiledProgram, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise LaunchError(f"program.{name} needs a compiled program: give compile() an example, or train through "
                          f"program.worker(...), which compiles on its first batch")

    def compile(self, batch: tuple[Tensor, ...]) -> CompiledProgram:
        """Compile on one reader's batch: inputs, then the target when there is a loss function."""
        if self._loss is None:
            return compile_example(self._model, batch, None, None, self._settings, name=self._name)
        if len(batch) < 2:
            raise LaunchError(f"the first batch has {len(batch)} tensor; with a loss it must hold the inputs and the target")
        return compile_example(self._model, batch[:-1], batch[-1], self._loss, self._settings, name=self._name)

    def worker(self, optimizer: OptimizerFactory, clip_norm: float | None = None, accumulate: int = 1, seed: int = 0,
               backend: str | None = None) -> DeferredWorker:
        """This process's part of training, inside torchrun; it compiles on the first batch."""
        transport = init(self._settings.world, backend)
        return DeferredWorker(self, transport, optimizer,
                              {"clip_norm": clip_norm, "accumulate": accumulate, "seed": seed}, list(self._model.state_dict()))


class DeferredWorker:
    """A worker that is made on the first batch.  Rank 0 plans, and gives plan, programs and weights to the others."""

    def __init__(self, program: DeferredProgram, transport: Transport, optimizer: OptimizerFactory,
                 options: Mapping[str, Any], keys: list[str]) -> None:
        self._program, self._transport, self._factory = program, transport, optimizer
        self._options, self._keys = options, keys
        self._worker: Worker | None = None

    def step(self, *batch: Tensor) -> Tensor:
        """One training step; the first one takes its whole batch on every rank, compiles on it, and uses its own part."""
        if self._worker is None:
            self._start(batch)
            batch = batch if self.data_rank is not None else ()
        return self._ready.step(*batch)

    def shard(self, dataset: Any, batch_size: int, **options: Any) -> Iterator[tuple[Tensor, ...]]:
        """As `Worker.shard`; looks at the dataset's first batch on every rank to compile."""
        if self._worker is None:
            from torch.utils.data import DataLoader

            loader = DataLoader(dataset, batch_size=batch_size, collate_fn=options.get("collate_fn"))
            self._start(as_tuple(next(iter(loader))))
        return self._ready.shard(dataset, batch_size, **options)

    @property
    def _ready(self) -> Worker:
        if self._worker is None:
            raise LaunchError("the program is not compiled yet: take batches from worker.shard(dataset, batch_size=...) first, "
                              "or give compile() an example")
        return self._worker

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._ready, name)

    def _start(self, batch: tuple[Tensor, ...]) -> None:
        parts: list[Any] | None = None
        if self._transport.rank == 0:
            try:
                compiled = self._program.compile(batch)
                parts = list(compiled.parts())
            except SplitcError as error:  # every rank must learn of it, or the others wait for their part
                parts = [error] * self._transport.world
        given = self._transport.scatter_objects(parts)
        if isinstance(given, SplitcError):
            raise given
        files, weights = given
        self._worker = Worker(load_rank(files, self._transport.rank), self._transport, weights, self._keys, self._factory,
                              **self._options)
