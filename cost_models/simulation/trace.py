"""Write timelines as Chrome trace JSON for https://ui.perfetto.dev: a process a rank, a track a category.

Several timelines of the same ranks begin together, one rank's below each other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from splitc.runtime.transport.phases import Span

_STREAMS = ("compute", "wait", "comm")  # one below the other


def chrome_trace(timelines: Mapping[str, Iterable[Span]], roles: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Return timelines as one trace; timestamps are in microseconds from the first span of each.

    timelines: what the ranks' names end with, "predicted" say -> spans of all ranks.  roles: rank -> the role shown in
    its name.  Overlapping transfers of a rank get separate rows; arrows lead from measured sends to their receives.
    """
    events: list[dict[str, Any]] = []
    messages: dict[tuple[object, ...], int] = {}
    for k, (label, spans) in enumerate(timelines.items()):
        ordered = sorted(spans, key=lambda span: (span.rank, span.start, -span.end))
        processes = {span.rank: span.rank * len(timelines) + k for span in ordered}
        for rank, process in processes.items():
            name = " ".join(filter(None, (f"rank {rank}", (roles or {}).get(rank, ""), label)))
            events += [_about("process_name", name, pid=process), _about("process_sort_index", process, pid=process)]
        events += _events(ordered, processes, messages)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(
    spans: list[Span], processes: Mapping[int, int], messages: dict[tuple[object, ...], int]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one timeline and what is in them.  messages: their numbers, each of which names an arrow."""
    origin = min((span.start for span in spans), default=0.0)
    rows: dict[tuple[int, str], list[float]] = {}  # (rank, stream) -> the time from which each of its rows is free
    seen: Counter[tuple[object, ...]] = Counter()
    for span in spans:
        free = rows.setdefault((span.rank, span.stream), [])
        row = next((k for k, until in enumerate(free) if until <= span.start), len(free))
        at: dict[str, float] = {"pid": processes[span.rank], "tid": 1000 * _STREAMS.index(span.stream) + row}
        if row == len(free):
            free.append(0.0)
            yield _about("thread_name", span.stream if row == 0 else f"{span.stream} {row + 1}", **at)
        free[row] = span.end
        at["ts"] = (span.start - origin) * 1e6
        args, seconds = {"bytes": span.nbytes} if span.nbytes else {}, span.end - span.start
        yield {"ph": "X", "name": span.name, "cat": span.stream, **at, "dur": seconds * 1e6, "args": args}
        if message := span.stream == "comm" and re.fullmatch(r"(send to|receive from) rank (\d+)", span.name):
            ranks = span.rank, int(message[2])
            key = ("s", *ranks) if message[1] == "send to" else ("f", *reversed(ranks))
            seen[key] += 1
            number = messages.setdefault((*key[1:], seen[key], id(spans)), len(messages))
            yield {"ph": key[0], "bp": "e", "name": "message", "cat": "message", "id": number, **at}


def _about(what: str, value: object, **at: float) -> dict[str, Any]:
    """Return a name of a process or of a row of it, or its place among others."""
    return {"ph": "M", "name": what, **at, "args": {what.partition("_")[2]: value}}
