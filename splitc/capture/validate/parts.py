"""Check a function that divides the examples of a batch: on its parts a model returns what it returns on the whole."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from splitc.capture.example.example import Example
from splitc.errors import CaptureError
from splitc.ir.graph import info
from splitc.ir.program import Program
from splitc.ir.regions import regions
from splitc.runtime.nested import tensors


def unlike(example: Example, size: int) -> list[int]:
    """Where `size` examples begin of which two have other sizes, of each jagged tensor, if the model returns its loss.

    So a mean over what examples have several of is told from one over examples.  Raises CaptureError for no such two.
    """
    if example.division is None or example.loss is not None:
        return []
    found = set[int]()
    every, two = [example.rows([k]) for k in range(example.batch)], example.rows([0, 1])
    for name in example.division.loose:
        shapes = [each[name].shape for each in every]
        unlike = [k for k in range(len(shapes) - 1) if shapes[k] != shapes[k + 1]]
        if not unlike and any(2 < m == 2 * n for n, m in zip(shapes[0], two[name].shape, strict=True)):  # no offsets
            raise CaptureError(
                f"each of the example's {len(every)} examples has {name} of the size {tuple(shapes[0])}, so that a "
                f"loss over all of them cannot be told from a mean over examples: give an example in which they differ"
            )
        found.update(min(k, example.batch - size) for k in unlike[:1])
    return sorted(found)


def require_parts(program: Program, model: nn.Module, example: Example) -> None:
    """Check that a model returns for parts of its example what it returns for the whole, and is exact on ranks.

    Raises CaptureError, with the numbers that differ.
    """
    advice = "its examples are divided by a function (batch=) or in lists, so that"
    for node, own in regions(program):
        if own.norms:
            raise CaptureError(
                f"{info(node).source}: {advice} rows that BatchNorm counts follow from the data: normalise each "
                f"example by itself (LayerNorm), or keep BatchNorm in evaluation mode"
            )
        if any(layout.dim != 0 or layout.rows != 1 for layout in own.draws):
            raise CaptureError(
                f"{info(node).source}: {advice} random numbers whose number follows from the data (dropout of jagged "
                f"rows) would be others than in one process: draw them for values with a row for each example"
            )
    copied, number = copy.deepcopy(model).eval(), example.batch
    middle = number // 2

    def rows(first: int, last: int) -> list[Tensor]:
        output = example.output(copied, example.rows(slice(first, last)))
        return [each for _, each in tensors(output) if each.dim() and len(each) == last - first]

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        whole, one, two = rows(0, number), rows(0, middle), rows(middle, number)
    for a, b, c in zip(whole, one, two, strict=False):
        other, peak = torch.cat([b, c]), float(a.abs().max())
        if other.shape != a.shape or not torch.allclose(a.double(), other.double(), rtol=1e-3, atol=1e-3 * peak):
            found = f"{float((a.double() - other.double()).abs().max()):.3g} of {peak:.3g}"
            raise CaptureError(
                f"the function batch= divides the example into parts for which {program.name} returns something else: "
                f"of examples 0 to {middle} and {middle} to {number} it differs by {found}; it must return these "
                f"examples alone, with offsets and indices counted anew"
            )
