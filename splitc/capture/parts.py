"""Check a function that divides the examples of a batch: on its parts a model returns what it returns on the whole."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from splitc.capture.example import Example
from splitc.errors import CaptureError
from splitc.ir.graph import info
from splitc.ir.program import Program
from splitc.ir.regions import regions
from splitc.runtime.nested import tensors


def require_parts(program: Program, model: nn.Module, example: Example) -> None:
    """Check that a model returns for parts of its example what it returns for the whole, and is exact on ranks.

    Raises CaptureError, with the numbers that differ.
    """
    advice = "its examples are divided by a function (batch=), so that"
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
