"""One step as a picture shows it: when each rank computes, waits and has transfers under way, and what they hide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram
from splitc.ir.wire import wire
from splitc.report.figures import Figures
from splitc.runtime.transport.phases import Span, union

_STREAMS = {"compute": "compute", "wait": "waiting", "comm": "communication"}
_KEYS = ("kind", "what", "form")
_MOST = 8_000  # parts of a step that are told apart, over all ranks
_LARGE = 20_000  # ranks times layers, above which no single operations are simulated


def figures_of_step(program: LoweredProgram) -> dict[str, Any]:
    """Return the predicted timeline of a step or a round, None where it is not known, and what travels in a step."""
    plan, simulated = program.plan, program.plan.prediction.spans
    spans = simulated() if simulated is not None and plan.world * len(program.layers) <= _LARGE else ()
    return {"timeline": drawn(plan, spans), "collectives": _collectives(program, spans)}


def of_program(program: LoweredProgram) -> dict[str, Any]:
    """Return what a page shows of a program beside what its plan and its timeline tell."""
    figures, simulated = Figures(program), program.plan.prediction.spans
    layers = [figures.layer(layer) for layer in program.layers]
    return {"layers": layers, "collectives": _collectives(program, simulated() if simulated is not None else ())}


def drawn(plan: Plan, spans: Sequence[Span], seconds: float = 0.0) -> dict[str, Any] | None:
    """Return the timeline of a plan; None without spans.  seconds: of a step or a round; 0: the predicted ones."""
    seconds = seconds or plan.prediction.simulated_seconds * plan.period * plan.accumulate
    roles = [" and ".join(plan.duties(rank)) for rank in range(plan.world)]
    return timeline(spans, seconds, roles) if spans else None


def timeline(spans: Iterable[Span], seconds: float, roles: Sequence[str]) -> dict[str, Any]:
    """Return the last `seconds` of the spans: by ranks that are alike, from where to where, in `parts` of them.

    roles: by rank; ranks of different roles are never alike.
    """
    streams: dict[tuple[int, str], list[Span]] = defaultdict(list)
    ends = dict.fromkeys(range(len(roles)), 0.0)
    for span in spans:
        streams[span.rank, span.stream].append(span)
        ends[span.rank] = max(ends[span.rank], span.end)
    end = max(ends.values())
    start = end - seconds
    for rank in ends:  # until the next step, which is not there
        streams[rank, "wait"].append(Span(rank, "wait", "", ends[rank], end))
    drawn, parts = dict[tuple[Any, ...], list[int]](), max(100, min(1000, _MOST // len(roles)))
    for rank, role in enumerate(roles):
        lane = (_drawn(streams[rank, stream], start, parts / seconds, parts) for stream in _STREAMS)
        drawn.setdefault((role, *lane), []).append(rank)
    lanes = [{"ranks": ranks, **dict(zip(_STREAMS.values(), lane[1:], strict=True))} for lane, ranks in drawn.items()]
    return {"seconds": seconds, "parts": parts, "lanes": lanes}


def _drawn(spans: Iterable[Span], start: float, scale: float, parts: int) -> tuple[int, ...]:
    """Return the ends of what spans cover, one after the other, in parts."""
    pieces = ((max(0, round((s.start - start) * scale)), min(parts, round((s.end - start) * scale))) for s in spans)
    return tuple(int(end) for piece in union((a, b) for a, b in pieces if b > a) for end in piece)


def _collectives(program: LoweredProgram, spans: Iterable[Span]) -> list[dict[str, Any]]:
    """Return what travels in a step by kind: how often, how many bytes all ranks send, and the hidden share.

    That is the share of the time that they are under way for which no rank waits for them; None: not known.
    """
    names: dict[str, tuple[str, ...]] = {}
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for rank in range(program.plan.world):
        for op in (op for op in wire(program, rank) if op.kind != "recv"):
            members = op.ranks if op.kind == "collective" else (rank, *op.ranks)
            key: tuple[str, ...] = (str(op.algorithm or op.kind), str(op.payload.what), op.form)
            names[str(op.payload)] = key
            row = rows.setdefault(key, {**dict(zip(_KEYS, key, strict=True)), "ranks": 0, "count": 0.0, "bytes": 0.0})
            row["ranks"] = max(row["ranks"], len(members))
            row["count"] += op.times / (len(members) if op.kind == "collective" else 1)
            row["bytes"] += op.per_step
    took: dict[str, dict[tuple[str, ...], float]] = {"comm": defaultdict(float), "wait": defaultdict(float)}
    for span in (span for span in spans if span.stream in took and span.name in names):
        took[span.stream][names[span.name]] += span.end - span.start
    for key, row in rows.items():
        row["count"] = round(row["count"], 6)
        row["hidden"] = max(0.0, 1 - took["wait"][key] / took["comm"][key]) if took["comm"][key] else None
    return [*rows.values()]
