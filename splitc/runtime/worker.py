"""One rank of a run, as a user holds it: what it trains, the data it reads, its evaluation and its state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from . import data
from .checkpoint import broadcast_state, in_memory
from .errors import LaunchError
from .files import StateFile, beside, load_run, save_run
from .training import Training


class Worker(Training):
    """Trains one rank, evaluates, and saves its state; `Training` says how it is made and steps."""

    def evaluate(self, *batch: Any) -> Tensor:
        """The global loss of one batch in evaluation mode, forward only; buffers are the first replica's.  Collective.

        It changes nothing but the buffers of the other replicas, which are overwritten.
        Raises LaunchError where the model could not be captured in evaluation mode.
        """
        if self.rank.spec.no_evaluation:
            raise LaunchError(f"the model in evaluation mode could not be compiled: {self.rank.spec.no_evaluation}")
        batch = self._checked(batch)
        self.end_round()
        self.recompute_statistics()
        return self._evaluation.loss(batch, self._context(training=False))

    def shard(
        self,
        dataset: Any,
        batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        epoch: int = 0,
        drop_last: bool = True,
        **loader: Any,
    ) -> Iterator[tuple[Tensor, ...]]:
        """This rank's batches of one epoch: inputs, then targets; () on ranks that read no data.

        The readers' batches, concatenated in the order of `data_rank`, are those of one process that reads the whole
        dataset.  Each batch's step comes before the next batch.

        batch_size: examples for each reader; None: as compiled.
        drop_last: False divides a smaller last batch among the readers too, if every rank gets an example of it.
        loader: options of torch's DataLoader (num_workers, collate_fn, pin_memory).
        """
        offsets = self.rank.spec.batch_offsets
        if batch_size is not None:
            if batch_size < 1:
                raise LaunchError(f"batch_size={batch_size}: give at least one example to each reader")
            offsets = tuple(batch_size * k for k in range(self.data_world + 1))
        batches = data.shard(
            dataset,
            offsets,
            self.data_rank,
            self.rank.spec.paths,
            lambda step_offsets: not self.rank.without_examples(step_offsets),
            shuffle=shuffle,
            seed=seed,
            epoch=epoch,
            drop_last=drop_last,
            **loader,
        )
        return self._with_sizes(batches)

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
        self.rank.forget_ahead()
        own = self._state
        own.unheld.update(broadcast_state(self._transport, self.stage, state, own.first_names, own.built))

    def export(self, path: str | Path) -> None:
        """Write the whole model's state into a file for torch.load, while no rank holds the whole.  Collective."""
        self.recompute_statistics()
        aside = beside(Path(path), "partial")
        if self._state.gather(partial(StateFile, aside)) is not None:
            aside.replace(path)
        self._transport.barrier()

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint of the run: every rank its own part, into a folder that all ranks share.  Collective."""
        self.recompute_statistics()
        save_run(self._transport, Path(folder), self._run())

    def resume(self, folder: str | Path) -> int:
        """Go on from a checkpoint of the same plan, bit for bit; returns the steps made before it.  Collective.

        Raises LaunchError, on every rank and before anything is changed, when the checkpoint is of another run.
        """
        self.recompute_statistics()
        run = load_run(self._transport, Path(folder), self._run())
        self.rank.forget_ahead()
        self._state.restore(run, self._optimizers)
        self._round.load_state_dict(run["round"])
        self._steps, self._examples = run["steps"], run["examples"]
        return self._steps

    def recompute_statistics(self, batches: Iterable[tuple[Any, ...]] | None = None) -> None:
        """Compute the means and deviations of normalisations anew, which subnets know of their own neurons alone.

        batches: a sample of training data, this rank's part of each; None: the last batches trained on, if any came
        since.  Evaluating and saving do so by themselves (IST 3.3).  Collective.
        """
        self.end_round()
        sample = None if batches is None else [(self._checked(b), self._context(training=False)) for b in batches]
        self._evaluation.recompute(sample)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _run(self) -> dict[str, Any]:
        """All that this rank's next steps depend on: numbers, names, and tensors by name."""
        state = self._state.run(self._optimizers, self._steps % self._accumulate > 0)
        count = {"steps": self._steps, "examples": self._examples, "round": self._round.state_dict()}
        return {"settings": self._settings, **count, **state}

    def _with_sizes(
        self, batches: Iterable[tuple[tuple[Tensor, ...], tuple[int, ...]]]
    ) -> Iterator[tuple[Tensor, ...]]:
        before = self._sizes
        try:
            for batch, self._sizes in batches:
                yield batch
        finally:
            self._sizes = before  # of a loop around this one
