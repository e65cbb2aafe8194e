"""Phases of measured steps from the records of all ranks, and the file that `launch.py --measure` writes.

For a step of a rank, with W the union of its waits and T that of its transfers, each as a length of time:

    waiting = |W|        compute = step - waiting        communication = |T|

A message is under way from when both its ranks have issued it until its receiver, or this rank, sees it complete; a
collective from when all its ranks have issued it until this rank sees it complete.  So a rank that waits for a late
peer is waiting, but not communicating.  The k-th message from one rank to another with one tag meets the k-th receive;
the k-th collective of some ranks is the same on all of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # quick to load without torch
    from .recorder import Operation, Step

WARM_UP = 3
"""Number of first steps that are not measured: they allocate, connect and choose algorithms."""

TRACED = 3
"""Number of last steps whose spans are written."""


@dataclass(frozen=True)
class Span:
    """An activity of a rank from `start` to `end` (s), measured or simulated.

    stream: "compute", "wait" or "comm".  nbytes: payload of a transfer.
    """

    rank: int
    stream: str
    name: str
    start: float
    end: float
    nbytes: float = 0.0


@dataclass(frozen=True)
class Phases:
    """One step of a rank, in seconds: it computes or waits, and transfers are under way meanwhile.

    step: the whole of it, compute and waiting.  communication: while at least one of its transfers is under way,
    hidden behind computing or not.  sent_bytes: payload.
    """

    rank: int
    step: float
    compute: float
    waiting: float
    communication: float
    sent_bytes: float


def transfers(ranks: Sequence[Step]) -> list[list[Span]]:
    """By rank, the transfers of one step; ranks: by rank, its record of the step."""
    issues: dict[tuple[Any, ...], float] = {}  # when the last of those that take part has come
    arrivals: dict[tuple[Any, ...], float] = {}
    for rank, step in enumerate(ranks):
        for key, operation in _events(rank, step):
            issues[key] = max(issues.get(key, operation.issued), operation.issued)
            if key[0] == "message" and key[2] == rank:
                arrivals[key] = operation.completed
    found = []
    for rank, step in enumerate(ranks):
        spans = []
        for key, operation in _events(rank, step):
            end = min(operation.completed, arrivals.get(key, operation.completed))
            name, nbytes = _name(rank, key, operation)
            spans.append(Span(rank, "comm", name, min(issues[key], end), end, nbytes))
        found.append(spans)
    return found


def _events(rank: int, step: Step) -> Iterator[tuple[tuple[Any, ...], Operation]]:
    """Every message and collective of a step, with a key that is the same on all ranks that take part in it."""
    number: Counter[tuple[Any, ...]] = Counter()

    def numbered(*key: Any) -> tuple[Any, ...]:
        number[key] += 1
        return (*key, number[key])

    for operation in step.operations:
        for peer, tag, nbytes in operation.receives:
            yield (*numbered("message", peer, rank, tag), nbytes), operation
        for peer, tag, nbytes in operation.sends:
            yield (*numbered("message", rank, peer, tag), nbytes), operation
        if operation.ranks:
            yield numbered(operation.kind, operation.ranks), operation


def _name(rank: int, key: tuple[Any, ...], operation: Operation) -> tuple[str, int]:
    if key[0] != "message":
        return _over(operation), operation.nbytes
    _, src, dst, _, _, nbytes = key
    return f"send to rank {dst}" if src == rank else f"receive from rank {src}", nbytes


def _over(operation: Operation) -> str:
    """`all_reduce of ranks 0 1 2`, `send to rank 3`."""
    if operation.ranks:
        return f"{operation.kind} of ranks {' '.join(map(str, operation.ranks))}"
    receiving = [f"receive from rank {peer}" for peer, *_ in operation.receives]
    return ", ".join([*receiving, *(f"send to rank {peer}" for peer, *_ in operation.sends)])


def waits(rank: int, step: Step) -> list[Span]:
    """When a rank waits in a step, and for what."""
    spans = [Span(rank, "wait", _over(op), a, b) for op in step.operations for a, b in op.waits]
    return sorted(spans, key=lambda span: span.start)


def computing(rank: int, step: Step) -> list[Span]:
    """The time of a step between its waits."""
    spans, done = [], step.begin
    for start, end in [*union((s.start, s.end) for s in waits(rank, step)), (step.end, step.end)]:
        if start > done:
            spans.append(Span(rank, "compute", "compute", done, start))
        done = end
    return spans


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of intervals, as sorted disjoint intervals."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def length(spans: Iterable[Span]) -> float:
    """Seconds during which at least one of the spans lasts."""
    return sum(end - start for start, end in union((span.start, span.end) for span in spans))


def phases(ranks: Sequence[Step]) -> list[Phases]:
    """The phases of one step of each rank."""
    found = []
    for rank, (step, under_way) in enumerate(zip(ranks, transfers(ranks), strict=True)):
        whole = step.end - step.begin
        waiting = min(length(waits(rank, step)), whole)
        found.append(Phases(rank, whole, whole - waiting, waiting, length(under_way), float(step.sent_bytes)))
    return found


def report(ranks: Sequence[Sequence[Step]], examples: Sequence[int], about: dict[str, Any]) -> dict[str, Any]:
    """The content of the file, schema 1: the phases of all steps after the warm-up, and the spans of the last ones.

    Beside the phases of a step are the seconds since the step before.
    ranks: by rank, all its steps.  examples: by step, those of its global batch.
    """
    steps = [list(step) for step in zip(*ranks, strict=True)]
    measured = []
    for k in range(WARM_UP, len(steps)):
        own, begun, ended = phases(steps[k]), steps[k], steps[k - 1]
        told = [{**asdict(each), "between": begun[each.rank].begin - ended[each.rank].end} for each in own]
        measured.append({"examples": examples[k], "phases": told})
    spans = [
        span
        for step in steps[max(WARM_UP, len(steps) - TRACED) :]
        for rank, under_way in enumerate(transfers(step))
        for span in (*computing(rank, step[rank]), *waits(rank, step[rank]), *under_way)
    ]
    return {
        "schema": 1,
        **about,
        "world": len(ranks),
        "warm_up": WARM_UP,
        "steps": measured,
        "spans": [asdict(span) for span in spans],
    }


def write(text: dict[str, Any], path: Path) -> None:
    """Write a report as a whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
