"""Plans for fewer ranks, made in advance: under them the ranks that are left go on when others are lost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from splitc.cost_models.calibration.rank_timer import no_progress
from splitc.errors import PlacementError, SplitcError
from splitc.ir.program import LoweredProgram
from splitc.specialise import specialised
from splitc.tuned import Request
from splitc.units import numbered, seconds


@dataclass(frozen=True)
class Rung:
    """The program for a smaller world; None where it has no plan.  text: a line with its price, or with the reason."""

    world: int
    program: LoweredProgram | None
    text: str


def ladder(request: Request, min_world: int, made: dict[int, Rung]) -> list[Rung]:
    """The rungs below what is requested, one rank fewer each, down to `min_world`.  made: those that there are."""
    require_fewer(min_world, whole := request.program().plan.world)
    worlds = range(whole - 1, min_world - 1, -1)
    made.update({world: _rung(request, world) for world in worlds if world not in made})
    return [made[world] for world in worlds]


def require_fewer(min_world: int, world: int) -> None:
    """Raise PlacementError unless a program for `world` ranks can have a ladder down to `min_world`."""
    if not 1 <= min_world < world:
        raise PlacementError(
            f"min_world is {min_world}, and the world {world}: give at least 1 and at most {world - 1}"
            if world > 1
            else f"min_world is {min_world}, and the world 1: take a world of {max(min_world, 1) + 1}"
        )


def _rung(request: Request, world: int) -> Rung:
    """Plan what is requested for `world` ranks, so that training goes on as it was: with the same batches and updates.

    What the plan of all ranks decided of these holds for fewer, and so do its formats on the wire.
    """
    program, whole = request.analysed(), request.program().plan
    settings = replace(request.settings, world=world, global_batch=whole.global_batch, accumulate=whole.accumulate)
    settings = replace(settings, wire=whole.wire, wire_error=0.0, free=())
    try:
        if whole.rounds is not None:
            raise PlacementError("checkpoints of rounds resume under their own plan only")
        lowered = specialised(program, settings, None, None, no_progress)
        if lowered.plan.accumulate != whole.accumulate:  # fewer batches to an update were as fast
            plan = replace(lowered.plan.decided, accumulate=whole.accumulate)
            lowered = specialised(program, settings, plan, None, no_progress)
    except SplitcError as error:
        return Rung(world, None, f"{numbered(world, 'rank')}: no plan: {' '.join(str(error).split())}")
    plan = lowered.plan
    rate = f", {plan.samples_per_second / whole.samples_per_second:.2f} of the samples/s" * bool(whole.step_seconds)
    how = f"{plan.strategy}{', approximate' * (not plan.exact)}"
    return Rung(world, lowered, f"{numbered(world, 'rank')}: {how}, {seconds(plan.step_seconds)} a step{rate}")
