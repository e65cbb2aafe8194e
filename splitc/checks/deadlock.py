"""Checks of the ranks' messages and collectives: every send has its receive, and there is no deadlock."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, pairwise
from typing import Any

import networkx as nx

from splitc.ir.program import LoweredProgram
from splitc.ir.wire import wire
from splitc.ir.wire_op import WireOp

_Channel = tuple[Any, ...]
"""A word and ranks: "message", from and to; or "sum" and its members."""

_Event = tuple[int, int]
"""The number of a channel, and how many events of it came before."""


def sends_meet_receives(program: LoweredProgram) -> list[str]:
    """The k-th send and the k-th receive between two ranks have equal payload, shape and dtype; collectives too."""
    wires, names = _events(program)
    channels: dict[int, dict[int, list[WireOp]]] = defaultdict(lambda: defaultdict(list))
    for rank, events in enumerate(wires):
        for (number, _), op in events:
            channels[number][rank].append(op)
    problems: list[str] = []
    for (kind, first, *others), number in sorted(zip(names, range(len(names)), strict=True)):
        verbs = ("sends", "receives") if kind == "message" else ("sums", "sums")
        ops = channels[number]
        for rank in others:
            problems += _match(f"rank {first}", f"rank {rank}", ops[first], ops[rank], verbs)
    return problems


def _events(program: LoweredProgram) -> tuple[list[list[tuple[_Event, WireOp]]], list[_Channel]]:
    """What each rank does, in order, each with its event; and the channels, by number."""
    numbers: dict[_Channel, int] = {}
    wires = []
    for rank in range(program.plan.world):
        counts: dict[int, int] = defaultdict(int)
        events = []
        for op in wire(program, rank):
            ends = (rank, *op.ranks) if op.kind == "send" else (*op.ranks, rank)
            channel = ("sum", *op.ranks) if op.kind == "collective" else ("message", *ends)
            number = numbers.setdefault(channel, len(numbers))
            events.append(((number, counts[number]), op))
            counts[number] += 1
        wires.append(events)
    return wires, list(numbers)


def _match(left: str, right: str, a: list[WireOp], b: list[WireOp], verbs: tuple[str, str]) -> list[str]:
    for x, y in zip(a, b, strict=False):
        if x is not y and (x.payload, x.shape, x.dtype) != (y.payload, y.shape, y.dtype):
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
    wires, _ = _events(program)
    ways = {tuple((event, op.within, op.payload.bucket is None) for event, op in each): None for each in wires}
    kinds: dict[Any, set[bool]] = defaultdict(set)  # whether a backward has buckets, and others
    for _, within, is_other in chain.from_iterable(ways):
        kinds[within].add(is_other)
    wholes = {event: within for event, within, _ in chain.from_iterable(ways) if within and len(kinds[within]) == 2}
    orders = [[event for event, _, _ in way] for way in ways]
    cycle = _cycle(orders) or (wholes and _cycle([[wholes.get(e, e) for e in order] for order in orders]))
    if not cycle:
        return []
    events: dict[Any, list[tuple[int, WireOp]]] = defaultdict(list)
    for rank, each in enumerate(wires):
        for event, op in each:
            events[event].append((rank, op))
    told = "; then ".join(
        " with ".join(f"rank {rank}: {op}" for rank, op in events[event]) or "the backward of {}[{}]".format(*event)
        for event in cycle
    )
    return [f"the ranks deadlock in a cycle: {told}; then the first again"]


def _cycle(orders: list[list[Any]]) -> list[Any]:
    """Events that follow each other in a circle, if any do."""
    try:
        found = nx.find_cycle(nx.DiGraph((a, b) for order in orders for a, b in pairwise(order) if a != b))
    except nx.NetworkXNoCycle:
        return []
    return [event for event, _ in found]
