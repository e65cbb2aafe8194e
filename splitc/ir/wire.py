"""Each rank's messages and collectives in one step, in order: its action list with the plan's ranks filled in.

What happens once a round is there once, and says how often in a step it is on average (`WireOp.times`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from splitc.ir.actions import BEGIN_ROUND, END_ROUND, Action
from splitc.ir.comm_ops import OPS, Collective, CommOp, Over, op_of
from splitc.ir.dealt import STATE_COPIES, dealt_ops, slice_numel
from splitc.ir.graph import info, tensor_spec
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram, PlacedProgram, Program, Stage, TensorSpec
from splitc.ir.server_wire import server_ops, worker_ops
from splitc.ir.shares import share_out
from splitc.ir.wire_op import Payload, What, WireOp
from splitc.runtime.transport.doubling import sent_bytes as doubling_sent

_WIRES: WeakKeyDictionary[LoweredProgram, dict[int, tuple[WireOp, ...]]] = WeakKeyDictionary()


def wire(program: LoweredProgram, rank: int) -> tuple[WireOp, ...]:
    """Return what `rank` sends, receives and reduces in one training step, in order; computed once for a program."""
    ranks = _WIRES.setdefault(program, {})
    if rank not in ranks:
        if all(rank not in members for members in program.plan.ranks_by_roles.values()):
            ranks[rank] = tuple(_loss(program.plan, rank))  # a rank without work receives the loss
        else:
            actions = program.rank_program(rank).actions
            ranks[rank] = tuple(op for action in actions for op in of_action(program, rank, action))
    return ranks[rank]


def of_action(program: LoweredProgram, rank: int, action: Action) -> Iterator[WireOp]:
    """Yield what `rank` communicates in one action."""
    rounds, once = program.plan.rounds, action.verb in (*BEGIN_ROUND, *END_ROUND)
    for op in _of_action(program, rank, action):
        yield replace(op, times=1 / rounds.steps) if rounds is not None and once else op


def _of_action(program: LoweredProgram, rank: int, action: Action) -> Iterator[WireOp]:
    match action.verb:
        case "sum_loss":
            yield from _loss(program.plan, rank)
        case "all_reduce_tied":
            yield from _tied(program, action.value)
        case "send_parameters" | "reduce_gradients":
            yield from server_ops(program, rank, action)
        case "pull" | "push":
            yield from worker_ops(program, program.stage(action.role), rank, action)
        case "forward" | "backward":
            yield from (op for _, op in inside(program, program.stage(action.role), rank, action))
        case "all_reduce" | "average":
            yield from _bucket(program, program.stage(action.role), rank, action)
        case "deal" | "fetch_ahead" | "collect":
            yield from dealt_ops(program, program.stage(action.role), rank, action)
        case "send" | "recv" | "send_grad" | "recv_grad":
            yield from _messages(program, rank, action)
        case "modulo" | "modulo_grad" | "all_gather_grad":
            yield from _over_group(program, rank, action)


def _collective(
    algorithm: str,
    payload: Payload,
    ranks: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    sent: float,
    layer: str | None = None,
) -> Iterator[WireOp]:
    if len(ranks) > 1:
        yield WireOp("collective", payload, ranks, shape, dtype, sent, layer, algorithm)


def _loss(plan: Plan, rank: int) -> Iterator[WireOp]:
    """Yield the all-reduce of the loss over all ranks, those without work too; within a round over those of a unit."""
    collective, nbytes = OPS["sum_loss"].collective, torch.float64.itemsize
    last = 1 / plan.rounds.steps if plan.rounds else 1.0
    for ranks, times in ((plan.unit(rank), 1 - last), (tuple(range(plan.world)), last)):
        sent = collective.sent(nbytes, nbytes, len(ranks))
        for op in _collective(collective, Payload(What.LOSS), ranks, (), torch.float64, sent):
            if times:
                yield replace(op, times=times)


def _tied(program: PlacedProgram, name: str) -> Iterator[WireOp]:
    """Yield the all-reduce of the gradient of a parameter that several roles use."""
    collective, tensor, ranks = OPS["all_reduce_tied"].collective, program.tensors[name], program.tied[name]
    sent = collective.sent(tensor.nbytes, tensor.nbytes, len(ranks))
    yield from _collective(collective, Payload(What.TIED, name), ranks, tensor.shape, tensor.dtype, sent)


def _bucket(program: PlacedProgram, stage: Stage, rank: int, action: Action) -> Iterator[WireOp]:
    """Yield the all-reduce of a bucket of gradients over the replicas, or of one of parameters over the units."""
    plan, names = program.plan, stage.bucket(action)
    averages = action.verb == "average"
    group, replicas = plan.group(stage.role, rank), (plan.averaged if averages else plan.replicas)(stage.role, rank)
    dtype = program.tensors[names[0]].dtype
    numel = sum(numel_on(program, stage, name, group.index(rank), len(group)) for name in names)
    if averages and plan.deals:  # with the optimizer's state
        numel += STATE_COPIES * sum(t.numel for t in map(program.tensors.__getitem__, names) if t.trainable)
    nbytes, collective = numel * dtype.itemsize, OPS["all_reduce"].collective
    payload = Payload(What.AVERAGE if averages else What.BUCKET, role=stage.role, bucket=action.bucket)
    if averages and plan.rounds is not None and plan.rounds.through == "server":
        sent = nbytes * (len(replicas) - 1.0 if rank == replicas[0] else 1.0)
        yield from _collective("server", payload, replicas, (numel,), dtype, sent)
    elif plan.all_reduce == "backend" or averages:
        sent = collective.sent(nbytes, nbytes, len(replicas))
        yield from _collective(collective, payload, replicas, (numel,), dtype, sent)
    else:
        sent = doubling_sent(nbytes, replicas.index(rank), len(replicas))
        yield from _collective(plan.all_reduce, payload, replicas, (numel,), dtype, sent)


# -- cuts --------------------------------------------------------------------------------------------------------------


def _messages(program: LoweredProgram, rank: int, action: Action) -> Iterator[WireOp]:
    """Yield the messages of a cut, or of its gradient, to or from each rank that has examples in common."""
    cut, collective = program.stage(action.role).cut(action), OPS[action.verb].collective
    what = What.CUT_GRADIENT if action.verb in ("send_grad", "recv_grad") else What.CUT
    for peer, start, stop in program.plan.routes(rank, action.role, action.peer):
        if peer == rank:
            continue  # handed over in memory
        payload = Payload(what, cut.name, cut.producer, cut.consumer, rows=(start, stop))
        nbytes = cut.spec.nbytes(stop - start)
        sent = collective.sent(nbytes, nbytes, 2)
        shape, layer = cut.spec.at(stop - start), program.layer_of.get(cut.value)
        yield WireOp(str(collective), payload, (peer,), shape, cut.spec.dtype, sent, layer)


def _over_group(program: LoweredProgram, rank: int, action: Action) -> Iterator[WireOp]:
    """Yield the gather of a cut's examples, or of their gradient, over the group, or the way back."""
    plan, cut, members = program.plan, program.stage(action.role).cut(action), program.plan.group(action.role, rank)
    examples = [plan.batch(action.role, member) for member in members]
    if action.verb != "all_gather_grad":
        examples = [b - a for a, b in plan.microbatch_intervals(action.role, rank, action.microbatch)]
    sizes = [cut.spec.nbytes(n) for n in examples]
    op = OPS[action.verb]
    if op.adjoint == "modulo" and not cut.partial:
        return  # every rank has the whole gradient
    if action.verb != "all_gather_grad" and not any(sizes):
        return  # a microbatch without examples is skipped
    payload = Payload(What(action.verb), cut.name, action.role, microbatch=action.microbatch)
    sent = op.collective.sent(sum(sizes), sizes[members.index(rank)], len(members))
    shape, layer = cut.spec.at(sum(examples)), program.layer_of.get(cut.value)
    yield from _collective(op.collective, payload, members, shape, cut.spec.dtype, sent, layer)


