"""Divide the world into conv and fc ranks: the numbers of the integer program, and the plan of an assignment.

As in `separation`, conv stands for the role that reads the data and fc for the one with the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from splitc.cost_models.memory.memory import cut_nbytes
from splitc.cost_models.network.alpha_beta import many_to_one, one_to_many
from splitc.ir.shares import serve
from splitc.passes.planner.cuts import Crossing, CutRules
from splitc.passes.planner.group_roles import asks_for_groups
from splitc.passes.planner.pin_checks import unsummed
from splitc.passes.planner.priced_plan import PricedPlan
from splitc.passes.planner.request import Request, largest
from splitc.passes.planner.separation import LayerNumbers, Separation, SyncLine, ValueNumbers

SEPARATION = "layer_separation"
HYBRID = "hybrid_single"


@dataclass(frozen=True)
class Division:
    """The ranks of the conv and of the fc role, the bounds of their examples, and the numbers of the integer program.

    names: of the two roles in the plan.  strategy: `hybrid_single` if the one fc rank is a conv rank too (Practical
    Lessons 2.2).
    """

    request: Request
    names: tuple[str, ...]
    conv_ranks: tuple[int, ...]
    fc_ranks: tuple[int, ...]
    conv_bounds: tuple[int, ...]
    fc_bounds: tuple[int, ...]
    problem: Separation
    strategy: str

    @property
    def batch(self) -> int:
        return self.conv_bounds[-1]

    @property
    def bound(self) -> float:
        """Samples per second that no assignment exceeds."""
        seconds = self.problem.least_seconds()
        return self.batch / seconds if seconds else math.inf

    def rate(self, fc: frozenset[str]) -> float:
        """Samples per second."""
        return self.batch / self.problem.step(fc).total

    def priced(self, fc: frozenset[str], bound: float, proved: bool = True, infeasible_because: str = "") -> PricedPlan:
        """The plan in which the layers `fc` run on the fc ranks."""
        conv_role, fc_role = self.names
        plan = self.request.replicated_plan(
            self.strategy,
            {conv_role: self.conv_ranks, fc_role: self.fc_ranks},
            {conv_role: self.conv_bounds, fc_role: self.fc_bounds},
            {layer.name: fc_role if layer.name in fc else conv_role for layer in self.problem.layers},
        )
        seconds = self.problem.step(fc).total
        return PricedPlan(self.strategy, plan, seconds, bound, proved, infeasible_because, separation=self.problem)


def divide(request: Request, rules: CutRules, n_c: int, n_f: int, shared: bool = False) -> Division:
    """n_c conv ranks and n_f fc ranks.  shared: the fc rank is the first conv rank, whose values need not be sent."""
    conv = request.bounds(n_c)
    fc = serve(conv, n_f)
    conv_ranks, fc_ranks = tuple(range(n_c)), (0,) if shared else tuple(range(n_c, n_c + n_f))
    conv_batch, fc_batch = largest(conv), largest(fc)
    link = request.cluster.link_across(conv_ranks, fc_ranks)
    messages = _messages(conv, fc)

    def numbers(layer: str) -> LayerNumbers:
        held = request.held[layer]
        copied = [n for n in request.program.layer(layer).tensors if request.program.tensors[n] not in held]
        separable = not any(layer in pair for pair in rules.together)
        copies = sum(request.layer_copy(name) for name in copied) if separable else 0.0
        allowed = _allowed_stages(request, rules, layer, (n_c, n_f))
        return LayerNumbers(
            layer,
            conv_seconds=request.seconds(layer, conv_batch, request.world),
            fc_seconds=request.seconds(layer, fc_batch, request.world),
            conv_memory=request.layer_memory(layer, request.live(conv_batch, 1), n_c > 1),
            fc_memory=request.layer_memory(layer, request.live(fc_batch), n_f > 1) + copies,
            gradient=request.gradient(layer),
            parameters=any(h.parameter for h in held),
            may_be_conv=0 in allowed,
            may_be_fc=1 in allowed,
        )

    def crossing(value: Crossing) -> ValueNumbers:
        nbytes = value.spec.nbytes(max(conv_batch, fc_batch)) / messages
        there = many_to_one(nbytes, messages - shared, link)
        back = one_to_many(nbytes, messages - shared, link) if value.gradient else 0.0
        return ValueNumbers(
            value.name,
            value.layer,
            value.readers,
            seconds=there + back,
            conv_memory=cut_nbytes(value.spec, request.live(conv_batch, 1)),
            fc_memory=cut_nbytes(value.spec, request.live(fc_batch)),
        )

    return Division(
        request,
        request.role_names(2),
        conv_ranks,
        fc_ranks,
        conv,
        fc,
        Separation(
            layers=tuple(numbers(layer.name) for layer in request.program.layers),
            values=tuple(crossing(value) for value in rules.crossings),
            order=rules.order,
            together=tuple(rules.together),
            conv_sync=_sync_line(request, conv_ranks),
            fc_sync=_sync_line(request, fc_ranks),
            memory=request.memory_of(request.world),
            shared=shared,
        ),
        HYBRID if shared else SEPARATION,
    )


def _allowed_stages(request: Request, rules: CutRules, layer: str, sizes: tuple[int, int]) -> set[int]:
    """The roles, 0 and 1, that a layer may run in: by its pin, and by the inputs it reads."""
    pin = request.pins.get(layer)
    stages = {0, 1}
    if layer in rules.reader_only:
        stages -= {1}
    if asks_for_groups(pin):
        stages -= {0}
    if pin is not None and pin.stage is not None:
        stages &= {pin.stage}
    if unsummed(request, [layer]):
        stages = {stage for stage in stages if sizes[stage] == 1}
    return stages


def _messages(conv: tuple[int, ...], fc: tuple[int, ...]) -> int:
    """The most ranks of the other role that one rank shares examples with."""

    def met(mine: tuple[int, ...], others: tuple[int, ...]) -> int:
        return max(sum(max(a, c) < min(b, d) for c, d in pairwise(others)) for a, b in pairwise(mine))

    return max(met(conv, fc), met(fc, conv))


def _sync_line(request: Request, ranks: tuple[int, ...]) -> SyncLine:
    """The all-reduce, which is a line in the bytes."""
    latency = request.all_reduce_seconds(0.0, ranks)
    return SyncLine(latency, (request.all_reduce_seconds(1e9, ranks) - latency) / 1e9)
