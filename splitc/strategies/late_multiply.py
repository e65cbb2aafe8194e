"""Replicated and all-reduced, and linear layers that are late-multiplied; one at least (Practical Lessons 2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from splitc.passes.planner.cuts import cut_rules
from splitc.passes.planner.divisions import Division, all_ranks
from splitc.passes.planner.options import Space, role_options
from splitc.passes.planner.pin_checks import PinWords, no_linear, unmet, unsummed
from splitc.passes.planner.pins import UNPINNED
from splitc.passes.planner.problem import Option
from splitc.passes.planner.request import Request
from splitc.passes.planner.strategy import Strategy

SYNC = "late_multiply"


@dataclass(frozen=True)
class LateMultiply(Strategy):
    """Fc layers replicated; their inputs and output errors travel, not their gradients (Practical Lessons 2.1)."""

    name = "late_multiply"
    pins = PinWords(syncs=("all_reduce", SYNC, "none"))

    def searches(self, by_name: bool) -> Sequence[bool]:
        return (True,) if by_name else (False, True)

    def space(self, request: Request, by_name: bool) -> Space:
        space = super().space(request, by_name)
        late = _worth_multiplying(request) if by_name else None

        def allows(division: Division, layer: str, option: Option) -> bool:
            if late is not None and request.pins.get(layer, UNPINNED).sync is None:
                return (option.sync == SYNC) == (layer in late) and space.allows(division, layer, option)
            return space.allows(division, layer, option)

        return replace(space, allows=allows, wanted=(("sync", frozenset({SYNC})),))

    def impossible(self, request: Request) -> list[str]:
        left = "no linear layer is left to multiply late"
        why = no_linear(
            request, self.name, "trains a weight of its own", left, lambda pin: pin.sync in ("all_reduce", "none")
        )
        return super().impossible(request) + why

    def unfollowed(self, request: Request) -> list[str]:
        return unmet(request, request.world) + unsummed(request, request.pins)


def _worth_multiplying(request: Request) -> frozenset[str]:
    """The linear layers for which late multiply takes less than an all-reduce, without overlap; all where none does."""
    known = role_options(request, cut_rules(request.program), all_ranks(request), 0)
    seconds = {
        layer: {option.sync: option.computing + option.syncing for option in known[layer]}
        for layer in request.linears
        if any(option.sync == SYNC for option in known[layer])
    }
    cheaper = (layer for layer, by in seconds.items() if by[SYNC] < by["all_reduce"])
    return frozenset(cheaper) or frozenset(seconds)