# -- inside a stage ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Value:
    """What a node communicates.  nbytes: of the whole; own: of this rank's part.  packed: see `WireOp`."""

    what: What
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    own: int
    packed: tuple[tuple[str, float], ...] = ()


def inside(program: PlacedProgram, stage: Stage, rank: int, action: Action) -> Iterator[tuple[fx.Node, WireOp]]:
    """Yield what the nodes of a stage communicate in forward, or in backward, which visits them in reverse."""
    plan, role, backward = program.plan, stage.role, action.verb == "backward"
    examples = sum(b - a for a, b in plan.microbatch_intervals(role, rank, action.microbatch))
    if not examples:
        return
    nodes = [(node, op) for node in stage.graph.nodes if (op := op_of(node)) is not None and op.in_stage]
    late = [node for node, op in nodes if op.name == "late_multiply" and tensor_spec(node).requires_grad]
    for node, op in reversed(nodes) if backward else nodes:
        spec = info(node).spec
        if not isinstance(spec, TensorSpec) or (backward and not spec.requires_grad):
            continue
        collective = op.backward(partial=node.kwargs.get("partial") is not False) if backward else op.collective
        if collective is Collective.NONE:
            continue
        ranks = plan.group(role, rank) if op.over is Over.GROUP else plan.replicas(role, rank)
        everyone = plan.batch_offsets[role][-1]
        values = _values(op, node, spec, examples, everyone, (ranks.index(rank), len(ranks)), backward)
        if op.name == "late_multiply":  # one gather, when the last error has come
            values = _packs(program, late, examples, everyone) if node is late[0] else iter(())
        for value in values:
            payload = Payload(value.what, node.name, role, microbatch=action.microbatch)
            sent = collective.sent(value.nbytes, value.own, len(ranks))
            layer = None if value.packed else info(node).layer or None
            for each in _collective(collective, payload, ranks, value.shape, value.dtype, sent, layer):
                yield node, replace(each, packed=value.packed)


