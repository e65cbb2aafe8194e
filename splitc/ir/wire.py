"""Each rank's messages and collectives in one step, in order: its action list with the plan's ranks filled in.

What happens once a round or an update is there once, and says how often in a step it is on average (`WireOp.times`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
from torch import fx

from splitc.ir.comm_ops import CommOp, batch_norm, op_of
from splitc.ir.comm_tensors import Call
from splitc.ir.features import features
from splitc.ir.graph import has_own_code, info, is_entry, starts_at_once, tensor_spec
from splitc.ir.linears import factors
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram, PlacedProgram, Program, Stage, TensorSpec
from splitc.ir.schedule.actions import Action
from splitc.ir.schedule.verb import Among, Often, Waits, When
from splitc.ir.shares import share_out
from splitc.ir.short_wire import carried
from splitc.ir.transitions import Collective, nbytes_sent, numbers_sent, transition_of
from splitc.ir.wire_op import Payload, What, WireOp
from splitc.runtime.collectives.layouts import Extents, State, Transition
from splitc.runtime.transport.doubling import sent_bytes as doubling_sent

_WIRES: WeakKeyDictionary[LoweredProgram, dict[int, tuple[WireOp, ...]]] = WeakKeyDictionary()
_NODES: WeakKeyDictionary[PlacedProgram, dict[fx.Graph, list[tuple[fx.Node, CommOp]]]] = WeakKeyDictionary()


def wire(program: LoweredProgram, rank: int) -> tuple[WireOp, ...]:
    """Return what `rank` sends, receives and reduces in one training step, in order; computed once for a program."""
    ranks = _WIRES.setdefault(program, {})
    if rank not in ranks:
        works = bool(program.plan.duties(rank))  # one without work receives the loss
        actions = program.rank_program(rank).actions if works else (Action("sum_loss"),)
        ranks[rank] = tuple(op for action in actions for op in of_action(program, rank, action))
    return ranks[rank]


def of_action(program: LoweredProgram, rank: int, action: Action) -> Iterator[WireOp]:
    """Yield what `rank` communicates in one action."""
    plan, row, times = program.plan, action.row, 1.0
    if row.when is not When.EVERY_STEP:
        times = 1 / plan.accumulate
    if row.in_round:
        times /= plan.period
    begins = row.what is What.NODE_GRADIENT or row.waits is Waits.AFTER_BACKWARD
    within = (action.role, action.microbatch) if begins else None
    for op in _AMONG[row.among](program, rank, action):
        if op.kind != "collective" or len(op.ranks) > 1:
            yield op if times == 1 and not within else replace(op, times=times, within=within)


def _of_feature(program: LoweredProgram, rank: int, action: Action) -> Iterator[WireOp]:
    ops = next(feature.ops for feature in features() if action.verb in feature.ops)
    return ops[action.verb](program, rank, action)


def _loss(program: LoweredProgram, rank: int, action: Action) -> Iterator[WireOp]:
    """Yield the all-reduce of the loss over all ranks, those without work too; within a round over those of a unit."""
    plan, collective, payload = program.plan, action.row.collective, Payload(What.LOSS)
    last = 1 / (plan.period * plan.accumulate) if plan.joins_losses else float(not plan.trains_in_units)
    for ranks, times in ((plan.unit(rank), 1 - last), (tuple(range(plan.world)), last)):
        if times:
            yield WireOp("collective", payload, ranks, (), torch.float64, 0, None, collective, times).of_all()


def _tied(program: LoweredProgram, rank: int, action: Action) -> Iterator[WireOp]:
    """Yield the all-reduce of the gradient of a parameter that several roles use."""
    tensor, payload = program.tensors[action.value], Payload(What.TIED, action.value)
    ranks, collective = program.tied[action.value], action.row.collective
    op = WireOp("collective", payload, ranks, tensor.shape, tensor.dtype, algorithm=collective).of_all()
    yield from carried(program.plan, op, ranks.index(rank))


def _bucket(program: LoweredProgram, rank: int, action: Action) -> Iterator[WireOp]:
    """Yield the all-reduce of a bucket of gradients over the replicas."""
    plan, stage = program.plan, program.stage(action.role)
    names = stage.bucket(action)
    replicas = (plan.together if names[0] in stage.own_sums else plan.replicas)(stage.role, rank)
    dtype = program.tensors[names[0]].dtype
    numel = sum(numel_on(program, stage, name, rank) for name in names) + len(names) * has_own_code(stage.graph)
    nbytes = numel * dtype.itemsize
    payload = Payload(What.BUCKET, role=stage.role, bucket=action.bucket)
    if plan.all_reduce == "backend":
        algorithm, sent = str(Collective.ALL_REDUCE), Collective.ALL_REDUCE.sent(nbytes, nbytes, len(replicas))
    else:
        algorithm, sent = plan.all_reduce, doubling_sent(nbytes, replicas.index(rank), len(replicas))
    op = WireOp("collective", payload, replicas, (numel,), dtype, sent, None, algorithm)
    flagged = has_own_code(stage.graph)  # a format would round the flags too
    yield from (op,) if flagged else carried(plan, op, replicas.index(rank))


def _messages(program: LoweredProgram, rank: int, action: Action) -> Iterator[WireOp]:
    """Yield the messages of a cut, or of its gradient, to or from each rank that has a part of it."""
    plan, cut, collective = program.plan, program.stage(action.role).cut(action), action.row.collective
    what, backward, layer = action.row.what, action.row.backward, program.layer_of.get(cut.value)
    piece = None if program.travels_whole(cut) else action.microbatch
    assert what is not None, action
    for peer, a, b in plan.routes(rank, action.role, action.peer, cut.together(backward), piece):
        spec, columns = cut.spec, None
        if cut.travels(backward) is State.FEATURES:
            own = rank if action.role == cut.consumer else peer
            index = (members := plan.group(cut.consumer, own)).index(own)
            first, last = share_out(spec.shape[-1], len(members))[index : index + 2]
            spec, columns = replace(spec, shape=(*spec.shape[:-1], last - first)), (first, last)
        if peer == rank or not spec.nbytes(1):
            continue  # handed over in memory, or empty
        payload = Payload(what, cut.name, cut.producer, cut.consumer, None, action.microbatch, (a, b), 0, columns)
        sent = collective.sent(0, spec.nbytes(b - a), 2)
        op = WireOp(str(collective), payload, (peer,), spec.at(b - a), spec.dtype, sent, layer)
        yield from carried(plan, op, 0, [math.prod(op.shape)] * (op.kind == "send"))


def _over_group(program: LoweredProgram, rank: int, action: Action) -> Iterator[WireOp]:
    """Yield how a group brings a cut to the state that its stage reads, or its gradient back."""
    stage = program.stage(action.role)
    cut = stage.cut(action)
    assert cut.entry is not None, action
    transition, what = cut.entry.adjoint if action.row.backward else cut.entry, action.row.what
    assert what is not None, action
    payload = Payload(what, cut.name, action.role, microbatch=action.microbatch)
    layer = program.layer_of.get(cut.value)
    yield from _moved(program.plan, rank, action, cut.spec, transition, payload, layer)


def _moved(
    plan: Plan, rank: int, action: Action, spec: TensorSpec, transition: Transition, payload: Payload, layer: str | None
) -> Iterator[WireOp]:
    """Yield the collective of a transition in a microbatch; none for one without examples."""
    members = plan.group(action.role, rank)
    examples = plan.sizes_at(action.role, rank, action.microbatch)
    if not transition.move.communicates or not any(examples) or len(members) == 1:
        return
    widths = (b - a for a, b in pairwise(share_out(spec.shape[-1] if spec.shape else 0, len(members))))
    extents = Extents(examples, tuple(widths))
    index, shape, collective = members.index(rank), spec.at(sum(examples)), transition.move.collective
    sent = nbytes_sent(transition, spec.nbytes(sum(examples)), extents, index)
    op = WireOp("collective", payload, members, shape, spec.dtype, sent, layer, collective)
    yield from carried(plan, op, index, numbers_sent(transition, math.prod(shape), extents, index))


# -- inside a stage ----------------------------------------------------------------------------------------------------


def inside(program: PlacedProgram, stage: Stage, rank: int, action: Action) -> Iterator[tuple[fx.Node, WireOp]]:
    """Yield what the nodes of a stage communicate in forward, or in backward, which visits them in reverse."""
    plan, role, backward = program.plan, stage.role, action.row.backward
    sizes, once = plan.sizes_at(role, rank, action.microbatch), action.row.often is Often.ONCE
    if not (examples := sum(sizes)) and not once:
        return
    mine = sizes[plan.group(role, rank).index(rank)]
    known = _NODES.setdefault(program, {})
    if stage.graph not in known:
        found = ((node, op_of(node)) for node in stage.graph.nodes)
        known[stage.graph] = [(node, op) for node, op in found if op is not None and op.in_stage]
    nodes = [(node, op) for node, op in known[stage.graph] if info(node).once == once]
    nodes.sort(key=lambda pair: not starts_at_once(pair[0]))
    late = [node for node, op in nodes if op.finish and tensor_spec(node).requires_grad]
    for node, op in reversed(nodes) if backward else nodes:
        spec, transition = info(node).spec, transition_of(node)
        if not isinstance(spec, TensorSpec) or (backward and not spec.requires_grad) or is_entry(node):
            continue
        layer = info(node).layer or None
        payload = Payload(What.NODE_GRADIENT if backward else What.NODE, node.name, role, microbatch=action.microbatch)
        if transition is not None:
            moved = transition.adjoint if backward else transition
            yield from ((node, op) for op in _moved(plan, rank, action, spec, moved, payload, layer))
            continue
        collective = op.backward if backward else op.collective
        if collective is Collective.NONE:
            continue
        own = bool(node.kwargs.get("own")) or info(node).state is State.BATCH
        ranks = plan.group(role, rank) if op.among is Among.GROUP else plan.replicas(role, rank)
        ranks = plan.together(role, rank) if own else ranks
        if len(ranks) == 1:
            continue
        if op.finish:  # in the last microbatch: indices when forward begins, all else when the last error has come
            if (not backward or node is late[0]) and action.microbatch == plan.microbatches - 1:
                yield from ((node, pack) for pack in _packs(program, role, rank, late, payload))
            continue
        if node.target is batch_norm and info(node).state is State.FEATURES:
            share, index = share_out(spec.shape[-1], len(sizes)), plan.group(role, rank).index(rank)
            spec = replace(spec, shape=(*spec.shape[:-1], share[index + 1] - share[index]))
        given = tuple(info(each).spec if isinstance(each, fx.Node) else None for each in node.args)
        for shape, dtype in op.tensors(Call(spec, given, node.kwargs, mine if own else examples, backward)):
            yield node, WireOp("collective", payload, ranks, shape, dtype, 0, layer, collective).of_all()


def _packs(program: PlacedProgram, role: str, rank: int, late: Sequence[fx.Node], payload: Payload) -> Iterator[WireOp]:
    """Yield the factors of nodes that begin to travel in forward, or else in backward, those of one dtype together."""
    early, payload = payload.what is What.NODE, replace(payload, what=What.LATE)
    plan, gather = program.plan, Collective.ALL_GATHER
    ranks, everyone = plan.replicas(role, rank), plan.batch_offsets[role][-1]
    rows: dict[torch.dtype, dict[str, int]] = {}  # dtype -> layer -> elements of one example
    for node in reversed(late):
        weight = next(each for each in node.all_input_nodes if each.op == "get_attr")
        trained = program.tensors[program.first_names[str(weight.target)]].trainable
        for numel, dtype in factors(node.all_input_nodes, node, trained):
            if early != (dtype is torch.int32 and "gathered" in node.kwargs):
                continue
            layers = rows.setdefault(dtype, {})
            layers[info(node).layer] = layers.get(info(node).layer, 0) + numel
    for dtype, layers in rows.items():
        total = sum(layers.values())
        own = plan.batch(role, rank) * total * dtype.itemsize
        packed = tuple((layer, numel / total) for layer, numel in layers.items())
        sent, shape = gather.sent(own, own, len(ranks)), (everyone * total,)
        op = WireOp("collective", payload, ranks, shape, dtype, sent, None, gather, packed=packed)
        yield from carried(plan, op, ranks.index(rank), [own // dtype.itemsize] * (len(ranks) - 1))


_AMONG: dict[Among, Callable[[LoweredProgram, int, Action], Iterator[WireOp]]] = {
    Among.NONE: lambda program, rank, action: iter(()),
    Among.PAIR: _messages,
    Among.GROUP: _over_group,
    Among.STAGE: lambda program, rank, a: (op for _, op in inside(program, program.stage(a.role), rank, a)),
    Among.REPLICAS: _bucket,
    Among.HOLDERS: _tied,
    Among.OWN: _of_feature,
    Among.WORLD: _loss,
}


# -- parameters of a rank ----------------------------------------------------------------------------------------------


def shard_of(program: Program, stage: Stage, name: str, member: int, size: int) -> tuple[int, int, int] | None:
    """Return (dim, first, last + 1) of a sharded parameter on the `member`-th of `size` ranks of a group."""
    if name not in stage.shards:
        return None
    dim = stage.shards[name]
    bounds = share_out(program.tensors[name].shape[dim], size)
    return dim, bounds[member], bounds[member + 1]


def numel_on(program: PlacedProgram, stage: Stage, name: str, rank: int) -> int:
    """Return the number of elements of a parameter or buffer on a rank of a stage."""
    tensor, group = program.tensors[name], program.plan.group(stage.role, rank)
    for feature in features():
        if (own := feature.numel(program, stage, name, rank)) is not None:
            return own
    shard = shard_of(program, stage, name, group.index(rank), len(group))
    if shard is None:
        return tensor.numel
    dim, first, last = shard
    return tensor.numel // max(tensor.shape[dim], 1) * (last - first)


def nbytes_trained(program: PlacedProgram, stage: Stage, name: str, rank: int) -> int:
    """Return the bytes of what a rank trains of a parameter, or holds of a buffer: all, a shard, or a slice."""
    return numel_on(program, stage, name, rank) * program.tensors[name].dtype.itemsize


def bucket_nbytes(program: PlacedProgram, stage: Stage, bucket: Sequence[str]) -> int:
    """Return the bytes of a bucket of gradients on the first rank of a stage."""
    return sum(nbytes_trained(program, stage, name, program.plan.roles[stage.role][0]) for name in bucket)
