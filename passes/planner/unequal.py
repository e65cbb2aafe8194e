"""Unequal clusters: which ranks take which role, and how many examples each has.

`divisions` has consecutive ranks and equal shares.  Where devices differ, or several ranks are on each of several
hosts, a division has variants: the last role on the fastest or the slowest devices, on those with most or least memory
or bandwidth, or on as many hosts as it can have; and shares that are equal, in proportion to speed, or to memory.
Ranks of one kind are alike, so of variants that differ by these alone there is one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from splitc.ir.shares import serve
from splitc.passes.planner.cuts import CutRules
from splitc.passes.planner.divisions import Division
from splitc.passes.planner.options import Space
from splitc.passes.planner.request import Request, smallest
from splitc.passes.planner.search import Search, search

STRUCTURES = 6
"""Roles and groups, the best with consecutive ranks and equal shares, of which the variants are searched too; after
those with a plan come those without one."""


def search_unequal(
    request: Request, rules: CutRules, divided: Sequence[Division], space: Space, part: float = 1.0
) -> Search:
    """`search`, and on unequal clusters that of the variants of the best divisions; of all where none fits."""
    usual = search(request, rules, divided, space, part)
    known = (each.division for each in usual.found)
    best = [*dict.fromkeys(each.roles for each in (*known, *divided))][: STRUCTURES if usual.found else None]
    tried = [each for each in divided if each.roles in best]
    others = [variant for each in tried for variant in variants(request, each)]
    if not others:
        return usual
    more = search(request, rules, others, space, part)
    found = sorted((*usual.found, *more.found), key=lambda each: each.rate, reverse=True)
    bound, every = max(usual.bound, more.bound), len(tried) == len(divided)
    proved = every and bool(found) and bound <= found[0].rate * (1 + 1e-6)
    return Search(tuple(found), bound, proved, more.fullest or usual.fullest)


def variants(request: Request, division: Division) -> Iterator[Division]:
    """Yield the other ways to lay out a division on an unequal cluster; none on an equal one."""
    cluster, ranks = request.cluster, range(request.world)
    if not cluster.unlike and not 1 < (cluster.ranks_per_host or 1) < request.world:
        return
    devices = {rank: request.device_of(rank, division.busy) for rank in ranks}
    speed = {rank: 1 / request.seconds_on(devices[rank], division.roles[0].batch) for rank in ranks}
    memory = {rank: request.memory or devices[rank].memory for rank in ranks}
    link = {rank: cluster.link_of(rank).bandwidth for rank in ranks}
    orders: list[list[int]] = [list(ranks)]
    for numbers in (speed, memory, link):
        orders += [sorted(ranks, key=numbers.__getitem__, reverse=down) for down in (False, True)]
    orders.append(sorted(ranks, key=lambda rank: rank % (cluster.ranks_per_host or 1)))
    found = {(_kinds(request, division), "equal"): division}
    for order in orders:
        roles = tuple(replace(role, ranks=tuple(sorted(order[rank] for rank in role.ranks))) for role in division.roles)
        moved = replace(division, roles=roles)
        kinds = _kinds(request, moved)
        found.setdefault((kinds, "equal"), moved)
        for what, numbers in (("speed", speed), ("memory", memory)):
            if len({numbers[rank] for rank in roles[0].ranks}) > 1:
                found.setdefault((kinds, what), _shared(moved, numbers))
    for each in list(found.values())[1:]:
        least = min(map(smallest, (role.bounds for role in each.roles)))
        if least >= 1 and smallest(each.roles[0].bounds) >= division.order.pieces:
            yield each


def _kinds(request: Request, division: Division) -> object:
    """What tells a layout from others: how many ranks of each kind a host has in each role, and each group."""
    cluster = request.cluster
    hosts: dict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
    groups: Counter[object] = Counter()
    for k, role in enumerate(division.roles):
        for rank in role.ranks:
            hosts[cluster.host_of(rank)][k, cluster.kind_of(rank)] += 1
        for group in role.groups if role.group > 1 else ():
            met = len({cluster.host_of(rank) for rank in group})
            groups[k, met, tuple(sorted(map(cluster.kind_of, group)))] += 1
    return frozenset(Counter(frozenset(each.items()) for each in hosts.values()).items()), frozenset(groups.items())


def _shared(division: Division, numbers: Mapping[int, float]) -> Division:
    """The division with shares in proportion to `numbers` of the ranks; later roles follow where theirs are equal."""
    first, bounds = division.roles[0], list[tuple[int, ...]]()
    for role in division.roles:
        if role.ranks == first.ranks and bounds:
            bounds.append(bounds[0])
        elif bounds and len({numbers[rank] for rank in role.ranks}) == 1:
            bounds.append(serve(bounds[-1], len(role.ranks)))
        else:
            bounds.append(_proportional(division.global_batch, [numbers[rank] for rank in role.ranks]))
    return replace(
        division, roles=tuple(replace(role, bounds=each) for role, each in zip(division.roles, bounds, strict=True))
    )


def _proportional(total: int, parts: Sequence[float]) -> tuple[int, ...]:
    """Bounds of shares of `total` in proportion to `parts`: (12, [1, 2]) -> (0, 4, 12)."""
    return (0, *(round(total * part / sum(parts)) for part in accumulate(parts)))
