"""Rounds, as passes, checks, wire, prices and reports know them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, ClassVar

from splitc.ir.features import Feature
from splitc.ir.graph import info, stores
from splitc.ir.layers import Layer
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram, Program
from splitc.ir.regions import regions
from splitc.ir.rounds.problems import problems_in
from splitc.ir.schedule.actions import Action, RankProgram
from splitc.ir.shares import share_out
from splitc.ir.short_wire import carried
from splitc.ir.transitions import Collective
from splitc.ir.wire import numel_on
from splitc.ir.wire_op import STATE_COPIES, Payload, What, WireOp
from splitc.runtime.transport.formats import EXACT, FORMATS, format_of


def average_ops(program: LoweredProgram, rank: int, action: Action) -> Iterator[WireOp]:
    """Yield the all-reduce of a rank's slice of a bucket over the units, or its sum by the first, then the gather.

    Copies in a unit have slices of parameters; statistics are whole.
    """
    plan, stage = program.plan, program.stage(action.role)
    names, ranks = stage.bucket(action), plan.averaged(action.role, rank)
    tensors = [program.tensors[name] for name in names]
    copies = plan.replicas(action.role, rank) if tensors[0].trainable else (rank,)
    whole, index = sum(numel_on(program, stage, name, rank) for name in names), copies.index(rank)
    is_change = tensors[0].trainable and not plan.deals
    numel = share_out(whole, len(copies))[index + 1] - share_out(whole, len(copies))[index]
    if plan.deals:  # with the optimizer's state
        numel += STATE_COPIES * sum(tensor.numel for tensor in tensors if tensor.trainable)
    dtype, nbytes = tensors[0].dtype, numel * tensors[0].dtype.itemsize
    payload = Payload(What.AVERAGE, role=action.role, bucket=action.bucket)
    assert plan.rounds is not None, action
    op = WireOp("collective", payload, ranks, (numel,), dtype, algorithm=Collective.ALL_REDUCE).of_all()
    if plan.rounds.through == "server":
        form = plan.wire.averages if is_change and format_of(plan.wire.averages, dtype, numel) else ""
        op = replace(op, algorithm="server", form=form)
        yield replace(op, sent=op.nbytes * (len(ranks) - 1.0 if rank == ranks[0] else 1.0))
    else:
        yield from carried(plan, op, ranks.index(rank)) if is_change else (op,)
    gather = Collective.ALL_GATHER
    sent = gather.sent(0, nbytes, len(copies))
    yield WireOp("collective", payload, copies, (whole,), dtype, sent, None, gather)


class InRounds(Feature):
    """Units of ranks that train by themselves between averages."""

    reads = "world roles examples groups rounds synchronised servers microbatches placements"
    ops: ClassVar = {"average": average_ops}

    def concerns(self, plan: Plan) -> bool:
        return plan.rounds is not None

    def problems(self, plan: Plan) -> Iterator[str]:
        if plan.rounds is not None:
            yield from problems_in(plan, plan.rounds)
            return
        for layer, place in plan.placements.items():
            if place.sync == "average":
                yield f"placements: {layer} has sync 'average', but rounds is not there"

    def unfit(self, program: Program, plan: Plan) -> Iterator[str]:
        if plan.rounds is None:
            return
        kept = {str(n.all_input_nodes[0].target) for n in stores(program.graph) if not info(n).copied_to_each_stage}
        if kept := kept.union(*(own.keeps for _, own in regions(program))):
            yield f"in rounds units would keep unlike values in {', '.join(sorted(kept)[:4])}, which forward changes"

    def misfits(self, program: Program, plan: Plan) -> Iterator[str]:
        for name in program.placed(plan).tied if plan.rounds else ():
            use = f"{name} is used in several roles, which train copies of it"
            yield f"rounds: {use}; give the layers that use it one role"

    def ends(self, program: LoweredProgram, rank_program: RankProgram) -> Iterator[Action]:
        if (rounds := program.plan.rounds) is None:
            return
        for stage in program.stages_of(rank_program):
            role = stage.role
            changes = rounds.has_outer or rounds.patience is not None
            changes |= program.plan.wire.averages != EXACT and not program.plan.deals
            if stage.averaged and changes:
                yield Action("keep", role=role)
            for bucket, fragment in enumerate(stage.fragments):
                yield Action("average", role=role, bucket=bucket, update=rounds.departure(fragment))
            for bucket, fragment in enumerate(stage.fragments if rounds.delay else ()):
                yield Action("arrive", role=role, bucket=bucket, update=rounds.arrival(fragment))

    def is_first(self, plan: Plan, role: str, rank: int) -> bool:
        return plan.rounds is not None and plan.rounds.through == "server" and plan.averaged(role, rank)[0] == rank

    def sent_bytes(self, program: LoweredProgram, layer: Layer) -> float:
        plan, place = program.plan, program.plan.placements[layer.name]
        if plan.rounds is None or place.holding not in ("replicated", "sharded"):
            return 0.0
        held = (program.tensors[name] for name in layer.tensors)
        own = sum(tensor.nbytes for tensor in held if tensor.trainable) / place.num_shards
        units, copies = (len(f(place.role, plan.roles[place.role][0])) for f in (plan.averaged, plan.replicas))
        part, form = own / copies, FORMATS.get(plan.wire.averages)
        short = part if form is None else form.nbytes(round(part / 4))
        sent = Collective.ALL_REDUCE.sent(short, short, units) + Collective.ALL_GATHER.sent(own, part, copies)
        return sent / (plan.period * plan.accumulate)

    def text(self, plan: Plan) -> str:
        if plan.rounds is None:
            return ""
        updates, unit = plan.rounds.steps, plan.rounds.unit
        who = "rank alone" if unit == 1 else f"unit of {unit} ranks"
        number = f"{updates} update{'s' * (updates > 1)}"
        text = f"rounds of {number} by each {who}, then averaged"
        if plan.rounds.in_turns:
            delay = f"{plan.rounds.delay} update{'s' * (plan.rounds.delay != 1)}"
            text += f", {plan.rounds.fragments} fragments in turns, each on its way for {delay}"
        text += f", without who is {plan.rounds.patience:g} s late" if plan.rounds.patience is not None else ""
        return f"{text}, by an outer SGD of lr {plan.rounds.outer_lr:g}" if plan.rounds.has_outer else text

    def figures(self, plan: Plan) -> dict[str, Any]:
        return {"rounds": asdict(plan.rounds) if plan.rounds else None}


FEATURE = InRounds()
