"""Checks of a program: each returns what is wrong, one line a problem, and names the node, role or rank."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import networkx as nx
import torch
from torch import fx

from splitc.ir import comm_ops
from splitc.ir.interpreter import NodeRunner, mode_of
from splitc.ir.plan import SERVER
from splitc.ir.program import LoweredProgram, PlacedProgram, Program, Stage, TensorSpec
from splitc.ir.server_rows import pushable, read_by
from splitc.ir.tied import tied, tied_are_plain
from splitc.ir.wire import WireOp, wire


def has_costs(program: Program) -> list[str]:
    return [
        f"layer {layer.name} ({layer.source}) has no price"
        for layer in program.layers
        if layer.name not in program.costs
    ]


def every_layer_placed(program: PlacedProgram) -> list[str]:
    """Every layer has a placement whose role exists, and roles have ranks within the world."""
    plan = program.plan
    problems = tied_are_plain(program)
    problems += [
        f"layer {layer.name} ({layer.source}) has no placement"
        for layer in program.layers
        if layer.name not in plan.placements
    ]
    problems += [
        f"layer {name} is placed in role {p.role!r}, which has no ranks"
        for name, p in plan.placements.items()
        if p.role not in plan.roles
    ]
    ranks = [rank for ranks in plan.roles.values() for rank in ranks]
    problems += [
        f"rank {rank} of a role is outside the world of {plan.world}"
        for rank in (*ranks, *plan.servers)
        if not 0 <= rank < plan.world
    ]
    problems += _servers_fit(program)
    for role, group in plan.groups.items():
        if len(plan.roles.get(role, ())) % group.size:
            problems.append(
                f"role {role} has {len(plan.roles[role])} ranks, which groups of {group.size} do not divide"
            )
        if role == plan.reader:
            problems.append(f"role {role} reads the data, so it cannot have groups")
    for role, bounds in plan.batch_offsets.items():
        if (
            len(bounds) != len(plan.roles[role]) + 1
            or list(bounds) != sorted(bounds)
            or bounds[-1] != plan.global_batch
        ):
            problems.append(
                f"role {role} has bounds {bounds} for {len(plan.roles[role])} ranks and {plan.global_batch} examples"
            )
    return problems


def _servers_fit(program: PlacedProgram) -> list[str]:
    """Served layers have servers, and a server that is a worker too works in every role that is served."""
    plan = program.plan
    served = {name: str(p.role) for name, p in plan.placements.items() if p.sync == "parameter_server"}
    problems = [f"layer {name} is served, but the plan has no servers" for name in served if not plan.servers]
    problems += [
        f"layer {name} is served, but its role {role} has model-parallel groups"
        for name, role in served.items()
        if role in plan.groups
    ]
    problems += [
        f"rank {rank} is a server and in role {' and '.join(plan.roles_of(rank))}, but not in role {role}, whose "
        f"parameters it serves"
        for rank in plan.servers
        for role in dict.fromkeys(served.values())
        if plan.roles_of(rank) and role not in plan.roles_of(rank)
    ]
    if len(set(plan.servers)) != len(plan.servers):
        problems.append(f"the servers {plan.servers} name a rank twice")
    return problems


def graph_is_sound(program: Program) -> list[str]:
    """Arguments come before their readers, names are unique, every node knows its layer and line."""
    return _sound(program.graph, "graph")


def _sound(graph: fx.Graph, where: str) -> list[str]:
    problems: list[str] = []
    seen: set[fx.Node] = set()
    names: set[str] = set()
    for node in graph.nodes:
        problems += [
            f"{where}: {node.name} reads {n.name} before it is computed" for n in node.all_input_nodes if n not in seen
        ]
        if node.name in names:
            problems.append(f"{where}: two nodes are named {node.name}")
        if "source" not in node.meta and node.op != "output":
            problems.append(f"{where}: {node.name} does not know its source line")
        seen.add(node)
        names.add(node.name)
    return problems


def cuts_are_communicated(program: Program) -> list[str]:
    """A value read in another role passes through a send and a recv that agree; everything else stays in its role."""
    problems: list[str] = []
    for value, reader in program.edges():
        if reader.op == "output" or value.meta["role"] == reader.meta["role"]:
            continue
        if reader.target is not comm_ops.recv or value.target is not comm_ops.send:
            problems.append(
                f"{value.name} of role {value.meta['role']} is read by {reader.name} of role "
                f"{reader.meta['role']} ({reader.meta['source']}) without send and recv"
            )
        elif value.kwargs["cut"] != reader.kwargs["cut"]:
            problems.append(
                f"{reader.name} receives cut {reader.kwargs['cut']} but {value.name} sends {value.kwargs['cut']}"
            )
    return problems


def stages_cover_the_graph(program: LoweredProgram) -> list[str]:
    """Every node of the graph is in the stage of its role, and each stage's graph is sound."""
    problems = [p for stage in program.stages for p in _sound(stage.graph, f"role {stage.role}")]
    inside = {(stage.role, node.name) for stage in program.stages for node in stage.graph.nodes}
    for node in program.graph.nodes:
        if node.op != "output" and (node.meta["role"], node.name) not in inside:
            problems.append(f"{node.name} ({node.meta['source']}) is missing from role {node.meta['role']}")
    return problems


