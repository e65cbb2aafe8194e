"""What each rank puts on the wire in one step, in its order: the action lists with the plan's ranks filled in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from splitc.ir import comm_ops
from splitc.ir.actions import Action
from splitc.ir.plan import Plan, share_out
from splitc.ir.program import Cut, LoweredProgram, PlacedProgram, Program, Stage, TensorSpec
from splitc.ir.server_rows import Piece, pieces
from splitc.ir.tied import tied
from splitc.runtime.collectives import parameter_server as servers
from splitc.runtime.transport.doubling import sent_bytes as doubling_sent


@dataclass(frozen=True)
class WireOp:
    """One message or collective of one rank.

    kind: "send", "recv" or "collective".  ranks: the peer, or all members.  label: what travels, the same on all sides.
    algorithm: of a collective, "all_reduce", "all_gather", "reduce_scatter" or "recursive_doubling".
    shape: of what travels; of a collective whose members give different shapes, of the whole.
    sent: payload bytes that this rank sends for it, as its op defines them.
    layer: that made the value, or whose computing the communication is part of; None for inputs, buckets and the loss.
    """

    kind: str
    label: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    sent: float = 0.0
    layer: str | None = None
    algorithm: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of `shape`."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        other = {"send": "to", "recv": "from"}.get(self.kind, "of ranks")
        return f"{self.kind} {self.label} {self.shape} {self.dtype} {other} {', '.join(map(str, self.ranks))}"


def wire(program: LoweredProgram, rank: int) -> tuple[WireOp, ...]:
    """Everything `rank` sends, receives and sums in one training step, in order."""
    plan = program.plan
    if all(rank not in ranks for ranks in plan.ranks_by_roles.values()):
        return _loss(plan)  # a rank without work learns the loss
    return tuple(op for action in program.rank_program(rank).actions for op in of_action(program, rank, action))


def of_action(program: LoweredProgram, rank: int, action: Action) -> Iterator[WireOp]:
    """What `rank` puts on the wire for one action."""
    plan, verb, value = program.plan, action.verb, action.value
    if verb == "sum_loss":
        yield from _loss(plan)
        return
    if verb == "all_reduce_tied":
        yield from _tied(program, int(value.removeprefix("tied")))
        return
    if verb in ("send_parameters", "reduce_gradients"):
        yield from _served(program, rank, verb)
        return
    stage = program.stage(action.own)
    if verb in ("pull", "push"):
        yield from _workers(program, stage, rank, verb, value)
    elif verb in ("send", "recv_grad"):
        yield from _of(program, cut := _cut(stage.sends, value, action.role), _messages(plan, rank, cut, verb))
    elif verb in ("recv", "send_grad"):
        yield from _of(program, cut := _cut(stage.receives, value), _messages(plan, rank, cut, verb))
    elif verb in ("modulo", "modulo_grad"):
        yield from _of(program, cut := _cut(stage.receives, value), _turn(plan, rank, cut, action))
    elif verb == "all_gather_grad":
        yield from _of(program, cut := _cut(stage.sends, value), _spread(plan, rank, cut))
    elif verb in ("forward", "backward"):
        yield from (op for _, op in inside(program, stage, rank, action))
    elif verb == "all_reduce":
        yield from _reduce(program, stage, rank, value)


def _tied(program: PlacedProgram, k: int) -> Iterator[WireOp]:
    """The gradient of a parameter that several roles use."""
    name, ranks = list(tied(program).items())[k]
    holding = program.tensors[name]
    sent = comm_ops.OPS[comm_ops.all_reduce].returned(holding.nbytes, len(ranks))
    yield from _collective("all_reduce", f"tied {name}", ranks, holding.shape, holding.dtype, sent)


def _loss(plan: Plan) -> tuple[WireOp, ...]:
    """The sum of the loss over all ranks, also those without work."""
    world = plan.world
    sent = comm_ops.OPS[comm_ops.all_reduce_scalar].sent(torch.float64.itemsize, world)
    return tuple(_collective("all_reduce", "loss", tuple(range(world)), (), torch.float64, sent))


def _of(program: Program, cut: Cut, ops: Iterable[WireOp]) -> Iterator[WireOp]:
    """The operations of a cut, with the layer that made its value."""
    layer = program.layer_of.get(cut.value)
    return (replace(op, layer=layer) for op in ops)


def _cut(cuts: tuple[Cut, ...], name: str, consumer: str | None = None) -> Cut:
    return next(cut for cut in cuts if cut.name == name and consumer in (None, cut.consumer))


def _messages(plan: Plan, rank: int, cut: Cut, verb: str) -> Iterator[WireOp]:
    mine, role = (cut.producer, cut.consumer) if verb in ("send", "recv_grad") else (cut.consumer, cut.producer)
    label = f"d_{cut.name}" if verb.endswith("grad") else cut.name
    for peer, start, stop in plan.routes(rank, mine, role):
        if peer == rank:
            continue  # handed over in memory
        kind = verb.split("_")[0]
        sent = cut.spec.nbytes(stop - start) if kind == "send" else 0
        name = f"{label}.{cut.producer}.{cut.consumer}[{start}:{stop}]"
        yield WireOp(kind, name, (peer,), cut.spec.at(stop - start), cut.spec.dtype, sent)


def _collective(
    algorithm: str, label: str, ranks: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype, sent: float
) -> Iterator[WireOp]:
    if len(ranks) > 1:
        yield WireOp("collective", label, ranks, shape, dtype, sent, algorithm=algorithm)


def _turn(plan: Plan, rank: int, cut: Cut, action: Action) -> Iterator[WireOp]:
    """The gathering of a turn's examples, and the way back of their gradients."""
    members = plan.group(cut.consumer, rank)
    parts = plan.microbatch_intervals(cut.consumer, rank, action.turn)
    sizes = [cut.spec.nbytes(b - a) for a, b in parts]
    if not any(sizes):
        return  # a turn without examples is left out
    shape, own = cut.spec.at(sum(b - a for a, b in parts)), sizes[members.index(rank)]
    if action.verb == "modulo":
        algorithm, label, sent = "all_gather", f"modulo {cut.name}[{action.turn}]", (len(members) - 1) * own
    elif cut.partial:
        algorithm, label, sent = "reduce_scatter", f"modulo_grad {cut.name}[{action.turn}]", sum(sizes) - own
    else:
        return  # every rank has the whole gradient
    yield from _collective(algorithm, label, members, shape, cut.spec.dtype, sent)


