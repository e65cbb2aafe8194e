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


class Couples(Exception):
    """A region couples examples; the text says why."""


def ran(node: fx.Node, runner: NodeRunner, follow: bool, outer: Mapping[fx.Node, int]) -> Any:
    """What a region returns.  Raises Couples where it couples examples, if `follow`.

    outer: of nodes whose rows of an example lie apart, see `Program`.
    """

    def flow(forged: int = 0, number: int = 0) -> tuple[Any, Flow]:
        seen = Flow(forged, number)
        for each in node.all_input_nodes if follow else ():
            for tensor, spec in _specified(runner.env[each], info(each).spec):
                seen.mark(tensor, _examples(tensor, spec, outer.get(each, 1)))
        with unchanged(runner.fetch_attr(str(node.target)).buffers()), seen, Functions(seen):
            return runner.run_node(node), seen

    value, seen = flow()
    if seen.left:
        raise Couples(seen.left)
    found = [(tensor, spec, seen.bits(tensor)) for tensor, spec in _specified(value, info(node).spec) if follow]
    where = f"{info(node).source}: the loss couples examples: what {node.name} makes of an example"
    for tensor, spec, bits in found:
        outers = (_examples(tensor, spec, a) for a in range(1, spec.rows + 1) if spec.rows % a == 0)
        if all(((bits < UNSURE) & (bits & ~own != 0)).any() for own in outers):
            raise Couples(f"{where} is computed from several")
    for kept, number in product((1, 2, 4), (500, -500, 0)) if seen.alone else ():
        try:
            other, changed = flow(7 - kept, number)
            others = (tensor for tensor, _ in _specified(other, info(node).spec))
            pairs = [(a[bits == kept], b[bits == kept]) for (a, _, bits), b in zip(found, others, strict=True)]
        except Exception:  # its code does not expect these numbers
            continue
        if changed.left or not all(torch.allclose(a, b, rtol=1e-4, equal_nan=True) for a, b in pairs):
            raise Couples(changed.left or f"{where} depends on numbers of others")
    return value


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
    bits = torch.tensor([1, 2, 4] if outer else [7, 7, 7], dtype=torch.uint8, device=value.device)
    rows = bits.repeat_interleave(spec.rows // max(outer, 1)).repeat(max(outer, 1))
    return rows.view(-1, *[1] * (value.dim() - dim - 1)).expand(value.shape)
