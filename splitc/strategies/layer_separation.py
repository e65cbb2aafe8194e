"""Roles on ranks of their own, two or more, as conv ranks and fc ranks (Stanza, Wu et al. 2018)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Annotated

from splitc.errors import PlacementError
from splitc.ir.decode import Limit
from splitc.ir.roles import MAX_STAGES
from splitc.ir.shares import serve
from splitc.passes.planner.divisions import FEW, Division, Role, counts, group_sizes
from splitc.passes.planner.pin_checks import PinWords, unmet_in_groups
from splitc.passes.planner.request import Request
from splitc.passes.planner.strategy import Count, Strategy

_RANKS = Limit(
    lambda text: bool(re.fullmatch(r"[1-9]\d*(\+[1-9]\d*)+", text)),
    "of how many ranks each role has, as in ranks=4+2+1",
)


@dataclass(frozen=True)
class LayerSeparation(Strategy):
    """Conv ranks and fc ranks, disjoint (Stanza 3-4).  n_c, n_f: how many of each.

    ranks: for more than two roles, how many each one has, as "4+2+1" (Stanza 10).
    """

    name = "layer_separation"
    pins = PinWords(stages=MAX_STAGES, divides=True)
    n_c: Count | None = None
    n_f: Count | None = None
    ranks: Annotated[str, _RANKS] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks is not None and (self.n_c is not None or self.n_f is not None):
            raise PlacementError("layer_separation: ranks says how many each role has; leave n_c and n_f out")

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many ranks each role has, where that was said; none else."""
        return () if self.ranks is None else tuple(map(int, self.ranks.split("+")))

    @property
    def cut(self) -> str:
        return "in their order leaves parameters in every role" if self.sizes else super().cut

    def divisions(self, request: Request) -> Iterable[Division]:
        pinned = any(pin.only_in_groups for pin in request.pins.values())
        for sizes in self._role_sizes(request.world):
            division = separated(request, sizes)
            yield division
            if not pinned:
                continue
            choices = [[1, *(k for k in _pinned_sizes(request, size) if k > 1 and size % k == 0)] for size in sizes[1:]]
            for groups in product(*choices):
                if max(groups) > 1:
                    roles = (replace(role, group=k) for role, k in zip(division.roles[1:], groups, strict=True))
                    yield Division((division.roles[0], *roles))

    def _role_sizes(self, world: int) -> list[tuple[int, ...]]:
        if self.sizes:
            return [self.sizes]
        if self.n_c is not None:
            return [(self.n_c, world - self.n_c)]
        return [(world - n_f, n_f) for n_f in ([self.n_f] if self.n_f is not None else counts(world))]

    def impossible(self, request: Request) -> list[str]:
        return super().impossible(request) + unseparated(request, self.n_c, self.n_f, self.sizes)

    def unfollowed(self, request: Request) -> list[str]:
        if not any(pin.only_in_groups for pin in request.pins.values()):
            return []
        ranks = (self.sizes or (request.world - (self.n_c or 0),))[-1] if self.n_f is None else self.n_f
        sizes = _pinned_sizes(request, ranks)
        if not any(ranks % size == 0 for size in sizes):
            role = request.role_names(2)[1]
            return [f"pins ask for groups of {sizes[0]} ranks, which those of {role} cannot form"]
        return unmet_in_groups(request, ranks, sizes)


def separated(request: Request, sizes: tuple[int, ...]) -> Division:
    """Roles of so many consecutive ranks."""
    starts, bounds = [0, *accumulate(sizes)], accumulate(sizes[1:], serve, initial=request.bounds(sizes[0]))
    ranks = [tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=False)]
    return Division(tuple(Role(*each) for each in zip(ranks, bounds, strict=True)))


def separations_in_groups(request: Request) -> Iterator[Division]:
    """Two roles of any numbers of ranks, the last one also in groups."""
    for n_f in counts(request.world):
        division = separated(request, (request.world - n_f, n_f))
        yield division
        groups = group_sizes(n_f)
        for size in groups if request.world <= FEW else groups[-1:]:
            yield Division((*division.roles[:-1], replace(division.roles[-1], group=size)))


def unseparated(
    request: Request, n_c: int | None = None, n_f: int | None = None, sizes: tuple[int, ...] = ()
) -> list[str]:
    """Why no numbers of ranks can meet the request."""
    world, roles = request.world, " and ".join(request.role_names(2))
    owners = [n for n, held in request.held.items() if any(h.parameter for h in held)]
    why = []
    if sizes and sum(sizes) != world:
        why.append(f"roles of {' + '.join(map(str, sizes))} ranks are {sum(sizes)}, but the world has {world}")
    elif world < 2:
        why.append(f"a world of {world} cannot be divided into {roles} ranks; it needs 2 ranks")
    elif n_c is not None and n_f is not None and n_c + n_f != world:
        why.append(f"n_c = {n_c} and n_f = {n_f} are {n_c + n_f} ranks, but the world has {world}")
    elif max(n_c or 1, n_f or 1) >= world:
        name, value = ("n_c", n_c) if (n_c or 1) >= world else ("n_f", n_f)
        why.append(f"{name} = {value} leaves no rank of {world} for the other role")
    if not owners:
        why.append("the model has no parameters, so no layers to separate")
    elif sizes and len(owners) < len(sizes):
        why.append(f"{len(owners)} layers have parameters, which is too few for {len(sizes)} roles")
    elif len(owners) == 1:
        why.append(f"only one layer, {owners[0]}, has parameters; both roles need at least one")
    return why


def _pinned_sizes(request: Request, ranks: int) -> list[int]:
    """The sizes of groups that pins ask for: all `ranks` of a role where none says one."""
    return sorted({pin.group for pin in request.pins.values() if pin.group is not None and pin.group > 1}) or [ranks]