def _packs(program: PlacedProgram, late: Sequence[fx.Node], examples: int, everyone: int) -> Iterator[_Value]:
    """Yield the X and E of all late-multiplied layers, those of one dtype together; X is gathered in the dtype of E."""
    for dtype in dict.fromkeys(tensor_spec(node).dtype for node in reversed(late)):
        rows: dict[str, int] = defaultdict(int)  # layer -> elements of one example
        for node in (node for node in reversed(late) if tensor_spec(node).dtype == dtype):
            value, weight, *_ = node.all_input_nodes
            for factor in (value, node) if program.tensors[str(weight.target)].trainable else (node,):
                rows[info(node).layer] += tensor_spec(factor).nbytes(1) // tensor_spec(factor).dtype.itemsize
        total = sum(rows.values())
        own = examples * total * dtype.itemsize
        packed = tuple((layer, numel / total) for layer, numel in rows.items())
        yield _Value(What.LATE, (everyone * total,), dtype, own, own, packed)


def _values(
    op: CommOp, node: fx.Node, spec: TensorSpec, examples: int, everyone: int, member: tuple[int, int], backward: bool
) -> Iterator[_Value]:
    """Yield what a node communicates.

    examples: of this rank; everyone: of all ranks of the role.  member: this rank's index in the ranks, their number.
    """
    what, nbytes = What.NODE_GRADIENT if backward else What.NODE, spec.nbytes(examples)
    match op.name:
        case "batch_norm":
            numbers, dtype = 2 * spec.shape[1] + (not backward), _sum_dtype(spec.dtype) if backward else torch.float64
            if tensor_spec(node.args[0]).requires_grad or not backward:
                yield _Value(what, (numbers,), dtype, numbers * dtype.itemsize, numbers * dtype.itemsize)
        case "shard":
            features: Any = node.kwargs["features"]
            index, count = member
            first, last = list(pairwise(share_out(features, count)))[index]
            own = (last - first) * (nbytes // max(spec.shape[-1], 1))
            yield _Value(what, spec.at(examples), spec.dtype, nbytes, own)
        case _:
            yield _Value(what, spec.at(examples), spec.dtype, nbytes, nbytes)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that values of `dtype` are summed in."""
    return torch.float32 if dtype.itemsize < 4 else dtype


# -- parameters of a rank ----------------------------------------------------------------------------------------------


def shard_of(program: Program, stage: Stage, name: str, member: int, size: int) -> tuple[int, int, int] | None:
    """Return (dim, first, last + 1) of a sharded parameter on the `member`-th of `size` ranks of a group."""
    if name not in stage.shards:
        return None
    dim = stage.shards[name]
    bounds = share_out(program.tensors[name].shape[dim], size)
    return dim, bounds[member], bounds[member + 1]


def numel_on(program: PlacedProgram, stage: Stage, name: str, member: int, size: int) -> int:
    """Return the number of elements of a parameter or buffer on a rank of a stage."""
    tensor = program.tensors[name]
    if name in stage.dealt:
        return slice_numel(tensor, stage.dealt[name], program.plan.world)
    shard = shard_of(program, stage, name, member, size)
    if shard is None:
        return tensor.numel
    dim, first, last = shard
    return tensor.numel // max(tensor.shape[dim], 1) * (last - first)


def nbytes_trained(program: PlacedProgram, stage: Stage, name: str, rank: int) -> int:
    """Return the bytes of what a rank trains of a parameter, or holds of a buffer: all, a shard, or a slice."""
    group, tensor = program.plan.group(stage.role, rank), program.tensors[name]
    if name in stage.dealt:
        return slice_numel(tensor, stage.dealt[name], program.plan.world, rank) * tensor.dtype.itemsize
    return numel_on(program, stage, name, group.index(rank), len(group)) * tensor.dtype.itemsize


def bucket_nbytes(program: PlacedProgram, stage: Stage, bucket: Sequence[str]) -> int:
    """Return the bytes of a bucket of gradients on the first rank of a stage."""
    size = program.plan.grouping(stage.role).size
    return sum(numel_on(program, stage, name, 0, size) * program.tensors[name].dtype.itemsize for name in bucket)
