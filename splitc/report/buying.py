"""Plan a request again with what could be bought or changed, and say what each is worth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from splitc import units
from splitc.cost_models.memory.memory_check import require_memory_on
from splitc.errors import PlacementError
from splitc.ir.program import Program
from splitc.passes.place import Place
from splitc.passes.rewriting import lower_unchecked
from splitc.report.what_if import changed, choice_text, quantities, simulated_step
from splitc.strategies.auto import Auto

LEAST = 0.02
"""The gain below which nothing is advised."""

_CARDS = tuple(gbit * 1e9 / 8 for gbit in (0.1, 1, 2.5, 5, 10, 25, 50, 100, 200, 400, 800))  # bytes/s
_FASTER = 2  # cards that are tried


@dataclass(frozen=True)
class Change:
    """What a change of a request is worth.

    plan: the one that wins then.  samples_per_second: simulated.  gain: over the
    present plan, 0.1 for a tenth more.  flips: it is another plan.  why: there is none.
    """

    what: str
    plan: str = ""
    samples_per_second: float = 0.0
    gain: float = 0.0
    flips: bool = False
    why: str = ""


def changes(place: Place, program: Program) -> tuple[Change, list[Change]]:
    """The present plan, and what each change is worth, the best first.  Raises PlacementError where nothing fits."""
    now, found = _with("now", place, program), []
    for what, parts in _others(place, program):
        try:
            each = _with(what, *changed(place, program, **parts))
            gain = each.samples_per_second / now.samples_per_second - 1
            words = 1 if "world" in parts else None  # of the text: sizes of roles are others anyway
            found.append(replace(each, gain=gain, flips=each.plan.split()[:words] != now.plan.split()[:words]))
        except PlacementError as error:
            found.append(Change(what, why=str(error)))
    return now, sorted(found, key=lambda each: -each.gain)


def _with(what: str, place: Place, program: Program) -> Change:
    placed = place.run(program)
    require_memory_on(lower_unchecked(placed), place.cluster, place.memory)
    rate = placed.plan.global_batch / simulated_step(placed, place.cluster).step_seconds
    return Change(what, choice_text(placed.plan), rate)


def _others(place: Place, program: Program) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what can be changed by itself: faster cards, a host, another plan, memory."""
    cluster, (bandwidth, _, _, memory, _) = place.cluster, quantities(place, program)
    for rate in [rate for rate in _CARDS if rate > 1.2 * bandwidth.now][:_FASTER]:
        yield f"network cards of {units.bandwidth(rate)}", {"bandwidth": rate}
    world = place.world + (cluster.ranks_per_host or 1)
    if cluster.ranks_per_host or not cluster.ranks_share_device:
        larger = replace(cluster, world=cluster.world and max(cluster.world, world))
        yield f"one more host ({units.numbered(world, 'rank')})", {"cluster": larger, "world": world}
    if not isinstance(place.strategy, Auto) or place.pins:
        yield "the plan that auto chooses", {"strategy": Auto(), "pins": {}}
    yield f"{units.nbytes(2 * memory.now)} of memory a rank", {"memory": 2 * memory.now, "fits": None}
