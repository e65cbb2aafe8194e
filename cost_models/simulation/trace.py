"""Write timelines as Chrome trace JSON for https://ui.perfetto.dev: a process a rank, a track a category."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from splitc.runtime.transport.phases import Span

_STREAMS = ("compute", "wait", "comm")


def chrome_trace(spans: Iterable[Span], roles: Mapping[int, str] | None = None, label: str = "") -> dict[str, Any]:
    """Return the spans of all ranks as one trace; timestamps are in microseconds from the first span.

    roles: rank -> the role shown in its name.  label: suffix of the ranks' names, to tell two timelines apart.
    Overlapping transfers of a rank get separate rows.
    """
    spans = sorted(spans, key=lambda span: (span.rank, span.start, -span.end))
    origin = min((span.start for span in spans), default=0.0)
    rows: dict[tuple[int, str], list[float]] = {}  # (rank, stream) -> the time from which each of its rows is free
    events: list[dict[str, Any]] = []
    for rank in dict.fromkeys(span.rank for span in spans):
        name = " ".join(filter(None, (f"rank {rank}", (roles or {}).get(rank, ""), label)))
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
    for span in spans:
        free = rows.setdefault((span.rank, span.stream), [])
        row = next((k for k, until in enumerate(free) if until <= span.start), len(free))
        if row == len(free):
            free.append(0.0)
            events.append(_row_name(span, row))
        free[row] = span.end
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.stream,
                "pid": span.rank,
                "tid": _row(span.stream, row),
                "ts": (span.start - origin) * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {"bytes": span.nbytes} if span.nbytes else {},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _row(stream: str, row: int) -> int:
    """Return the number of a row; streams are sorted one below the other."""
    return 1000 * _STREAMS.index(stream) + row


def _row_name(span: Span, row: int) -> dict[str, Any]:
    name = span.stream if row == 0 else f"{span.stream} {row + 1}"
    return {"ph": "M", "name": "thread_name", "pid": span.rank, "tid": _row(span.stream, row), "args": {"name": name}}
