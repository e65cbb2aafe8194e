"""Sums over ops of a layer."""

from __future__ import annotations

from collections.abc import Iterable

from splitc.ir.costs import OpCost


def flops_of(ops: Iterable[OpCost]) -> float:
    return sum(op.flops for op in ops)


def bytes_of(ops: Iterable[OpCost]) -> float:
    """Bytes read and written."""
    return sum(op.bytes_accessed for op in ops)
