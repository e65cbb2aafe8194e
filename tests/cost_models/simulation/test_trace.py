"""Timelines in the format of Chrome's tracing."""

from __future__ import annotations

import json
from typing import Any

from splitc.cost_models.simulation.trace import chrome_trace
from splitc.runtime.transport.phases import Span

SPANS = (
    Span(0, "compute", "conv1", 1.0, 1.5),
    Span(0, "comm", "bucket0", 1.2, 1.4, 100.0),
    Span(0, "comm", "bucket1", 1.3, 1.6, 50.0),
    Span(1, "wait", "cut0", 1.0, 1.1),
)


def complete(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_every_span_is_a_complete_event_in_microseconds_from_the_first_one() -> None:
    events = complete(json.loads(json.dumps(chrome_trace(SPANS))))
    assert [(e["name"], round(e["ts"]), round(e["dur"])) for e in events] == [
        ("conv1", 0, 500_000), ("bucket0", 200_000, 200_000), ("bucket1", 300_000, 300_000), ("cut0", 0, 100_000),
    ]  # fmt: skip
    assert events[1]["args"] == {"bytes": 100.0}


def test_events_of_one_row_never_overlap() -> None:
    events = complete(chrome_trace(SPANS))
    rows: dict[tuple[int, int], float] = {}
    for event in sorted(events, key=lambda e: e["ts"]):
        row = event["pid"], event["tid"]
        assert rows.get(row, 0.0) <= event["ts"]
        rows[row] = event["ts"] + event["dur"]
    assert len({e["tid"] for e in events if e["cat"] == "comm"}) == 2


def test_a_process_is_named_by_rank_role_and_label() -> None:
    trace = chrome_trace(SPANS, {0: "conv"}, "predicted")
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0 conv predicted", "rank 1 predicted"]


def test_no_spans_make_an_empty_trace() -> None:
    assert chrome_trace(()) == {"traceEvents": [], "displayTimeUnit": "ms"}
