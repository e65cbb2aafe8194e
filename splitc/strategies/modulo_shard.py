"""Replicated before the groups; in them linear layers divided by columns, by rows of what columns made, or alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from splitc.ir.decode import at_least, one_of
from splitc.ir.graph import tensor_spec
from splitc.ir.placements import SCHEMES, UPDATES
from splitc.passes.planner.cuts import cut_rules, following
from splitc.passes.planner.divisions import FEW, Division, Role, group_sizes
from splitc.passes.planner.options import Space
from splitc.passes.planner.order import AT_ONCE
from splitc.passes.planner.pin_checks import PinWords, no_linear, unmet_in_groups
from splitc.passes.planner.pins import Pin
from splitc.passes.planner.problem import Option, Place
from splitc.passes.planner.request import Request, largest
from splitc.strategies.in_rounds import InRounds


@dataclass(frozen=True)
class ModuloShard(InRounds):
    """The fc layers divided over groups of mp ranks (SplitBrain 3; Krizhevsky 2014).

    scheme: which examples of a group are worked on at a time, BK, B or B/K.  updates: once after all turns, or every
    turn, which is the paper's and approximate.  period: updates after which the groups average, until then each trains
    by itself, which is approximate too (SplitBrain 4); None: they sum all gradients.
    """

    name = "modulo_shard"
    pins = PinWords(stages=2, divides=True)
    mp: Annotated[int, at_least(2)] | None = None
    scheme: Annotated[str, one_of(*SCHEMES)] | None = None
    updates: Annotated[str, one_of(*UPDATES)] | None = None

    @property
    def is_exact(self) -> bool:
        return self.updates != "every" and self.period is None

    def searches(self, by_name: bool) -> Sequence[bool]:
        return (True,) if by_name else (False, True)

    def divisions(self, request: Request) -> Iterable[Division]:
        everyone, bounds = tuple(range(request.world)), request.bounds(request.world)
        several = self.order(AT_ONCE).pieces > 1  # in which groups work, unless their scheme was asked for too
        for size in self._sizes(request.world):
            scheme = self.scheme or ("B/K" if size <= FEW and not several else "BK")  # in pieces of some size
            yield Division((Role(everyone, bounds), Role(everyone, bounds, size, scheme, self.updates or "once")))

    def _sizes(self, most: int, world: int | None = None) -> list[int]:
        """The sizes of groups of at most so many ranks."""
        return [size for size in group_sizes(world or most) if size <= most and self.mp in (None, size)]

    def unit(self, request: Request) -> int:
        return self.mp or max(self._sizes(request.world // 2, request.world))

    def divides(self, pin: Pin) -> bool:
        return True

    def space(self, request: Request, by_name: bool) -> Space:
        """By name groups are for memory, so they divide what is larger than what it gathers."""
        space, large = super().space(request, by_name), _large(request) if by_name else frozenset[str]()
        inside = following(cut_rules(request.program), request.linears)

        def allows(division: Division, layer: str, option: Option) -> bool:
            if option.role and layer not in inside:
                return False
            if option.role and layer in large and option.holding == "replicated":
                return layer in request.pins and space.allows(division, layer, option)
            return space.allows(division, layer, option)

        moves = space.moves if any(pin.split for pin in request.pins.values()) else _gathers
        return Space(allows, moves, (("holding", frozenset({"sharded"})),))

    def impossible(self, request: Request) -> list[str]:
        left = "nothing is left to divide: no linear layer may be sharded"
        what = "has parameters of its own to divide"
        why = no_linear(request, self.name, what, left, lambda pin: pin.holding == "replicated")
        return super().impossible(request) + why + self._without_groups(request)

    def _without_groups(self, request: Request) -> list[str]:
        most = request.world // 2 if self.period else request.world  # several groups, that they may average
        if self._sizes(most, request.world):
            return []
        several = " into several, whose parameters could be averaged" if self.period else ""
        return [f"groups of mp = {self.mp or 'two or more'} do not divide {request.world} ranks{several}"]

    def unfollowed(self, request: Request) -> list[str]:
        return unmet_in_groups(request, request.world, self._sizes(request.world))

    def indivisible(self, request: Request) -> list[str]:
        layer = request.program.in_batch
        return [f"{layer} needs the whole batch, so it is not divided"] if layer else []


def _large(request: Request) -> frozenset[str]:
    """The linear layers with more bytes of parameters than of output, for one rank's batch.

    This is the ratio of computing to communication of SplitBrain's listing 1, in bytes, with 1 as its threshold.
    """
    batch, found = largest(request.bounds(request.world)), set()
    for layer, uses in request.linears.items():
        gathered = sum(tensor_spec(use.node).nbytes(batch) for use in uses)
        if request.gradient_of(layer) and sum(h.nbytes for h in request.held[layer] if h.parameter) > gathered:
            found.add(layer)
    return frozenset(found)


def _gathers(start: Place, end: Place) -> bool:
    """Whether SplitBrain has a move: it gathers examples and features, and has no all-to-all."""
    return (start[1], end[1]) != ("batch", "features")
