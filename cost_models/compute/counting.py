"""Record the ops that torch runs: their FLOPs, their bytes, their class.

A dispatch mode sees what autograd and torch's composite functions become, so what is recorded is what is executed,
forward and backward, on fake tensors and on real ones alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from splitc.cost_models.compute.op_bytes import bytes_accessed, name_of
from splitc.cost_models.compute.op_classes import known, op_class
from splitc.cost_models.compute.op_flops import formula_of, padding_flops
from splitc.ir.costs import OpCost


class OpCounter(TorchDispatchMode):
    """Calls `record` with every op that is not free; `backward` is the direction that ops are marked with."""

    def __init__(self, record: Callable[[OpCost], None], backward: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.backward = backward
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload) and func.namespace not in ("prim", "prims"):
            nbytes = bytes_accessed(func, args, kwargs or {}, out)
            if nbytes is not None:
                formula = formula_of(func)
                flops = formula(args, kwargs or {}, out) if formula else 0.0
                kind = name_of(func), op_class(func, formula is not None), self.backward
                padding, is_unknown = padding_flops(func, args, flops), formula is None and not known(func)
                self._record(OpCost(*kind, flops, nbytes, padding_flops=padding, unknown=is_unknown))
        return out


def merged(ops: Iterable[OpCost]) -> tuple[OpCost, ...]:
    """Equal ops as one that is launched as often as they are."""
    return tuple(sum_of([op] * n) for op, n in Counter(ops).items())


def merged_pairs(small: Sequence[OpCost], large: Sequence[OpCost]) -> list[tuple[OpCost, OpCost]]:
    """The ops of one layer at two batch sizes, side by side; those that are equal at both are one.

    Where torch runs other ops at another size, all of a name are taken together.
    """
    if [_kind(op) for op in small] == [_kind(op) for op in large]:
        return [(sum_of([a] * n), sum_of([b] * n)) for (a, b), n in Counter(zip(small, large, strict=True)).items()]
    kinds = dict.fromkeys(map(_kind, (*small, *large)))
    of_kind = [[[kind, *(op for op in ops if _kind(op) == kind)] for ops in (small, large)] for kind in kinds]
    return [(sum_of(a), sum_of(b)) for a, b in of_kind]


def sum_of(ops: Sequence[OpCost]) -> OpCost:
    """Ops of one kind as one."""
    return ops[0].with_numbers(map(sum, zip(*(op.numbers for op in ops), strict=True)))


def _kind(op: OpCost) -> OpCost:
    """The op without its numbers."""
    return op.with_numbers((0.0, 0.0, 0.0, 0.0))
