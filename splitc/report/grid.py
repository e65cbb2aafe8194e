"""Plan a request again on a grid of bandwidth, batch and world, for the page that has no solver."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf, log2
from typing import Any

from splitc.errors import PlacementError
from splitc.ir.plan import Plan
from splitc.ir.program import Program
from splitc.passes.place import Place
from splitc.report.what_if import advice_seconds, changed, choice_text, patient, planned, quantities

_AXES = {"bandwidth": (0.25, 1, 4), "batch": (0.25, 1, 4), "world": (0.5, 1, 2)}
"""What is varied, and how many times it is as it is now."""


def what_if(place: Place, program: Program, plan: Plan) -> dict[str, Any] | None:
    """Return the plans of a grid, those near to now first while there is time, and how many cells are left out.

    plan: of now.  None where SPLITC_ADVICE is 0.
    """
    if not advice_seconds():
        return None
    made, cells, left = patient(planned), [], 0
    now = {each.name: each.now for each in quantities(place, program) if each.name in _AXES}
    for values in _values(place, now):
        found, why = None, ""
        try:
            found = plan if values == now else made(*changed(place, program, **values))
        except TimeoutError:
            left += 1
            continue
        except PlacementError as error:
            why = str(error)
        rate, strategy = (found.samples_per_second, found.strategy) if found else (0.0, "")
        told = {"strategy": strategy, "choice": choice_text(found), "samples_per_second": rate, "why": why}
        cells.append({**values, **told, "flips": bool(found) and strategy != plan.strategy})
    return {"now": now, "of_a_reader": place.global_batch is None, "cells": cells, "left_out": left}


def _values(place: Place, now: dict[str, float]) -> Iterator[dict[str, float]]:
    """Yield the points of the grid, the nearest first."""
    seen = []
    for factors in sorted(product(*_AXES.values()), key=lambda of: sum(abs(log2(each)) for each in of)):
        values = {name: value * each for (name, value), each in zip(now.items(), factors, strict=True)}
        values |= {name: max(1, int(values[name])) for name in ("batch", "world")}
        if values not in seen and values["world"] <= (place.cluster.world or inf):
            seen.append(values)
            yield values