def buckets_hold_every_gradient(program: LoweredProgram) -> list[str]:
    """Each trainable parameter's gradient is summed over its replicas exactly once, in the way that its plan says."""
    plan, problems = program.plan, []
    served = pushable(program) if plan.servers else frozenset()
    apart = tied(program)
    for stage in program.stages:
        summed = [name for bucket in stage.buckets for name in bucket]
        pushed = [name for bucket in stage.served for name in bucket]
        late = [
            str(parameter.target)
            for node in stage.graph.nodes
            if node.target is comm_ops.late_multiply
            for parameter in node.args[1:]
        ]
        for layer in program.layers:
            place = plan.placements[layer.name]
            if place.role != stage.role:
                continue
            for name in layer.tensors:
                if not program.tensors[name].trainable or name not in stage.tensors or name in apart:
                    continue
                ways = {
                    "all_reduce": summed.count(name),
                    "parameter_server": pushed.count(name),
                    "late_multiply": late.count(name),
                }
                alone = len(plan.replicas(stage.role, plan.roles[stage.role][0])) == 1
                found = {way: times for way, times in ways.items() if times}
                if place.sync == "none":
                    wrong = bool(found) or not alone
                elif place.sync == "parameter_server" and name not in served:
                    wrong = bool(found)  # the loss never reaches it
                else:
                    once = place.sync == "late_multiply" or found.get(str(place.sync)) == 1
                    wrong = set(found) != {place.sync} or not once
                if wrong:
                    told = ", ".join(f"{times} times by {way}" for way, times in found.items()) or "not at all"
                    problems.append(
                        f"the gradient of {name} in role {stage.role} is summed {told}, not once by {place.sync}"
                    )
    return list(dict.fromkeys(problems))


def served_parameters_are_pulled(program: LoweredProgram) -> list[str]:
    """Where parameters come layer by layer, each served bucket is pulled once, before the first node that reads it."""
    if not program.plan.overlap:
        return []
    problems: list[str] = []
    for stage in program.stages:
        pulled: list[int] = []
        for node in stage.graph.nodes:
            if node.target is comm_ops.pull:
                pulled.append(int(node.kwargs["bucket"]))
            elif node.op not in ("get_attr", "placeholder", "output"):
                read = read_by(program, node)
                problems += [
                    f"{node.name} ({node.meta['source']}) in role {stage.role} reads {name} before it is pulled"
                    for k, bucket in enumerate(stage.served)
                    for name in bucket
                    if name in read and k not in pulled
                ]
        problems += [
            f"bucket {k} of role {stage.role} is pulled {pulled.count(k)} times, not once"
            for k in range(len(stage.served))
            if pulled.count(k) != 1
        ]
    return problems


def served_buckets_travel(program: LoweredProgram) -> list[str]:
    """In a step, workers pull before they compute and push each bucket once; servers on their own give and take."""
    problems: list[str] = []
    for part in program.rank_programs:
        stages = [stage for stage in program.stages if stage.role in part.roles and stage.served]
        wanted = [f"{SERVER}: {verb}" for verb in ("send_parameters", "reduce_gradients") if part.roles == (SERVER,)]
        wanted += [f"{stage.role}: pull" for stage in stages]
        wanted += [f"{stage.role}: push bucket{k}" for stage in stages for k in range(len(stage.served))]
        done = [str(action) for action in part.actions]
        problems += [
            f"part {part.name} has the action {action!r} {done.count(action)} times, not once"
            for action in wanted
            if done.count(action) != 1
        ]
        problems += [
            f"role {stage.role} computes before it pulls"
            for pull, forward, stage in ((f"{s.role}: pull", f"{s.role}: forward", s) for s in stages)
            if pull in done and forward in done and done.index(pull) > done.index(forward)
        ]
    return problems


