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
from torch.utils._pytree import tree_map_only

from splitc.capture.regions.dataflow import UNSURE, Flow, Functions
from splitc.capture.regions.module_calls import unchanged
from splitc.ir.graph import info
from splitc.ir.interpreter import NodeRunner
from splitc.ir.program import TensorSpec
from splitc.runtime.nested import parts


class Couples(Exception):
    """A region couples examples; the text says why."""


def ran(
    node: fx.Node, runner: NodeRunner, follow: bool, outer: Mapping[fx.Node, int], draws: dict[fx.Node, int] | None
) -> Any:
    """What a region returns.  Raises Couples where it couples examples, if `follow`.

    outer: of nodes whose rows of an example lie apart, see `Program`.  draws: how often a region draws random numbers,
    which batches of other sizes and data may not change.
    """

    def flow(forged: int = 0, number: int = 0) -> tuple[Any, Flow]:
        seen, given = Flow(forged, number), {each: runner.env[each] for each in node.all_input_nodes if follow}
        runner.env.update({each: tree_map_only(Tensor, _leaf, value) for each, value in given.items()})
        inputs = [
            (tensor, _examples(tensor, spec, outer.get(each, 1)))
            for each in given
            for tensor, spec in _specified(runner.env[each], info(each).spec)
        ]
        for tensor, bits in inputs:
            seen.mark(tensor, bits)
        with unchanged(runner.fetch_attr(str(node.target)).buffers()), seen, Functions(seen):
            with torch.set_grad_enabled(follow):
                value = runner.run_node(node)
            results = [t for t, _ in _specified(value, info(node).spec) if t.requires_grad]
            back = [torch.ones_like(t) for t in results]
            with torch._C.DisableTorchFunction():
                for tensor, gradient in zip(results, back, strict=True):
                    seen.mark(gradient, seen.bits(tensor))
            leaves = [(t, bits) for t, bits in inputs if t.requires_grad] if results else []
            found = torch.autograd.grad(results, [t for t, _ in leaves], back, allow_unused=True) if leaves else ()
        for gradient, (_, bits) in zip(found, leaves, strict=True):
            if gradient is not None and _is_mixed(seen.bits(gradient), bits):
                seen.left = seen.left or f"{where} has a gradient that is computed from several"
        runner.env.update(given)
        return tree_map_only(Tensor, Tensor.detach, value), seen

    where = f"{info(node).source}: the loss couples examples: what {node.name} makes of an example"
    often = f"{info(node).source}: how often {node.name} draws random numbers follows from the batch"
    value, seen = flow()
    if draws is not None and seen.draws != draws.setdefault(node, seen.draws):
        raise Couples(often)
    if seen.left:
        raise Couples(seen.left)
    found = [(tensor, spec, seen.bits(tensor)) for tensor, spec in _specified(value, info(node).spec) if follow]
    for tensor, spec, bits in found:
        outers = (_examples(tensor, spec, a) for a in range(1, spec.rows + 1) if spec.rows % a == 0)
        if all(_is_mixed(bits, own) for own in outers):
            raise Couples(f"{where} is computed from several")
    for kept, number in product((1, 2, 4), (500, -500, 0)) if seen.alone else ():
        try:
            other, changed = flow(7 - kept, number)
            others = (tensor for tensor, _ in _specified(other, info(node).spec))
            pairs = [(a[bits == kept], b[bits == kept]) for (a, _, bits), b in zip(found, others, strict=True)]
        except Exception:  # its code does not expect these numbers
            continue
        if changed.draws != seen.draws:
            raise Couples(often)
        if changed.left or not all(torch.allclose(a, b, rtol=1e-4, equal_nan=True) for a, b in pairs):
            raise Couples(changed.left or f"{where} depends on numbers of others")
    return value


def _leaf(value: Tensor) -> Tensor:
    """A leaf each of whose numbers has memory of its own, unlike those of an expanded tensor."""
    own = value.contiguous() if 0 in value.stride() else value
    return own.detach().requires_grad_(value.is_floating_point())


def _is_mixed(bits: Tensor, own: Tensor) -> bool:
    return bool(((bits < UNSURE) & (bits & ~own != 0)).any())


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
