"""Find the batches for which another branch on the batch size computes the same as the traced one.

`if x.size(0) >= 64: x = x.contiguous()` guards a trace of 32 examples against 64.  The model is traced with the nearest
batch that the guards leave out; where the graph agrees with the model there, it stands for all batches of that trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from splitc.capture.capture import capture
from splitc.capture.example import Example
from splitc.errors import CaptureError
from splitc.ir.graph import is_region
from splitc.ir.program import Program
from splitc.runtime.spec import BatchGuard

_MOST_TRACES = 4
_LARGEST = 128  # examples of a batch on which the model runs, or four times the example's

Ranges = tuple[tuple[int, int | None], ...]


def with_other_branches(
    program: Program, model: object, example: Example, agree: Callable[[int], bool]
) -> tuple[BatchGuard, ...]:
    """The guards that are left.  agree: whether model and graph compute the same on so many examples."""
    allowed = _common(program.guards)
    for _ in range(_MOST_TRACES if not any(map(is_region, program.graph.nodes)) else 0):
        edges = {n for a, b in allowed for n in (a - 1, 0 if b is None else b + 1)}
        batch = min((n for n in edges if n > 0), key=lambda n: abs(n - program.batch), default=None)
        if batch is None or batch > max(_LARGEST, 4 * program.batch):
            break
        rows = example.of([k % example.batch for k in range(batch)])
        try:
            other = _common(capture(model, rows, program.name, program.autocast).guards)  # type: ignore[arg-type]
        except CaptureError:
            break
        if not any(a <= batch <= (b or batch) for a, b in other) or not agree(batch):
            break
        allowed = _merged((*allowed, *other))
    if allowed == ((1, None),) or not program.guards:
        return ()
    return program.guards if allowed == _common(program.guards) else (BatchGuard(allowed, program.guards[0].source),)


def _common(guards: Sequence[BatchGuard]) -> Ranges:
    """The batches that all guards allow."""
    found: Ranges = ((1, None),)
    for guard in guards:
        pairs = ((max(a, c), min((n for n in (b, d) if n), default=None)) for a, b in found for c, d in guard.ranges)
        found = tuple((first, last) for first, last in pairs if last is None or first <= last)
    return found


def _merged(ranges: Ranges) -> Ranges:
    """The same batches, in order and as few ranges."""
    found: list[tuple[int, int | None]] = []
    for first, last in sorted(ranges, key=lambda each: each[0]):
        before = found[-1] if found else None
        if before is None or (before[1] is not None and before[1] + 1 < first):
            found.append((first, last))
        else:
            found[-1] = before[0], None if before[1] is None or last is None else max(before[1], last)
    return tuple(found)
