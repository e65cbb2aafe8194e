"""Draw the global batches that `verify` trains on, and divide them among the ranks that read data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from torch import Tensor

from splitc.capture.example.division import examples_of
from splitc.capture.example.example import Example
from splitc.capture.validate.generic_data import Draw, GenericData
from splitc.checks.batch_sizes import runs_batches_of
from splitc.ir.program import LoweredProgram, Program
from splitc.runtime.launch.feed import synthetic
from splitc.runtime.worker import Worker

Batch = Mapping[str, Tensor]

_FEW = 8  # examples of a reader


def draw_batches(
    program: Program, example: Example, size: int, steps: int, seed: int, loss_of: Callable[[Batch], Tensor]
) -> tuple[list[Batch], Draw]:
    """Batches of `size` examples, as generic as the model takes them: `loss_of` them must be a number."""
    data, batches = GenericData.of(program, example.tensors), list[Batch]()
    for how in Draw:
        batches = [data.draw(size, seed + step, how) for step in range(steps)]
        try:
            if all(bool(loss_of(batch).isfinite()) for batch in batches):
                return batches, how
        except Exception:
            if how is Draw.EXAMPLE:
                raise
    return batches, Draw.EXAMPLE


def split_batch(program: Program, batch: Batch, local_batches: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """The part of each reader, which has `local_batches[reader]` examples."""
    bounds = pairwise(accumulate(local_batches, initial=0))
    return [tuple(examples_of(program, batch, first, last).values()) for first, last in bounds]


def few_of(program: LoweredProgram) -> tuple[int, ...]:
    """Sizes of readers' batches that take little time, or those of the plan where the program does not run them."""
    sizes = scaled_down(program.plan.local_batches, _FEW)
    return sizes if runs_batches_of(program, sizes) else program.plan.local_batches


def few(worker: Worker) -> Iterator[tuple[Tensor, ...]]:
    """What `launch.py --data` takes: random batches of a rank, of the sizes of `few_of`."""
    spec = worker.rank.spec
    sizes = scaled_down(tuple(b - a for a, b in pairwise(spec.batch_offsets)), _FEW)
    worker.use_sizes(sizes)
    return synthetic(replace(spec, batch_offsets=tuple(accumulate(sizes, initial=0))))


def number_of_examples(program: Program, batch: Batch) -> int:
    """The examples of a batch."""
    dims = ((each.name, each.spec.batch_dim) for each in program.inputs if each.loose is None)
    return next(batch[name].shape[dim] for name, dim in dims if dim is not None)


def within_example(program: Program, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of readers' batches, scaled down where a function divides the example, to which none can be added."""
    while program.part is not None and sum(sizes) > program.batch and max(sizes) > 1:
        sizes = scaled_down(sizes, max(sizes) - 1)
    return sizes


def scaled_down(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Scale `sizes` so that the largest is at most `most`; unequal sizes stay unequal."""
    largest = max(sizes)
    if largest <= most:
        return sizes
    small = [max(1, size * most // largest) for size in sizes]
    return tuple(s - 1 if s == most and size < largest and s > 1 else s for s, size in zip(small, sizes, strict=True))
