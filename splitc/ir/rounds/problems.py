"""What the rounds of a plan must be."""

from __future__ import annotations

from collections.abc import Iterator

from splitc.ir.plan import Plan
from splitc.runtime.spec import Rounds


def rounds_problems(rounds: Rounds) -> Iterator[str]:
    """Yield a line for each number that makes no sense."""
    if rounds.steps < 1:
        yield f"a round has {rounds.steps} updates; it must have at least 1"
    if not rounds.outer_lr > 0:
        yield f"outer_lr is {rounds.outer_lr:g}; it must be more than 0"
    if not 0 <= rounds.outer_momentum < 1:
        yield f"outer_momentum is {rounds.outer_momentum:g}; it must be at least 0 and less than 1"
    if rounds.nesterov and not rounds.outer_momentum:
        yield "nesterov is a rule for momentum, but outer_momentum is 0"
    if not 1 <= rounds.fragments <= max(rounds.steps, 1):
        yield f"{rounds.fragments} fragments cannot take turns in {rounds.steps} updates; take 1 to {rounds.steps}"
    if not 0 <= rounds.delay < max(rounds.steps, 1):
        yield f"delay is {rounds.delay}, but a fragment arrives before it leaves again, {rounds.steps} updates later"
    if rounds.through not in ("peers", "server"):
        yield f"through is {rounds.through!r}; it must be peers or server"
    if (patience := rounds.patience) is not None:
        if not patience > 0 or rounds.through != "server" or not rounds.delay:
            yield f"patience is {patience:g}; it must be more than 0 seconds, with through=server and a delay"
        elif rounds.delay >= (turn := rounds.steps // rounds.fragments):
            yield f"patience lets one fragment travel at a time, one in {turn} updates; delay must be less than that"
    if (mixing := rounds.mixing) is not None and (not 0 <= mixing <= 1 or (mixing and not rounds.delay)):
        yield f"mixing is {mixing:g}; it must be 0 to 1, and 0 without a delay, which leaves nothing to mix"


def problems_in(plan: Plan, rounds: Rounds) -> Iterator[str]:
    """Yield what contradicts the rounds in a plan."""
    world, unit = plan.world, rounds.unit
    yield from (f"rounds: {problem}" for problem in rounds_problems(rounds))
    if unit < 1 or world % unit:
        yield f"rounds: units of {unit} ranks do not divide a world of {world}"
    else:
        yield from _units_problems(plan, world // unit)
    if plan.synchronised and unit == 1:
        yield "rounds: synchronised is true, but in units of 1 rank there is no other to normalise with"
    if plan.servers:
        yield "rounds: servers sum gradients in every step; leave rounds or servers out"
    if plan.microbatches > 1:
        yield f"microbatches is {plan.microbatches}, but units of a round run their batches whole: take 1"


def _units_problems(plan: Plan, units: int) -> Iterator[str]:
    """Yield where the units of a plan are no worlds of their own, alike in their ranks."""
    unit, bounds = plan.world // units, dict[str, tuple[int, ...]]()
    if idle := set(range(plan.world)).difference(*plan.roles.values()):
        yield f"rounds: rank {min(idle)} has no role, but each rank trains in its unit"
    for role, ranks in plan.roles.items():
        first = [rank for rank in ranks if rank < unit]
        bounds[role] = plan.batch_offsets.get(role, ())[:: len(first) or 1]
        if [*ranks] != [rank + k * unit for k in range(units) for rank in first]:
            yield f"rounds: role {role} is not on the same ranks of each unit of {unit}, which trains the whole model"
        elif len(first) % plan.grouping(role).size:
            yield f"rounds: units of {unit} ranks are divided by groups; give them the size of a group, or more"
        elif bounds[role] != bounds[plan.reader]:
            yield f"rounds: role {role} has other examples of a unit than {plan.reader}"
