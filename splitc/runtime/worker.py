"""One rank of a run, as a user holds it: what it trains, the data it reads, its evaluation and its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from . import data
from .errors import LaunchError
from .files import StateFile, beside
from .loader import Loader, Step, taken_over
from .training import Training
from .transport.agreement import agreed
from .whole_state import broadcast_state, in_memory

if TYPE_CHECKING:
    from .checkpoints.run import Checkpoints


class Worker(Training):
    """Trains one rank, evaluates, and saves its state; `Training` says how it is made and steps."""

    def evaluate(self, *batch: Any, **named: Any) -> Tensor:
        """The global loss of one batch in evaluation mode, forward only; buffers are the first replica's.  Collective.

        batch: as `step` takes it; or a `Loader`, for the mean loss over the examples of an epoch.
        It changes nothing but the buffers of the other replicas, which are overwritten.
        Raises LaunchError where the model could not be captured in evaluation mode.
        """
        if self.rank.spec.no_evaluation:
            raise LaunchError(f"the model in evaluation mode could not be compiled: {self.rank.spec.no_evaluation}")
        if len(batch) == 1 and isinstance(batch[0], Loader):
            return self._evaluate_all(batch[0])
        batch = self._checked((*batch, named) if named else batch)
        self.recompute_statistics()
        return self._evaluation.loss(batch, self._context(training=False))

    def predict(self, *inputs: Any, **named: Any) -> Any:
        """What the model returns in evaluation mode for this rank's examples; None where it reads no data.  Collective.

        inputs: those of the model as `step` takes them, by name too; targets may be among them.
        What has no batch dimension is None; a dict or an object comes back as a dict that has its parts as attributes,
        too.  Buffers are those of `evaluate`.
        Raises LaunchError where the model's output could not be compiled.
        """
        self._evaluation.require_output()
        spec = self.rank.spec
        own = data.without_targets((*inputs, named) if named else inputs, spec)
        taken = replace(spec, inputs={name: spec.inputs[name] for name in spec.predicts})
        self.batch_offsets = self.rank.batch_offsets(self._sizes, self._is_tail)
        batch = data.checked(own, taken, self.batch_offsets, self._transport.device)
        self.recompute_statistics()
        return self._evaluation.output(batch, self._context(training=False))

    def loader(
        self,
        dataset: Any,
        batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        **options: Any,
    ) -> Loader:
        """This rank's batches of a dataset, epoch by epoch; checkpoints hold the position.  Collective.

        The readers' batches, concatenated in the order of `data_rank`, are those of one process that reads the whole
        dataset.  Each batch's step comes before the next batch.

        dataset: a Dataset; an IterableDataset, of which each reader reads everything and keeps its examples; or a plain
        DataLoader, which says the rest itself.
        batch_size: examples for each reader; None: as compiled.
        drop_last: False takes in the tail too; if it cannot give every rank an example, with those of the batch before.
        After a change of readers so few may be left that some ranks run a step without any.
        Without shuffle it is for evaluation, and not in checkpoints.
        options: of torch's DataLoader (num_workers, collate_fn, pin_memory).
        """
        with agreed(self._transport, "divide the dataset"):
            loader = self._loader(dataset, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, **options)
        if shuffle or drop_last:
            self.register(loader=loader)
        if self._transport.rank == 0:
            loader.report()
        return loader

    def shard(self, dataset: Any, batch_size: int | None = None, epoch: int = 0, **options: Any) -> Iterator[Any]:
        """This rank's batches of one epoch: inputs, then targets; () on ranks that read no data.  As of `loader`."""
        loader = self._loader(dataset, batch_size, **options)
        loader.set_epoch(epoch)
        return iter(loader)

    def state_dict(self) -> dict[str, Tensor] | None:
        """The whole model's state under its own keys, as copies on rank 0's CPU; None elsewhere.  Collective."""
        self.recompute_statistics()
        whole: dict[str, Tensor] | None = self._state.gather(in_memory)
        return whole

    def load_state_dict(self, state: Mapping[str, Tensor] | None) -> None:
        """Load this rank's part of rank 0's whole `state`; the other ranks' is ignored, None will do.  Collective.

        Raises LaunchError, on every rank and before anything is changed, when keys or shapes are not the model's.
        """
        self.end_round()
        self._forget()
        own = self._state
        own.unheld.update(broadcast_state(self._transport, self.stage, state, own.first_names, own.built))
        if self._averages is not None:
            self._averages.restart()

    def export(self, path: str | Path) -> None:
        """Write the whole model's state into a file for torch.load, while no rank holds the whole.  Collective."""
        self.recompute_statistics()
        aside = beside(Path(path), "partial")
        if self._state.gather(partial(StateFile, aside)) is not None:
            aside.replace(path)
        self._transport.barrier()

    @property
    def steps(self) -> int:
        """The batches that the run was trained on."""
        return self._steps

    def register(self, **objects: Any) -> None:
        """Let checkpoints hold objects that have `state_dict` and `load_state_dict`, under these names.

        What was resumed before is taken over at once.  All ranks register the same names in the same order.
        """
        for name, value in objects.items():
            self._checkpoints.register(name, value)

    def scheduler(self, make: Callable[[torch.optim.Optimizer], Any]) -> Any:
        """The learning-rate scheduler that `make` returns for this rank's optimizer, held by checkpoints.

        On a rank that trains nothing it is that of an optimizer without parameters, so every rank steps one.
        """
        scheduler = make(optimizer := self._scheduled or torch.optim.SGD([{"params": []}], lr=0.0, momentum=0.9))
        if self.optimizer is None:
            optimizer.step()  # a scheduler wants to see one
        self.register(scheduler=scheduler)
        return scheduler

    def save(self, folder: str | Path, keep: int = 2, asynchronous: bool = False) -> None:
        """Write a checkpoint of the run, `folder/step-000020`, and remove all but the last `keep` there.  Collective.

        On one disk that all ranks see it is written once; where ranks see disks of their own, each writes its files,
        and a copy goes to another disk.  asynchronous: what it holds is copied now, and written while training goes on;
        the next save, and `close`, wait for it.
        """
        self.recompute_statistics()
        self._checkpoints.save(Path(folder), {"steps": self._steps, "examples": self._examples}, keep, asynchronous)

    def neighbour_copy(self, asynchronous: bool = True) -> None:
        """Write a checkpoint into memory of hosts that is no process's; what one host alone has goes to the next too.

        `resume` finds it when ranks, or a host, are lost; `close` removes it (Stanza 5.3).  asynchronous: as of `save`.
        Where it fails rank 0 warns, once.  Raises LaunchError before the run has a checkpoint on disk.  Collective.
        """
        self.recompute_statistics()
        self._checkpoints.copy({"steps": self._steps, "examples": self._examples}, asynchronous)

    @property
    def resumed_from(self) -> Path | None:
        """The folder of the checkpoint that was resumed."""
        return self._checkpoints.source

    def resume(self, folder: str | Path) -> int:
        """Go on from the newest checkpoint in a folder, or a newer copy of its run in memory; returns the steps made.

        Collective.

        Under the same plan bit for bit; under another plan of the model, for any number of ranks, up to rounding.
        Raises LaunchError, on every rank and before anything is changed, when training cannot go on from it.
        """
        self.recompute_statistics()
        self._forget()
        counts = self._checkpoints.resume(Path(folder))
        self._steps, self._examples = counts["steps"], counts["examples"]
        return self._steps

    def close(self) -> None:
        """Wait for a checkpoint that is being written, and remove copies in memory.  Raises its error.  Collective."""
        self._checkpoints.close()
        if self.live is not None:
            self.live.close()

    def recompute_statistics(self, batches: Iterable[tuple[Any, ...]] | None = None) -> None:
        """Compute the means and deviations of normalisations anew, which subnets know of their own neurons alone.

        batches: a sample of training data, this rank's part of each; None: the last batches trained on, if any came
        since.  Evaluating and saving do so by themselves (IST 3.3).  Collective.
        """
        self.end_round()
        sample = None if batches is None else [(self._checked(b), self._context(training=False)) for b in batches]
        for feature in self._features:
            feature.settle(sample)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._evaluation.alike = False
        for feature in self._features:
            feature.forget()

    @cached_property
    def _checkpoints(self) -> Checkpoints:
        """Loaded when it is used: torch.distributed.checkpoint takes most of a second."""
        own = self.rank, self._state, self._optimizers, self._scheduled, self._groups, self._features, self._settings
        contents = resolve_name(f"{__package__}.checkpoints.contents:Contents")(*own, lambda: self.averages)
        made: Checkpoints = resolve_name(f"{__package__}.checkpoints.run:Checkpoints")(self._transport, contents)
        if self._updates.scale is not None:
            made.register("loss_scale", self._updates.scale)
        return made

    def _loader(self, dataset: Any, batch_size: int | None, **options: Any) -> Loader:
        if isinstance(dataset, DataLoader):
            dataset, given = taken_over(dataset)
            own_size = given.pop("batch_size")
            batch_size, options = own_size if batch_size is None else batch_size, {**options, **given}
        offsets = self.rank.spec.batch_offsets
        if batch_size is not None:
            if batch_size < 1:
                raise LaunchError(f"batch_size={batch_size}: give at least one example to each reader")
            offsets = tuple(batch_size * k for k in range(self.data_world + 1))
        return Loader(dataset, self.rank, offsets, self._with_sizes, **options)

    def _evaluate_all(self, loader: Loader) -> Tensor:
        """The mean loss over the examples of a whole epoch."""
        loader.set_epoch(loader.epoch)
        means = [(self.evaluate(*batch).double(), self.batch_offsets[-1]) for batch in loader]
        total = torch.stack([mean * number for mean, number in means]).sum()
        return (total / sum(number for _, number in means)).float()

    def _with_sizes(self, batches: Iterable[Step]) -> Iterator[tuple[Tensor, ...]]:
        before = self._sizes, self._is_tail
        try:
            for batch, self._sizes in batches:
                self._is_tail = True
                yield batch
        finally:
            self._sizes, self._is_tail = before  # of a loop around this one
