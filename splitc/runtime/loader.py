"""Read a dataset epoch by epoch: this rank's part of every global batch, and the position in the epoch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate
from torch.utils.data.sampler import BatchSampler

from .data import as_tuple, last_offsets, order, plan_epoch, without_examples
from .errors import LaunchError
from .rank import Rank

Step = tuple[tuple[Tensor, ...], tuple[int, ...]]
"""This rank's batch, and all readers' batch sizes."""

Around = Callable[[Iterable[Step]], Iterator[tuple[Tensor, ...]]]
"""Gives the batches of steps, while the worker's steps have their sizes."""

_OPTIONS = (
    "drop_last", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
)  # fmt: skip
_OF_WORKERS = "prefetch_factor", "persistent_workers"


class Loader:
    """This rank's batches of a dataset: inputs, then targets; () on ranks that read no data.

    Iterating gives the batches that are left of an epoch, and then stands at the next epoch; a loop that is left early
    is continued by the next one.  Collective.

    epoch: the present one.  dropped: the examples that an epoch leaves out; None where a stream has not ended yet.
    options: of torch's DataLoader.  Raises LaunchError when an epoch would have no step.
    """

    def __init__(
        self,
        dataset: Any,
        rank: Rank,
        offsets: tuple[int, ...],
        around: Around,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        **options: Any,
    ) -> None:
        """offsets: where each reader's examples begin in a global batch."""
        options = {"pin_memory": rank.transport.device.type == "cuda", **options}
        self._dataset, self._rank, self._offsets, self._around, self._options = dataset, rank, offsets, around, options
        self._shuffle, self._drop_last, self._seed = shuffle, drop_last, seed
        self._is_stream = isinstance(dataset, IterableDataset)
        self.epoch, self._examples = 0, 0
        self._workers = options.get("num_workers", 0)  # which read the present epoch
        self.dropped: int | None = None
        if not self._is_stream:
            if not hasattr(dataset, "__len__"):
                raise LaunchError(
                    f"{type(dataset).__name__} has neither a length nor is it an IterableDataset, so it cannot be "
                    f"divided among the readers; give a torch Dataset, or give worker.step batches of your own"
                )
            steps = self._steps(0)
            self.dropped = len(dataset) - sum(offsets[-1] for _, offsets in steps)
            if not steps:
                raise self._no_step(len(dataset))

    def __len__(self) -> int:
        """The steps of a whole epoch."""
        if self._is_stream:
            raise TypeError(
                f"{type(self._dataset).__name__} is a stream: its length, and so that of an epoch, is not known"
            )
        return len(self._steps(0))

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return self._around(self._counted())

    def set_epoch(self, epoch: int) -> None:
        """Stand at the begin of an epoch."""
        self.epoch, self._examples, self._workers = epoch, 0, self._options.get("num_workers", 0)

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the examples of its global batches so far: a position that holds for any world.

        Within an epoch of a stream also how many of torch's workers read it, since its order depends on them.
        """
        epoch, examples = self._position()
        workers = {"workers": self._workers} if self._is_stream and examples else {}
        return {"epoch": epoch, "examples": examples, "seed": self._seed, **workers}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self._examples, self._seed = state["epoch"], state["examples"], state["seed"]
        self._workers = state.get("workers", self._options.get("num_workers", 0))

    def report(self) -> None:
        """Print how many examples an epoch leaves out, if any."""
        if self.dropped:
            every = "" if self._is_stream else f" of {len(self._dataset)}"
            text = f"an epoch leaves out {self.dropped}{every} examples, which fill no global batch of"
            print(f"splitc: {text} {self._offsets[-1]}; drop_last=False takes them in", file=sys.stderr, flush=True)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _steps(self, start: int) -> list[tuple[int, tuple[int, ...]]]:
        return list(plan_epoch(len(self._dataset), self._offsets, self._drop_last, self._has_work, start))

    def _has_work(self, offsets: Sequence[int]) -> bool:
        return not self._rank.without_examples(offsets)

    def _position(self) -> tuple[int, int]:
        """The epoch and its examples so far; the begin of the next epoch where no step is left."""
        if self._examples and not self._is_stream and not self._steps(self._examples):
            return self.epoch + 1, 0
        return self.epoch, self._examples

    def _counted(self) -> Iterator[Step]:
        """The steps that are left of the epoch."""
        self.epoch, self._examples = epoch, start = self._position()
        for batch, sizes in self._streamed(epoch, start) if self._is_stream else self._indexed(epoch, start):
            self._examples += sum(sizes)
            yield batch, sizes
        made = self._examples
        self.set_epoch(epoch + 1)
        if made == start == 0:
            raise self._no_step(self.dropped or 0)
        if made == start:  # the stream ended where its last step had been made
            yield from self._counted()

    def _indexed(self, epoch: int, start: int) -> Iterator[Step]:
        """The steps of a dataset with a length, from an example on."""
        steps, own = self._steps(start), self._rank.spec.data_rank
        batches: Iterator[Any] = iter([()] * len(steps))
        if own is not None:
            indices = order(len(self._dataset), self._shuffle, self._seed, epoch)
            taken = [indices[first + bounds[own] : first + bounds[own + 1]].tolist() for first, bounds in steps]
            read = [each or [int(indices[first])] for each, (first, _) in zip(taken, steps, strict=True)]
            given = DataLoader(self._dataset, batch_sampler=read, **self._with_generator(epoch))
            batches = (self._tensors(batch, len(each)) for batch, each in zip(given, taken, strict=True))
        for batch, (_, bounds) in zip(batches, steps, strict=True):
            yield batch, _sizes(bounds)

    def _streamed(self, epoch: int, start: int) -> Iterator[Step]:
        """The steps of a stream, which every reader reads whole; a global batch is held until the next is read."""
        held, tail, offsets, reads = list[Any](), list[Any](), self._offsets, self._rank.spec.data_rank is not None
        examples = self._stream(epoch) if reads else iter(())
        skipped = self._agreed(sum(1 for _ in islice(examples, start)))
        whole, left = offsets[-1], 0
        while skipped == start:
            tail = list(islice(examples, whole))
            left = self._agreed(len(tail))
            if left < whole:
                break
            if held:
                yield self._own(held, offsets), _sizes(offsets)
            held = tail if reads else [None] * whole
        ends = last_offsets(bool(held), left, offsets, self._drop_last, self._has_work, self._examples > 0)
        self.dropped = len(held) + left - sum(bounds[-1] for bounds in ends)
        held, first = held + tail, 0
        for bounds in ends:
            yield self._own(held[first:], bounds), _sizes(bounds)
            first += bounds[-1]

    def _stream(self, epoch: int) -> Iterator[Any]:
        if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
            set_epoch(epoch)
        options = {**self._with_generator(epoch), "collate_fn": _as_is, "num_workers": self._workers}
        options["pin_memory"] = False  # of examples; their batch is pinned
        if not self._workers:
            options = {name: value for name, value in options.items() if name not in _OF_WORKERS}
        return iter(DataLoader(self._dataset, batch_size=None, **options))

    def _agreed(self, number: int) -> int:
        """The number of examples that all readers have read.  Raises LaunchError when they differ."""
        own, everyone = torch.tensor([number]), self._rank.everyone
        every = [torch.empty_like(own) for _ in everyone]
        self._rank.by_hosts().all_gather(every, own, everyone).wait()
        found = [int(every[reader]) for reader in self._rank.spec.readers]
        if len(set(found)) > 1:
            raise LaunchError(
                f"the readers' streams do not have the same examples: one global batch has "
                f"{', '.join(map(str, found))}; let {type(self._dataset).__name__} give all examples in one order to "
                f"every reader, or give worker.step batches of your own, on each reader those of its data_rank"
            )
        return found[0]

    def _own(self, examples: Sequence[Any], bounds: Sequence[int]) -> tuple[Tensor, ...]:
        if (own := self._rank.spec.data_rank) is None:
            return ()
        collate, taken = self._options.get("collate_fn") or default_collate, examples[bounds[own] : bounds[own + 1]]
        batch = self._tensors(collate(list(taken or examples[:1])), len(taken))
        return tuple(tensor.pin_memory() for tensor in batch) if self._options["pin_memory"] else batch

    def _tensors(self, batch: Any, number: int) -> tuple[Tensor, ...]:
        """The tensors of a collated batch; where this reader has no example, of one that another has, without it."""
        found = as_tuple(batch, self._rank.spec.paths)
        return found if number else without_examples(found, self._rank.spec)

    def _with_generator(self, epoch: int) -> dict[str, Any]:
        """The options, with a generator of its own: reading leaves torch's as it is, for a run that is resumed."""
        return {"generator": torch.Generator().manual_seed(self._seed + epoch), **self._options}

    def _no_step(self, number: int) -> LaunchError:
        return LaunchError(
            f"the dataset has {number} examples and a global batch {self._offsets[-1]}, so an epoch has no step"
            f"; give more examples, or a smaller batch_size{' or drop_last=False' if self._drop_last else ''}"
        )


