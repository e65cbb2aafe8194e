"""Find the batches for which another branch on the batch size computes the same as the traced one.

`if x.size(0) >= 64: x = x.contiguous()` guards a trace of 32 examples against 64.  The model is traced with the nearest
batch that the guards leave out; where the graph agrees with the model there, it stands for all batches of that trace.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from splitc.capture.capture import capture
from splitc.capture.example.example import Example
from splitc.capture.trace.batch_guards import ranges_of
from splitc.ir.program import Program
from splitc.runtime.generators import same_generators
from splitc.runtime.spec import BatchGuard

_TRACES = 4
_EXAMPLES = 128  # of a batch on which the model runs, or four times the example's


def with_other_branches(
    program: Program,
    model: nn.Module,
    example: Example,
    compare: Callable[[list[dict[str, Tensor]]], object],
    draw: Callable[[int], dict[str, Tensor]],
) -> tuple[BatchGuard, ...]:
    """The guards that are left.  compare: raises where model and graph differ on some batches; draw: makes one."""
    traces = [program.guards]

    def allows(batch: int) -> bool:
        return any(all(guard.allows(batch) for guard in guards) for guards in traces)

    near = sorted(range(1, max(_EXAMPLES, 4 * program.batch) + 1), key=lambda n: abs(n - program.batch))
    while len(traces) < _TRACES and (batch := next((n for n in near if not allows(n)), 0)):
        try:
            rows = example.of([k % example.batch for k in range(batch)])
            other = capture(model, rows, program.name, program.autocast)
            with same_generators():
                compare([draw(batch), draw(batch)])
        except Exception:  # the model does not run there, or computes something else
            break
        traces.append(other.guards)
    if len(traces) == 1:
        return program.guards
    ranges = ranges_of(allows, program.batch)
    return () if ranges == ((1, None),) else (BatchGuard(ranges, program.guards[0].source),)
