"""Checks of the ranks' messages and collectives: every send has its receive, and there is no deadlock."""

from __future__ import annotations

from collections import defaultdict
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
    """The ranks' orders, matching operations merged, form no cycle (docs/design/runtime.md, "Order on the wire")."""
    graph: nx.DiGraph[Any] = nx.DiGraph()
    counts: dict[Any, int] = defaultdict(int)
    for rank in range(program.plan.world):
        before = None
        for op in wire(program, rank):
            channel = _channel(rank, op)
            event = channel, counts[channel, rank]
            counts[channel, rank] += 1
            graph.add_node(event)
            graph.nodes[event].setdefault("ops", []).append((rank, op))
            if before is not None:
                graph.add_edge(before, event)
            before = event
    try:
        cycle = nx.find_cycle(graph)
    except nx.NetworkXNoCycle:
        return []
    chain = "; then ".join(
        " with ".join(f"rank {rank}: {op}" for rank, op in graph.nodes[event]["ops"]) for event, _ in cycle
    )
    return [f"the ranks deadlock in a cycle: {chain}; then the first again"]
