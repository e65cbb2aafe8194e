"""Write timelines as Chrome trace JSON for https://ui.perfetto.dev: a process a rank, a track a category.

Several timelines of the same ranks begin together, one rank's below each other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from splitc.runtime.transport.phases import Span

_STREAMS = ("compute", "wait", "comm")


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
            events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
            events.append({"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}})
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
        at: dict[str, float] = {"pid": processes[span.rank], "tid": _row(span.stream, row)}
        if row == len(free):
            free.append(0.0)
            name = span.stream if row == 0 else f"{span.stream} {row + 1}"
            yield {"ph": "M", "name": "thread_name", **at, "args": {"name": name}}
        free[row] = span.end
        at["ts"] = (span.start - origin) * 1e6
        args = {"bytes": span.nbytes} if span.nbytes else {}
        yield {
            **{"ph": "X", "name": span.name, "cat": span.stream, **at},
            **{"dur": (span.end - span.start) * 1e6, "args": args},
        }
        if message := span.stream == "comm" and re.fullmatch(r"(send to|receive from) rank (\d+)", span.name):
            ranks = span.rank, int(message[2])
            key = ("s", *ranks) if message[1] == "send to" else ("f", *reversed(ranks))
            seen[key] += 1
            number = messages.setdefault((*key[1:], seen[key], id(spans)), len(messages))
            yield {"ph": key[0], "bp": "e", "name": "message", "cat": "message", "id": number, **at}


def _row(stream: str, row: int) -> int:
    """Return the number of a row; streams are sorted one below the other."""
    return 1000 * _STREAMS.index(stream) + row
