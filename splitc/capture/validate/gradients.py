"""Compare the gradients of two runs, each reduced as soon as backward has it, and find the leaves that they reach."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from splitc.capture.source_lines import first_line
from splitc.errors import CaptureError
from splitc.ir.linears import sparse_tables
from splitc.ir.program import Program

_SAMPLE = 1 << 16  # elements that are compared one by one, beside the norm and the sum of all


@dataclass(frozen=True)
class Gradient:
    """What is kept of a gradient: L2 norm and sum of its finite elements, and evenly spaced elements."""

    numel: int
    norm: float
    total: float
    sample: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> Gradient:
        dense = tensor.detach()
        flat = (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).flatten()
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        finite = flat if bool(flat.sum().isfinite()) else torch.where(flat.isfinite(), flat, 0)
        sample = flat[:: max(1, flat.numel() // _SAMPLE)].clone()
        return cls(flat.numel(), float(torch.linalg.vector_norm(finite)), float(finite.sum()), sample)

    def equals(self, other: Gradient, relative: float, noise: float) -> bool:
        """Whether two agree up to rounding, and are not finite at the same elements."""
        if not torch.equal(self.sample.isfinite(), other.sample.isfinite()):
            return False
        difference = torch.where(self.sample.isfinite(), self.sample - other.sample, 0)
        allowed = relative * self.norm + noise * math.sqrt(self.numel)
        return (
            float(torch.linalg.vector_norm(difference)) <= allowed
            and not abs(self.norm - other.norm) > allowed  # NaN: unknown
            and abs(self.total - other.total) <= allowed * math.sqrt(self.numel)
        )

    def plus(self, other: Gradient) -> Gradient:
        """The sum; of its norm only the sample's is known."""
        return Gradient(self.numel, math.nan, self.total + other.total, self.sample + other.sample)


Gradients = Mapping[str, Gradient]


def gradients(program: Program, root: nn.Module, loss: Tensor) -> dict[str, Gradient]:
    """Run backward and return the gradient of every parameter of `root` by name.  Raises CaptureError."""
    tables = sparse_tables(program)
    found: dict[str, Gradient] = {}

    def keep(parameter: str, tensor: Tensor) -> None:
        gradient, tensor.grad = tensor.grad, None
        assert gradient is not None
        if gradient.layout is not torch.strided and parameter not in tables:
            remedy = "leave out sparse=True, sparse_grad=True and torch.sparse where it is used"
            which = "ranks exchange those of tables alone, of single rows, or sums or means of bags of one size"
            raise CaptureError(f"the gradient of {parameter} is sparse, and {which}; {remedy}")
        found[parameter] = Gradient.of(gradient.to_dense())

    trained = [(n, p) for n, p in root.named_parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(partial(keep, n)) for n, p in trained]
    try:
        if loss.requires_grad:  # in evaluation it may not
            loss.backward()
    except RuntimeError as error:
        raise CaptureError(f"the backward of {program.name} fails: {first_line(error)}") from error
    finally:
        for hook in hooks:
            hook.remove()
    return found


def differing(expected: Gradients, got: Gradients, allowed: float) -> Iterable[str]:
    """Names of parameters whose gradients differ, or of which only one has a gradient.

    A gradient that is mathematically zero (of an attention's key bias) is a rounding error of terms that cancel; the
    RMS of all gradients stands for the size of those terms.
    """
    count = max(sum(g.numel for g in expected.values()), 1)
    noise = allowed / 50 * math.sqrt(sum(g.norm**2 for g in expected.values()) / count)
    for name in sorted({**expected, **got}):
        if name not in expected or name not in got or not expected[name].equals(got[name], 5 * allowed, noise):
            yield name
