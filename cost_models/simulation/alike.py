"""Ranks whose timelines are the same, of which one is simulated.

A plan whose roles all fall into n equal units, each with its own examples, does the same in every unit: messages stay
inside of it, and a collective over several units takes each of them as long.

    conv 0..5, fc 6 and 7   ->   conv 0..2 and fc 6 stand for conv 3..5 and fc 7
"""

from __future__ import annotations

import math
from itertools import pairwise

from splitc.ir.cluster import Cluster
from splitc.ir.features import features
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram
from splitc.ir.wire import wire


def representatives(plan: Plan, cluster: Cluster) -> tuple[int, ...]:
    """Rank -> the one that is simulated for it: that of the first unit."""
    each = tuple(range(plan.world))
    exchanges = plan.all_reduce != "backend" or any(f.concerns(plan) for f in features())
    nested = cluster.ranks_per_host or cluster.ranks_per_site
    if exchanges or cluster.unlike or nested or {*each} != {*sum(plan.roles.values(), ())}:
        return each
    units = math.gcd(*(len(ranks) // plan.grouping(role).size for role, ranks in plan.roles.items()))
    found: dict[int, int] = {}
    for role, ranks in plan.roles.items():
        size, bounds = len(ranks) // units, plan.batch_offsets[role]
        shares = [b - a for a, b in pairwise(bounds)]
        if bounds[-1] % units or shares != units * shares[:size]:
            return each
        for k, rank in enumerate(ranks):
            if found.setdefault(rank, ranks[k % size]) != ranks[k % size]:
                return each
    return tuple(found[rank] for rank in each)


def num_transfers(program: LoweredProgram, cluster: Cluster) -> int:
    """What the simulated ranks begin in a step, if all ranks of a role begin as much as its first one."""
    plan, alike = program.plan, set(representatives(program.plan, cluster))
    return sum(len(alike.intersection(ranks)) * len(wire(program, ranks[0])) for ranks in plan.all_roles.values())
