"""Run a region on three examples and see, by the flow of data inside, whether it treats them apart.

What it returns for an example depends on that example alone, and no number leaves tensors that was computed from
several.  Numbers of single examples may leave (a loop over examples): extreme ones in their place change nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx

from splitc.capture.dataflow import UNSURE, Flow, Functions
from splitc.capture.region_runs import unchanged
from splitc.ir.graph import info
from splitc.ir.interpreter import NodeRunner
from splitc.ir.program import TensorSpec
from splitc.runtime.nested import parts


def ran(node: fx.Node, runner: NodeRunner, follow: bool, outer: Mapping[fx.Node, int]) -> tuple[Any, str]:
    """What a region returns, and why it couples examples: "" where it does not, or `follow` is false.

    outer: of nodes whose rows of an example lie apart, see `Program`.
    """

    def flow(forged: int = 0, number: int = 0) -> tuple[Any, Flow]:
        seen = Flow(forged, number)
        for each in node.all_input_nodes:
            for tensor, spec in _specified(runner.env[each], info(each).spec):
                seen.mark(tensor, _examples(tensor, spec, outer.get(each, 1)))
        with unchanged(runner.fetch_attr(str(node.target)).buffers()), seen, Functions(seen), torch.enable_grad():
            return runner.run_node(node), seen

    if not follow:
        with unchanged(runner.fetch_attr(str(node.target)).buffers()):
            return runner.run_node(node), ""
    value, seen = flow()
    where = f"{info(node).source}: the loss couples examples: what {node.name} makes of an example"
    if seen.left:
        return value, seen.left
    for tensor, spec in _specified(value, info(node).spec):
        bits = seen.bits(tensor)
        if not any(_is_apart(bits, _examples(tensor, spec, a)) for a in range(1, spec.rows + 1) if spec.rows % a == 0):
            return value, f"{where} is computed from several"
    for kept, number in product((1, 2, 4), (500, -500, 0)) if seen.alone else ():
        try:
            other, changed = flow(7 - kept, number)
        except Exception:  # its code does not expect these numbers
            continue
        if changed.left or _differs(value, other, info(node).spec, seen, kept):
            return value, f"{where} depends on numbers of others"
    return value, ""


def _differs(value: Any, other: Any, spec: Any, seen: Flow, kept: int) -> bool:
    """Whether two results differ in what is of the kept example alone."""
    pairs = zip(_specified(value, spec), _specified(other, spec), strict=False)
    rows = ((a, b, seen.bits(a) == kept) for (a, _), (b, _) in pairs if a.shape == b.shape)
    return any(not torch.allclose(a[own], b[own], rtol=1e-4, equal_nan=True) for a, b, own in rows)


def _is_apart(bits: Tensor, expected: Tensor) -> bool:
    return not bool(((bits & UNSURE == 0) & (bits & ~expected != 0)).any())


def _specified(value: Any, spec: Any) -> Iterator[tuple[Tensor, TensorSpec]]:
    """The tensors with examples in a value, with their specs."""
    if isinstance(spec, TensorSpec):
        if isinstance(value, Tensor) and spec.batch_dim is not None:
            yield value, spec
        return
    held = parts(value) or {}
    for key, part in (parts(spec) or {}).items():
        yield from _specified(held.get(key), part)


def _examples(value: Tensor, spec: TensorSpec, outer: int) -> Tensor:
    """The bit of the example that each element is of.  outer: see `Program.flattened`."""
    dim = spec.batch_dim
    assert dim is not None
    bits = torch.tensor([1, 2, 4], dtype=torch.uint8, device=value.device)
    rows = bits.repeat_interleave(spec.rows // outer).repeat(outer)
    return rows.view(-1, *[1] * (value.dim() - dim - 1)).expand(value.shape)
