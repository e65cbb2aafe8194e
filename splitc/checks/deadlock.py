"""Checks of the ranks' messages and collectives: every send has its receive, and there is no deadlock."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import networkx as nx

from splitc.ir.program import LoweredProgram
from splitc.ir.wire import wire
from splitc.ir.wire_op import WireOp

_Channel = tuple[Any, ...]
"""A word and ranks: "message", from and to; or "sum" and its members."""


def sends_meet_receives(program: LoweredProgram) -> list[str]:
    """The k-th send and the k-th receive between two ranks have equal payload, shape and dtype; collectives too."""
    channels: dict[_Channel, dict[int, list[WireOp]]] = defaultdict(lambda: defaultdict(list))
    for rank in range(program.plan.world):
        for op in wire(program, rank):
            channels[_channel(rank, op)][rank].append(op)
    problems: list[str] = []
    for (kind, first, *others), ops in sorted(channels.items()):
        verbs = ("sends", "receives") if kind == "message" else ("sums", "sums")
        for rank in others:
            problems += _match(f"rank {first}", f"rank {rank}", ops[first], ops[rank], verbs)
    return problems


def _channel(rank: int, op: WireOp) -> _Channel:
    if op.kind == "collective":
        return "sum", *op.ranks
    return ("message", rank, *op.ranks) if op.kind == "send" else ("message", *op.ranks, rank)


def _match(left: str, right: str, a: list[WireOp], b: list[WireOp], verbs: tuple[str, str]) -> list[str]:
    for x, y in zip(a, b, strict=False):
        if (x.payload, x.shape, x.dtype) != (y.payload, y.shape, y.dtype):
            return [
                f"{left} {verbs[0]} {x.payload} {x.shape} {x.dtype} "
                f"where {right} {verbs[1]} {y.payload} {y.shape} {y.dtype}"
            ]
    if len(a) > len(b):
        return [f"{left} {verbs[0]} {a[len(b)].payload}, which {right} never {verbs[1]}"]
    if len(b) > len(a):
        return [f"{right} {verbs[1]} {b[len(a)].payload}, which {left} never {verbs[0]}"]
    return []


def no_deadlock(program: LoweredProgram) -> list[str]:
    """The ranks' orders, matching operations merged, form no cycle (docs/design/runtime.md, "Order on the wire").

    A bucket begins within a backward, at a place that the wire does not say but that is the same on all ranks of the
    role, which run one graph.  So what a backward exchanges is in one order there; if, as a whole, it is in no cycle
    with the rest either, then no such place makes one.
    """
    events: dict[Any, list[tuple[int, WireOp]]] = defaultdict(list)
    orders: list[list[Any]] = []
    kinds: dict[Any, set[bool]] = defaultdict(set)  # whether a backward has buckets, and others
    for rank in range(program.plan.world):
        counts: dict[_Channel, int] = defaultdict(int)
        orders.append([])
        for op in wire(program, rank):
            channel = _channel(rank, op)
            orders[-1].append((channel, counts[channel]))
            counts[channel] += 1
            events[orders[-1][-1]].append((rank, op))
            kinds[op.within].add(op.payload.bucket is None)
    wholes = {e: op.within for e, ops in events.items() for _, op in ops if op.within and len(kinds[op.within]) == 2}
    cycle = _cycle(orders) or (wholes and _cycle([[wholes.get(e, e) for e in order] for order in orders]))
    if not cycle:
        return []
    chain = "; then ".join(
        " with ".join(f"rank {rank}: {op}" for rank, op in events[event]) or "the backward of {}[{}]".format(*event)
        for event in cycle
    )
    return [f"the ranks deadlock in a cycle: {chain}; then the first again"]


def _cycle(orders: list[list[Any]]) -> list[Any]:
    """Events that follow each other in a circle, if any do."""
    try:
        found = nx.find_cycle(nx.DiGraph((a, b) for order in orders for a, b in pairwise(order) if a != b))
    except nx.NetworkXNoCycle:
        return []
    return [event for event, _ in found]
