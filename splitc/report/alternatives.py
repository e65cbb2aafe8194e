"""Price every placement of some layers, with the rest of the plan chosen again around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase

from splitc.errors import PlacementError
from splitc.ir.names import near_name
from splitc.ir.placements import SPLITS, SYNCS, Placement
from splitc.ir.plan import Plan
from splitc.ir.program import Program
from splitc.ir.roles import has_convolutions, role_names
from splitc.passes.place import Place
from splitc.passes.planner.registry import STRATEGIES
from splitc.passes.planner.strategy import strategy_named
from splitc.report.what_if import choice_text, simulated_figures, simulated_step
from splitc.strategies.auto import Auto


@dataclass(frozen=True)
class Alternative:
    """The best plan in which some layers are placed as `pin` asks.

    plan: its strategy and the sizes of its roles.  step_seconds, samples_per_second: simulated.  sent_bytes: of the
    busiest rank.  limit: "compute", or "network" where the slowest rank waits longer than it computes.  chosen: the
    plan is the one that is chosen without the pin.  why: there is no plan; the figures are 0 then.
    """

    placement: str
    pin: Placement
    plan: str = ""
    step_seconds: float = 0.0
    samples_per_second: float = 0.0
    sent_bytes: float = 0.0
    limit: str = ""
    chosen: bool = False
    why: str = ""


def alternatives(place: Place, program: Program, pattern: str) -> Iterator[Alternative]:
    """Yield every placement of the layers that match `pattern`; where none of them is chosen, that one first.

    Raises PlacementError when no layer matches, and when there is no plan without a further pin.
    """
    asked_of = set(matching_layers(program, pattern))
    chosen = place.run(program).plan
    within = [other for other in place.pins if asked_of.issuperset(matching_layers(program, other))]
    others = {other: asked for other, asked in place.pins.items() if other not in within}
    found = []
    for name, pin, strategy in _placements(program, place.world):
        parts = {part: None for part, value in asdict(pin).items() if value is not None}
        whole = {each: Placement(role=asked) if isinstance(asked, str) else asked for each, asked in place.pins.items()}
        inside = {each: replace(whole[each], **parts) for each in within if each != pattern}
        pinned = replace(place, pins={**others, **inside, pattern: pin})
        tried = [pinned]
        if isinstance(place.strategy, Auto) and strategy in STRATEGIES:
            tried.append(replace(pinned, strategy=strategy_named(strategy)().in_order_of(place.strategy)))
        found.append(_priced(Alternative(name, pin), tried, program, chosen))
    if not any(each.chosen for each in found):
        yield _priced(Alternative("as chosen", Placement()), [place], program, chosen)
    yield from found


def matching_layers(program: Program, pattern: str) -> list[str]:
    """Return the names of the layers that match; raises PlacementError, with near names, when there are none."""
    names = [layer.name for layer in program.layers]
    if matching := [name for name in names if fnmatchcase(name, pattern)]:
        return matching
    listed = ", ".join(names if len(names) < 9 else [*names[:8], "..."])
    raise PlacementError(f"no layer matches {pattern!r}; {near_name(pattern, names)}the layers are {listed}")


def _placements(program: Program, world: int) -> Iterator[tuple[str, Placement, str]]:
    """Yield what a pin may ask for, and the strategy that tells best why it is not possible."""
    yield "whole, all_reduce", Placement(holding="replicated", sync="all_reduce", group=1), "data_parallel"
    for sync in (sync for sync in SYNCS if sync in STRATEGIES):
        yield sync, Placement(sync=sync), sync
    yield "role all", Placement(role="all"), "data_parallel"
    for role in role_names(2, has_convolutions(program)):
        yield f"role {role}", Placement(role=role), "layer_separation"
    for size in (size for size in range(2, world + 1) if world % size == 0):
        for split in SPLITS:
            yield f"{split}, groups of {size}", Placement(holding="sharded", split=split, group=size), "modulo_shard"
        yield f"whole, groups of {size}", Placement(holding="replicated", group=size), "modulo_shard"


def _priced(found: Alternative, tried: Sequence[Place], program: Program, chosen: Plan) -> Alternative:
    """Return it with the figures of the first request that has a plan, or with the reason of the last."""
    for place in tried:
        try:
            placed = place.run(program)
        except PlacementError as error:
            found = replace(found, why=str(error))
            continue
        plan, timeline = placed.plan, simulated_step(placed, place.cluster)
        slowest = max(timeline.phases, key=lambda phases: phases.step)
        limit = "network" if slowest.waiting > slowest.compute else "compute"
        found = replace(found, plan=choice_text(plan), limit=limit, chosen=plan.hash == chosen.hash, why="")
        return replace(found, **simulated_figures(plan, timeline))
    return found
