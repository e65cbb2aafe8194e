"""Replicated and all-reduced, and linear layers and tables that are late-multiplied; one at least (Lessons 2.1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from splitc.ir.layers import Layer
from splitc.ir.linears import Linear, factors, late_layers
from splitc.ir.placements import SYNCS_OF_A_LAYER
from splitc.ir.plan import Plan
from splitc.ir.program import Program
from splitc.passes.planner.cuts import cut_rules
from splitc.passes.planner.divisions import Division, all_ranks, busiest
from splitc.passes.planner.options import Space, role_options, slowest_of, times_of
from splitc.passes.planner.pin_checks import PinWords, no_linear, unmet, unsummed
from splitc.passes.planner.pins import UNPINNED, Pin
from splitc.passes.planner.problem import Option
from splitc.passes.planner.request import Request
from splitc.passes.planner.strategy import Strategy
from splitc.passes.planner.syncs import Memory, Sync


class Late(Sync):
    """Every rank gathers the inputs X and the errors E of all ranks, and computes W' = E^T X of all (Lessons 2.1)."""

    how = ", by late multiply"
    instead = "its inputs and output errors travel instead"

    def work(self, ranks: int) -> float:
        return 1 + (ranks - 1) / 3  # of the three products, one is of all ranks' examples

    def options(self, request: Request, division: Division, role: int, layer: str, memory: Memory) -> Iterator[Option]:
        is_tied = len(division.roles) > 1 and request.shares(layer)  # then roles may have copies
        if layer not in request.late or is_tied or (role and division.order.pieces > 1):
            return
        r, uses = division.roles[role], request.late[layer]
        kinds = busiest(request, r, division.busy)
        examples, times = r.bounds[-1], times_of(request, division, role, layer, kinds)
        sizes = [size for use in uses for size in factors(use.values, use.output)]
        gathered = [
            examples * sum(numel for numel, each in sizes if each is dtype) * dtype.itemsize
            for dtype in dict.fromkeys(dtype for _, dtype in sizes)
        ]
        if any(isinstance(use, Linear) for use in uses):
            more = ((examples / each.batch - 1) / 3 for each in kinds)
            late = [(there, back + part * (there + back)) for (there, back), part in zip(times, more, strict=True)]
        else:  # a backward of all ranks' rows
            backs = times_of(request, division, role, layer, kinds, len(r.ranks))
            late = [(there, back) for (there, _), (_, back) in zip(times, backs, strict=True)]
        forward, backward = slowest_of(late)
        yield Option(
            role, sync=NAME, forward=forward, backward=backward,
            syncing=request.accumulate * sum(request.all_gather_seconds(each, r.ranks) for each in gathered),
            memory=memory(sum(gathered) + (request.rows_nbytes(layer, examples) if layer in request.sparse else 0)),
        )  # fmt: skip

    def unmet(self, request: Request, layer: str, pin: Pin, size: int | None) -> Iterator[str]:
        if request.gradient_of(layer) and layer not in request.late:
            yield "asks ... to be late-multiplied, but only linear layers and tables of their own weight can be"
        elif pin.grouped:
            yield "asks for groups and for late multiply of ..., but only what all ranks have whole is late-multiplied"
        elif size is None and pin.stage == 1:
            yield "asks for late multiply of ... on one rank, where there is nothing to gather"

    def misfits(self, program: Program, plan: Plan, layer: Layer) -> Iterator[str]:
        role = plan.placements[layer.name].role
        if role in plan.groups or layer.name not in late_layers(program):
            which = "which linear layers and tables in roles without groups have"
            yield f"placements: {layer.name} has sync {NAME!r}, {which}"
        shared = {name for name in layer.tensors if program.users[name] > 1 and program.tensors[name].trainable}
        for other in (each for each in program.layers if shared and not shared.isdisjoint(each.tensors)):
            if (plan.placements[other.name].role, plan.placements[other.name].sync) != (role, NAME):
                yield f"placements: {layer.name} has sync {NAME!r}, but {other.name}, which shares a parameter, has not"
        if plan.in_pieces and not set(plan.batch_offsets[plan.reader]).issuperset(plan.batch_offsets[role]):
            yield (
                f"microbatches is {plan.microbatches}, but {layer.name} is multiplied late in role {role}, whose ranks "
                f"divide what one reads, so that some have no examples in a microbatch: take 1, or sync 'all_reduce'"
            )


NAME = "late_multiply"
SYNC = Late()


@dataclass(frozen=True)
class LateMultiply(Strategy):
    """Fc layers replicated; their inputs and output errors travel, not their gradients (Practical Lessons 2.1)."""

    name = NAME
    pins = PinWords(syncs=SYNCS_OF_A_LAYER)

    def searches(self, by_name: bool) -> Sequence[bool]:
        return (True,) if by_name else (False, True)

    def space(self, request: Request, by_name: bool) -> Space:
        space = super().space(request, by_name)
        late = _worth_multiplying(request) if by_name else None

        def allows(division: Division, layer: str, option: Option) -> bool:
            if late is not None and request.pins.get(layer, UNPINNED).sync is None:
                return (option.sync == NAME) == (layer in late) and space.allows(division, layer, option)
            return space.allows(division, layer, option)

        return replace(space, allows=allows, wanted=(("sync", frozenset({NAME})),))

    def impossible(self, request: Request) -> list[str]:
        left = "no linear layer or table is left to multiply late"
        kind, keeps = "linear layer or table", lambda pin: pin.sync in ("all_reduce", "none")
        why = no_linear(request, self.name, "trains a weight of its own", left, keeps, request.late, kind)
        return super().impossible(request) + why

    def unfollowed(self, request: Request) -> list[str]:
        return unmet(request, request.world) + unsummed(request, request.pins)


def _worth_multiplying(request: Request) -> frozenset[str]:
    """The layers for which late multiply takes less than an all-reduce, without overlap; all where none does.

    Those that share a parameter, together.
    """
    known = role_options(request, cut_rules(request.program), all_ranks(request), 0)
    seconds = {layer: {each.sync: each.computing + each.syncing for each in known[layer]} for layer in request.late}
    more = {layer: by[NAME] - by.get("all_reduce", math.inf) for layer, by in seconds.items() if NAME in by}
    tensors = {layer: {*request.program.layer(layer).tensors} for layer in more}
    together = {layer: [more[other] for other in more if tensors[layer] & tensors[other]] for layer in more}
    return frozenset(layer for layer in more if sum(together[layer]) < 0) or frozenset(more)