def taken_over(loader: DataLoader[Any]) -> tuple[Any, dict[str, Any]]:
    """The dataset of a plain DataLoader, and how it reads it, as arguments of `Worker.loader`.

    Raises LaunchError when its sampler or its batches are the user's own.
    """
    sampler, batches = loader.sampler, loader.batch_sampler
    is_random = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler)
    plain = is_random or type(sampler) is SequentialSampler or isinstance(loader.dataset, IterableDataset)
    if loader.batch_size is None or type(batches) not in (BatchSampler, type(None)) or not plain:
        own = sampler if type(batches) is BatchSampler else batches
        raise LaunchError(
            f"the DataLoader has a {type(own).__name__ if own is not None else 'batch_size of None'}, but "
            f"worker.loader divides the examples among the ranks itself; give the dataset, or a DataLoader with "
            f"batch_size= (each reader's) and shuffle=, and without sampler= and batch_sampler="
        )
    reading = {name: getattr(loader, name) for name in (*_OPTIONS, *(_OF_WORKERS if loader.num_workers else ()))}
    if not reading["pin_memory"]:
        del reading["pin_memory"]  # torch's default, for which `Loader` has its own
    shuffle = is_random or isinstance(loader.dataset, IterableDataset)
    return loader.dataset, {"batch_size": loader.batch_size, "shuffle": shuffle, **reading}


def _sizes(bounds: Sequence[int]) -> tuple[int, ...]:
    return tuple(last - first for first, last in pairwise(bounds))


def _as_is(example: Any) -> Any:
    return example