def _spread(plan: Plan, rank: int, cut: Cut) -> Iterator[WireOp]:
    members = plan.group(cut.producer, rank)
    rows = sum(plan.batch(cut.producer, member) for member in members)
    sent = (len(members) - 1) * cut.spec.nbytes(plan.batch(cut.producer, rank))
    yield from _collective(
        "all_gather", f"all_gather_grad {cut.name}", members, cut.spec.at(rows), cut.spec.dtype, sent
    )


def inside(program: PlacedProgram, stage: Stage, rank: int, action: Action) -> Iterator[tuple[fx.Node, WireOp]]:
    """What the nodes of a stage communicate in forward, or in backward, which goes the other way."""
    plan, backward = program.plan, action.verb == "backward"
    examples = sum(b - a for a, b in plan.microbatch_intervals(stage.role, rank, action.turn))
    if not examples:
        return
    nodes = [node for node in stage.graph.nodes if node.target in comm_ops.OPS and comm_ops.OPS[node.target].inside]
    for node in reversed(nodes) if backward else nodes:
        spec = node.meta.get("spec")
        if not isinstance(spec, TensorSpec) or (backward and not spec.requires_grad):
            continue
        for op in _node(program, stage, rank, action, node, spec, examples):
            yield node, replace(op, layer=node.meta.get("layer"))


def _node(
    program: PlacedProgram, stage: Stage, rank: int, action: Action, node: fx.Node, spec: TensorSpec, examples: int
) -> Iterator[WireOp]:
    plan, backward, target = program.plan, action.verb == "backward", node.target
    label, shape = f"{stage.role}.{node.name}[{action.turn}]", spec.at(examples)
    sent: float
    group, replicas = plan.group(stage.role, rank), plan.replicas(stage.role, rank)
    op = comm_ops.OPS[target]  # type: ignore[index]
    if target in (comm_ops.all_reduce_scalar, comm_ops.global_weight) and not backward:
        yield from _collective(
            "all_reduce", label, replicas, (), spec.dtype, op.sent(spec.dtype.itemsize, len(replicas))
        )
    elif target is comm_ops.shard:
        features: Any = node.kwargs["features"]
        widths = [b - a for a, b in pairwise(share_out(features, len(group)))]
        width, row = widths[group.index(rank)], spec.nbytes(examples) // max(spec.shape[-1], 1)
        if not backward:
            yield from _collective("all_gather", label, group, shape, spec.dtype, (len(group) - 1) * width * row)
        elif node.kwargs["partial"]:
            sent = (spec.shape[-1] - width) * row
            yield from _collective("reduce_scatter", f"d_{label}", group, shape, spec.dtype, sent)
    elif target in (comm_ops.copy_to_group, comm_ops.reduce_from_group):
        if backward == (target is comm_ops.copy_to_group):
            sent = (op.returned if backward else op.sent)(spec.nbytes(examples), len(group))
            yield from _collective("all_reduce", label, group, shape, spec.dtype, sent)
    elif target is comm_ops.late_multiply and backward:
        everyone = plan.batch_offsets[stage.role][-1]
        for what, value in (("X", node.args[0]), ("E", node)):
            given = value.meta["spec"]  # type: ignore[union-attr]
            nbytes = given.nbytes(examples) // given.dtype.itemsize * spec.dtype.itemsize  # both in the dtype of E
            sent = (len(replicas) - 1) * nbytes
            yield from _collective("all_gather", f"{what} {label}", replicas, given.at(everyone), spec.dtype, sent)
    elif target is comm_ops.batch_norm:
        given = node.args[0].meta["spec"]  # type: ignore[union-attr]
        numbers, dtype = (2 * spec.shape[1], _wide(spec.dtype)) if backward else (2 * spec.shape[1] + 1, torch.float64)
        if given.requires_grad or not backward:
            sent = (op.returned if backward else op.sent)(numbers * dtype.itemsize, len(replicas))
            name = f"d_{label}" if backward else label
            yield from _collective("all_reduce", name, replicas, (numbers,), dtype, sent)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of values are computed in."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def _reduce(program: PlacedProgram, stage: Stage, rank: int, bucket: str) -> Iterator[WireOp]:
    plan = program.plan
    names = stage.buckets[int(bucket.removeprefix("bucket"))]
    group, replicas = plan.group(stage.role, rank), plan.replicas(stage.role, rank)
    dtype = program.tensors[names[0]].dtype
    numel = sum(numel_on(program, stage, name, group.index(rank), len(group)) for name in names)
    algorithm = "all_reduce" if plan.all_reduce == "backend" else plan.all_reduce
    if algorithm == "recursive_doubling":
        sent: float = doubling_sent(numel * dtype.itemsize, replicas.index(rank), len(replicas))
    else:
        sent = comm_ops.OPS[comm_ops.all_reduce].returned(numel * dtype.itemsize, len(replicas))
    yield from _collective(algorithm, f"{stage.role}.{bucket}", replicas, (numel,), dtype, sent)


