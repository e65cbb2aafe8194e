"""Draw the global batches that `verify` trains on, and divide them among the ranks that read data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

from torch import Tensor

from splitc.capture.example import Example
from splitc.capture.generic_data import Draw, GenericData
from splitc.ir.program import Program

Batch = Mapping[str, Tensor]


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


def examples_of(program: Program, batch: Batch, first: int, last: int) -> dict[str, Tensor]:
    """Some examples of every tensor, in memory as all of them are."""
    if program.part is not None:
        return program.part(batch, first, last)
    dims = {each.name: each.spec.batch_dim for each in program.inputs}
    found = {n: t if (dim := dims[n]) is None else t.narrow(dim, first, last - first) for n, t in batch.items()}
    return {name: part.contiguous() if batch[name].is_contiguous() else part for name, part in found.items()}


def number_of_examples(program: Program, batch: Batch) -> int:
    """The examples of a batch."""
    dims = ((each.name, each.spec.batch_dim) for each in program.inputs if each.loose is None)
    return next(batch[name].shape[dim] for name, dim in dims if dim is not None)


def scaled_down(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Scale `sizes` so that the largest is at most `most`; unequal sizes stay unequal."""
    largest = max(sizes)
    if largest <= most:
        return sizes
    small = [max(1, size * most // largest) for size in sizes]
    return tuple(s - 1 if s == most and size < largest and s > 1 else s for s, size in zip(small, sizes, strict=True))
