"""What each rank puts on the wire in one step, in its order: the action lists with the plan's ranks filled in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from splitc import comm_ops
from splitc.program import Cut, Program, Stage


@dataclass(frozen=True)
class WireOp:
    """One message or collective of one rank.

    kind: "send", "recv" or "collective".  ranks: the peer, or all members.  label: what travels, the same on all sides.
    sent: payload bytes that this rank sends for it (for collectives, of a ring).
    """

    kind: str
    label: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    sent: float = 0.0

    def __str__(self) -> str:
        other = {"send": "to", "recv": "from"}.get(self.kind, "of ranks")
        return f"{self.kind} {self.label} {self.shape} {self.dtype} {other} {', '.join(map(str, self.ranks))}"


def wire(program: Program, rank: int) -> tuple[WireOp, ...]:
    """Everything `rank` sends, receives and sums in one training step, in order."""
    plan = program.required_plan
    if all(rank not in ranks for ranks in plan.roles.values()):
        return _loss(plan.world)  # a rank without work learns the loss
    stage = program.stage(plan.role_of(rank))
    return tuple(op for action in stage.actions for op in _expand(program, stage, rank, action.verb, action.value))


def _expand(program: Program, stage: Stage, rank: int, verb: str, value: str) -> Iterator[WireOp]:
    plan = program.required_plan
    members = plan.roles[stage.role]
    if verb in ("send", "recv_grad"):
        yield from _messages(program, rank, _cut(stage.sends, value), verb)
    elif verb in ("recv", "send_grad"):
        yield from _messages(program, rank, _cut(stage.receives, value), verb)
    elif verb == "forward" and len(members) > 1:
        for node in stage.graph.nodes:
            if node.target in (comm_ops.total, comm_ops.total_weight):
                dtype = node.meta["spec"].dtype
                sent = comm_ops.OPS[node.target].sent(dtype.itemsize, len(members))
                yield WireOp("collective", f"{stage.role}.{node.name}", members, (), dtype, sent)
    elif verb == "sum_loss":
        yield from _loss(plan.world)
    elif verb == "reduce":
        names = stage.buckets[int(value.removeprefix("bucket"))]
        numel = sum(program.holdings[name].numel for name in names)
        dtype = program.holdings[names[0]].dtype
        yield WireOp(
            "collective",
            f"{stage.role}.{value}",
            members,
            (numel,),
            dtype,
            comm_ops.OPS[comm_ops.all_reduce].sent(numel * dtype.itemsize, len(members)),
        )


def _loss(world: int) -> tuple[WireOp, ...]:
    """The sum of the loss over all ranks, also those without work."""
    sent = comm_ops.OPS[comm_ops.all_reduce].sent(torch.float64.itemsize, world)
    return (WireOp("collective", "loss", tuple(range(world)), (), torch.float64, sent),) if world > 1 else ()


def _cut(cuts: tuple[Cut, ...], name: str) -> Cut:
    return next(cut for cut in cuts if cut.name == name)


def _messages(program: Program, rank: int, cut: Cut, verb: str) -> Iterator[WireOp]:
    plan = program.required_plan
    role = cut.consumer if verb in ("send", "recv_grad") else cut.producer
    label = f"d_{cut.name}" if verb.endswith("grad") else cut.name
    for peer, start, stop in plan.routes(rank, role):
        kind = verb.split("_")[0]
        sent = cut.spec.nbytes(stop - start) if kind == "send" else 0
        yield WireOp(kind, f"{label}[{start}:{stop}]", (peer,), cut.spec.at(stop - start), cut.spec.dtype, sent)