def shard_of(program: Program, stage: Stage, name: str, member: int, size: int) -> tuple[int, int, int] | None:
    """(dim, first, one past the last) of a parameter that the `member`-th of `size` ranks of a group holds."""
    if name not in stage.shards:
        return None
    dim = stage.shards[name]
    bounds = share_out(program.tensors[name].shape[dim], size)
    return dim, bounds[member], bounds[member + 1]


def numel_on(program: Program, stage: Stage, name: str, member: int, size: int) -> int:
    """Elements of a parameter or buffer on a rank of a stage."""
    holding = program.tensors[name]
    shard = shard_of(program, stage, name, member, size)
    if shard is None:
        return holding.numel
    dim, first, last = shard
    return holding.numel // max(holding.shape[dim], 1) * (last - first)


def bucket_nbytes(program: PlacedProgram, stage: Stage, bucket: Sequence[str]) -> int:
    """Bytes of a bucket of gradients on the first rank of a stage."""
    plan = program.plan
    size = plan.groups[stage.role].size if stage.role in plan.groups else 1
    return sum(numel_on(program, stage, name, 0, size) * program.tensors[name].dtype.itemsize for name in bucket)


# -- parameter servers -------------------------------------------------------------------------------------------------


def _workers(program: PlacedProgram, stage: Stage, rank: int, verb: str, value: str) -> Iterator[WireOp]:
    """What a worker pulls or pushes; a server beside it gives or takes the rows that it holds."""
    buckets = reversed(range(len(stage.served))) if verb == "pull" else [int(value.removeprefix("bucket"))]
    for k in buckets:
        for message in messages(program, stage.served[k]):
            if message[0].server == rank:
                yield from _of_server(program, stage, message, verb)
            else:
                yield _rows("recv" if verb == "pull" else "send", verb, message, message[0].server)


def _served(program: LoweredProgram, rank: int, verb: str) -> Iterator[WireOp]:
    """What a server that is no worker gives to all workers before a step, and takes from them."""
    stages = program.stages if verb == "send_parameters" else reversed(program.stages)
    for stage in stages:
        for k in reversed(range(len(stage.served))) if verb == "send_parameters" else range(len(stage.served)):
            for message in messages(program, stage.served[k]):
                if message[0].server == rank:
                    yield from _of_server(program, stage, message, "pull" if verb == "send_parameters" else "push")


def _of_server(program: PlacedProgram, stage: Stage, message: Sequence[Piece], verb: str) -> Iterator[WireOp]:
    for worker in program.plan.roles[stage.role]:
        if worker != message[0].server:
            yield _rows("send" if verb == "pull" else "recv", verb, message, worker)


def messages(program: PlacedProgram, bucket: Sequence[str]) -> list[tuple[Piece, ...]]:
    """The pieces of a bucket in their order, those that travel together in one tuple, as the runtime packs them."""
    return _packed(tuple(pieces(program, bucket, program.plan.servers)), servers.ALONE)


@lru_cache(maxsize=1024)
def _packed(spread: tuple[Piece, ...], alone: int) -> list[tuple[Piece, ...]]:
    """alone: the size from which a piece travels alone, which the runtime decides."""
    by_name = {(piece.name, piece.server): piece for piece in spread}
    packed = servers.messages(servers.Piece(p.name, p.server, p.first, p.last, p.nbytes) for p in spread)
    return [tuple(by_name[piece.name, piece.server] for piece in message) for message in packed]


def _rows(kind: str, verb: str, message: Sequence[Piece], peer: int) -> WireOp:
    first, *more = message
    label = f"{verb} {first.name}[{first.first}:{first.last}]" + (f" and {len(more)} more" if more else "")
    shape = (sum(math.prod(piece.shape) for piece in message),) if more else first.shape
    sent = sum(piece.nbytes for piece in message) if kind == "send" else 0
    return WireOp(kind, label, (peer,), shape, first.dtype, sent)
