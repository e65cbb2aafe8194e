"""Timelines in the format of Chrome's tracing."""

from __future__ import annotations

import json
from dataclasses import replace
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


def rows_are_disjoint(trace: dict[str, Any]) -> None:
    """Raise where two events of a row overlap by a nanosecond."""
    rows: dict[tuple[int, int], float] = {}
    for event in sorted(complete(trace), key=lambda e: e["ts"]):
        row = event["pid"], event["tid"]
        assert rows.get(row, 0.0) <= event["ts"] + 1e-3
        rows[row] = event["ts"] + event["dur"]


def test_every_span_is_a_complete_event_in_microseconds_from_the_first_one() -> None:
    events = complete(json.loads(json.dumps(chrome_trace({"": SPANS}))))
    assert [(e["name"], round(e["ts"]), round(e["dur"])) for e in events] == [
        ("conv1", 0, 500_000), ("bucket0", 200_000, 200_000), ("bucket1", 300_000, 300_000), ("cut0", 0, 100_000),
    ]  # fmt: skip
    assert events[1]["args"] == {"bytes": 100.0}


def test_events_of_one_row_never_overlap() -> None:
    trace = chrome_trace({"": SPANS})
    rows_are_disjoint(trace)
    assert len({e["tid"] for e in complete(trace) if e["cat"] == "comm"}) == 2


def test_a_process_is_named_by_rank_role_and_label() -> None:
    trace = chrome_trace({"predicted": SPANS}, {0: "conv"})
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0 conv predicted", "rank 1 predicted"]


def test_no_spans_make_an_empty_trace() -> None:
    assert chrome_trace({"": ()}) == {"traceEvents": [], "displayTimeUnit": "ms"}


def test_of_each_rank_the_prediction_is_above_what_was_measured_and_both_begin_together() -> None:
    late = [replace(span, start=span.start + 7.0, end=span.end + 7.5) for span in SPANS]
    trace = json.loads(json.dumps(chrome_trace({"predicted": SPANS, "measured": late}, {0: "conv"})))
    of = {"process_name": "name", "process_sort_index": "sort_index"}
    about = {(e["pid"], e["name"]): e["args"][of[e["name"]]] for e in trace["traceEvents"] if e["name"] in of}
    order = sorted({pid for pid, _ in about}, key=lambda pid: about[pid, "process_sort_index"])
    names = [about[pid, "process_name"] for pid in order]
    assert names == ["rank 0 conv predicted", "rank 0 conv measured", "rank 1 predicted", "rank 1 measured"]
    rows_are_disjoint(trace)
    assert all(min(e["ts"] for e in complete(trace) if e["pid"] == pid) == 0.0 for pid in order[:2])


def test_an_arrow_leads_from_each_measured_send_to_its_receive() -> None:
    spans = [
        *(Span(0, "comm", "send to rank 1", at, at + 1.0, 8.0) for at in (0.0, 2.0)),
        *(Span(1, "comm", "receive from rank 0", at, at + 1.0, 8.0) for at in (0.0, 2.0)),
        Span(1, "wait", "receive from rank 0", 0.0, 1.0),
        Span(1, "comm", "send to rank 0", 3.0, 4.0, 8.0),
        Span(0, "comm", "receive from rank 1", 3.0, 4.0, 8.0),
    ]
    events = chrome_trace({"predicted": SPANS, "measured": spans})["traceEvents"]
    ends = [{e["id"]: (e["pid"], e["ts"]) for e in events if e["ph"] == kind} for kind in "sf"]
    assert [sorted(end.values()) for end in ends] == [[(1, 0.0), (1, 2e6), (3, 3e6)], [(1, 3e6), (3, 0.0), (3, 2e6)]]
    assert all(ends[0][arrow][1] == ends[1][arrow][1] for arrow in ends[0])
    slices = {(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "X" and e["cat"] == "comm"}
    assert all((e["pid"], e["tid"], e["ts"]) in slices for e in events if e["ph"] in "sf")
