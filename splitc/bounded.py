"""Choose the formats of numbers on the wire that make steps shortest and keep the errors of gradients below a bound.

The planner's price proposes, and what is measured decides (`verify/rounding.py`): where the best plan is above the
bound, the kind of numbers with the largest error of its own gets the next format, and the planner is asked again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from splitc.errors import PlacementError
from splitc.ir.prediction import Candidate
from splitc.ir.program import LoweredProgram
from splitc.ir.short_wire import wire_text
from splitc.runtime.transport.formats import AS_COMPUTED, BLOCK, EXACT, FORMATS, Wire
from splitc.specialise import Settings
from splitc.verify.rounding import Rounding

_BATCHES, _ALONE = 20, 4  # that a plan is measured on, and one kind of its numbers by itself
_EQUAL = 0.01  # of a rate, for which no coarser format is taken


def bounded(
    settings: Settings, made: Callable[[Settings], LoweredProgram], measure: Callable[[LoweredProgram, int], Rounding]
) -> LoweredProgram:
    """The program of the best plan below `settings.wire_error`; its prediction has the exact one beside it.

    made: the best program.  measure: a program, on so many batches.  Raises PlacementError where training is
    approximate whatever travels, and where the formats that were asked for are not below the bound by themselves.
    """
    best_for = cache(lambda wire: made(replace(settings, wire=wire)))
    fixed, limit, exact = settings.wire, settings.wire_error, best_for(AS_COMPUTED)
    if not exact.plan.exact:
        raise PlacementError(f"wire_error: {exact.plan.strategy} is approximate whatever travels; leave out wire_error")
    by_price = sorted(FORMATS, key=lambda name: (FORMATS[name].nbytes(BLOCK), FORMATS[name].traffic))
    first = {kind: replace(settings, wire=replace(fixed, **{kind: by_price[0]})) for kind in settings.free}
    left = {kind: [*by_price, EXACT] for kind, asked in first.items() if not asked.place().problems()}
    while True:
        best = _fastest(best_for, fixed, left)
        if fixed.is_exact and exact.plan.samples_per_second >= (1 - _EQUAL) * best.plan.samples_per_second:
            best, rows = exact, [_row(exact, f"short numbers are no faster, or change gradients by {limit:g} or more")]
            break
        found, text = measure(best, _BATCHES), wire_text(best.plan.wire)
        changes = f"with {text} on the wire the gradient of {found.worst} changes the most, by {found.error:.1e}"
        if found.error < limit:
            rows = [_row(exact), _row(best, f"{changes}; rounding {found.added}", found.error)]
            break
        formats = {kind: name for kind in left if (name := getattr(best.plan.wire, kind)) != EXACT}
        if not formats:
            finer = f"ask for finer formats, or wire_error={1.1 * found.error:.1e}"
            raise PlacementError(f"wire_error: {changes}, not by less than {limit:g}; {finer}")
        alone = {kind: replace(AS_COMPUTED, **{kind: name}) for kind, name in formats.items()}
        errors = {k: measure(replace(best, plan=replace(best.plan, wire=w)), _ALONE).error for k, w in alone.items()}
        kind = max(errors, key=lambda kind: errors[kind])
        left[kind] = left[kind][left[kind].index(formats[kind]) + 1 :]
    return replace(best, plan=replace(best.plan, prediction=replace(best.plan.prediction, on_wire=tuple(rows))))


def _fastest(
    best_for: Callable[[Wire], LoweredProgram], fixed: Wire, left: Mapping[str, Sequence[str]]
) -> LoweredProgram:
    """The fastest program, each kind in the longest numbers that are as fast.  left: formats, the cheapest first."""
    best = best_for(replace(fixed, **{kind: names[0] for kind, names in left.items()}))
    for kind, names in left.items():
        by_size = {FORMATS[name].size if name in FORMATS else math.inf: name for name in reversed(names)}
        others = [replace(best.plan.wire, **{kind: name}) for name in by_size.values()]
        least = (1 - _EQUAL) * best.plan.samples_per_second
        best = next(each for each in map(best_for, others) if each.plan.samples_per_second >= least)
    return best


def _row(program: LoweredProgram, why: str = "", error: float = 0.0) -> Candidate:
    plan = program.plan
    prices = plan.step_seconds, plan.samples_per_second, plan.global_batch
    return Candidate(plan.strategy, *prices, plan.exact, True, why, plan.all_roles, 0.0, plan.microbatches, error)