def sends_meet_receives(program: LoweredProgram) -> list[str]:
    """Between two ranks the k-th send meets the k-th recv: same value, shape and dtype.  Collectives likewise."""
    problems: list[str] = []
    sent, received = defaultdict[tuple[int, int], list[WireOp]](list), defaultdict[tuple[int, int], list[WireOp]](list)
    collectives: dict[tuple[int, ...], dict[int, list[WireOp]]] = defaultdict(lambda: defaultdict(list))
    for rank in range(program.plan.world):
        for op in wire(program, rank):
            if op.kind == "send":
                sent[rank, op.ranks[0]].append(op)
            elif op.kind == "recv":
                received[op.ranks[0], rank].append(op)
            else:
                collectives[op.ranks][rank].append(op)
    for src, dst in sorted(sent.keys() | received.keys()):
        problems += _match(f"rank {src}", f"rank {dst}", sent[src, dst], received[src, dst], ("sends", "receives"))
    for ranks, by_rank in collectives.items():
        first = by_rank[ranks[0]]
        for rank in ranks[1:]:
            problems += _match(f"rank {ranks[0]}", f"rank {rank}", first, by_rank[rank], ("sums", "sums"))
    return problems


def _match(left: str, right: str, a: list[WireOp], b: list[WireOp], verbs: tuple[str, str]) -> list[str]:
    for x, y in zip(a, b, strict=False):
        if (x.label, x.shape, x.dtype) != (y.label, y.shape, y.dtype):
            return [
                f"{left} {verbs[0]} {x.label} {x.shape} {x.dtype} "
                f"where {right} {verbs[1]} {y.label} {y.shape} {y.dtype}"
            ]
    if len(a) > len(b):
        return [f"{left} {verbs[0]} {a[len(b)].label}, which {right} never {verbs[1]}"]
    if len(b) > len(a):
        return [f"{right} {verbs[1]} {b[len(a)].label}, which {left} never {verbs[0]}"]
    return []


def no_deadlock(program: LoweredProgram) -> list[str]:
    """The ranks' orders on the wire, with matching operations merged, form no cycle (design 8)."""
    graph: nx.DiGraph[Any] = nx.DiGraph()
    counts: dict[Any, int] = defaultdict(int)
    for rank in range(program.plan.world):
        before = None
        for op in wire(program, rank):
            if op.kind == "collective":
                channel: tuple[Any, ...] = ("collective", op.ranks, rank)
            else:
                channel = ("message", *((rank, op.ranks[0]) if op.kind == "send" else (op.ranks[0], rank)), op.kind)
            event = (*channel[: 2 if op.kind == "collective" else 3], counts[channel])
            counts[channel] += 1
            graph.add_node(event)
            graph.nodes[event].setdefault("text", []).append(f"rank {rank}: {op}")
            if before is not None:
                graph.add_edge(before, event)
            before = event
    try:
        cycle = nx.find_cycle(graph)
    except nx.NetworkXNoCycle:
        return []
    chain = "; then ".join(" with ".join(graph.nodes[event]["text"]) for event, _ in cycle)
    return [f"the ranks wait for each other in a circle: {chain}; then the first again"]


def shapes_hold(program: LoweredProgram) -> list[str]:
    """Every stage runs, on fake tensors, at each batch size that one of its ranks has, with the shapes it promises."""
    plan = program.plan
    problems: list[str] = []
    for stage in program.stages:
        for batch in sorted({plan.peak_batch(stage.role, rank) for rank in plan.roles[stage.role]}):
            problems += _stage_shapes(program, stage, batch)
    return problems


def _stage_shapes(program: Program, stage: Stage, batch: int) -> list[str]:
    mode = mode_of(program.root)
    problems: list[str] = []
    current = ""

    def check(node: fx.Node, run: Any) -> Any:
        nonlocal current
        current = f"{node.name} ({node.meta.get('source', 'output')})"
        spec = node.meta.get("spec")
        if node.target is comm_ops.recv:
            assert isinstance(spec, TensorSpec)
            value = torch.empty(spec.at(batch), dtype=spec.dtype)
            return value.requires_grad_() if node.meta["cut"].gradient else value
        value = run()
        if isinstance(spec, TensorSpec) and isinstance(value, torch.Tensor) and tuple(value.shape) != spec.at(batch):
            problems.append(
                f"{current} is {tuple(value.shape)} in role {stage.role} at a batch of {batch}, not {spec.at(batch)}"
            )
        return value

    inputs = {i.name: i.spec for i in program.inputs}
    try:
        with mode:
            feed = {name: torch.empty(inputs[name].at(batch), dtype=inputs[name].dtype) for name in stage.inputs}
            NodeRunner(program.root, stage.graph, check).run_named(feed)
    except Exception as error:
        problems.append(f"{current} fails in role {stage.role} at a batch of {batch}: {error}")
    return problems
