"""Checks of graphs, placements and buckets: one line for each problem, which names node, role or rank."""

from __future__ import annotations

from torch import fx

from splitc.ir import comm_ops
from splitc.ir.features import features
from splitc.ir.graph import info, tensors_of_node
from splitc.ir.interpreter import shapes_at
from splitc.ir.plan_checks import decision_problems
from splitc.ir.program import LoweredProgram, PlacedProgram, Program
from splitc.ir.schedule.verbs import SUMS
from splitc.runtime.collectives.layouts import State


def has_costs(program: Program) -> list[str]:
    unpriced = [layer for layer in program.layers if layer.name not in program.costs]
    return [f"layer {layer.name} ({layer.source}) has no price" for layer in unpriced]


def every_layer_placed(program: PlacedProgram) -> list[str]:
    """Every layer is placed in a role that has ranks, and all ranks, groups and batch bounds are valid."""
    plan = program.plan
    problems = tied_are_replicated(program)
    missing = [layer for layer in program.layers if layer.name not in plan.placements]
    problems += [f"layer {layer.name} ({layer.source}) has no placement" for layer in missing]
    problems += decision_problems(plan)
    problems += [problem for feature in features() for problem in feature.misplaced(program)]
    if program.in_batch in plan.placements and not problems and not plan.sees_whole_batch(program.in_batch):
        problems.append(f"layer {program.in_batch} needs the whole batch, and its ranks see parts of it")
    return problems


def tied_are_replicated(program: PlacedProgram) -> list[str]:
    """A parameter that several roles use is replicated in all of them, and all-reduced over them."""
    plan = program.plan
    if any(layer.name not in plan.placements for layer in program.layers):
        return []
    return [
        f"{name} is used in several roles, so layer {layer.name} cannot have it {place.holding}, with sync {place.sync}"
        for layer in program.layers
        for name in layer.tensors
        for place in [plan.placements[layer.name]]
        if name in program.tied
        and (place.holding != "replicated" or place.sync not in ("all_reduce", "none") or place.role in plan.groups)
    ]


def graph_is_sound(program: Program) -> list[str]:
    """Arguments come before their readers, names are unique, and every node has its source line."""
    return _sound(program.graph, "graph")


def _sound(graph: fx.Graph, where: str) -> list[str]:
    nodes = (node for node in graph.nodes if node.op != "output" and not info(node).source)
    problems = [f"{where}: {node.name} has no source line" for node in nodes]
    try:
        graph.lint()
    except (RuntimeError, ValueError) as error:
        problems.append(f"{where}: {str(error).splitlines()[0]}")
    return problems


def cuts_are_communicated(program: Program) -> list[str]:
    """Every value that another role reads passes through a send and a recv of the same cut."""
    problems: list[str] = []
    for value, reader in program.edges():
        if reader.op == "output" or info(value).role == info(reader).role:
            continue
        if reader.target is not comm_ops.recv or value.target is not comm_ops.send:
            problems.append(
                f"{value.name} of role {info(value).role} is read by {reader.name} of role "
                f"{info(reader).role} ({info(reader).source}) without send and recv"
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
        if node.op != "output" and (info(node).role, node.name) not in inside:
            problems.append(f"{node.name} ({info(node).source}) is missing from role {info(node).role}")
    return problems


def buckets_hold_every_gradient(program: LoweredProgram) -> list[str]:
    """The gradient of each trainable parameter is summed over its replicas exactly once, by the sync of its plan."""
    plan, problems = program.plan, []
    for role, parts in plan.parts.items():
        stages = [program.stage(part) for part in parts]
        nodes = [node for stage in stages for node in stage.graph.nodes]
        ways = {
            sync: [name for stage in stages for bucket in stage.buckets_of(verb) for name in bucket]
            for sync, verb in SUMS.items()
        }
        for node in filter(comm_ops.finish_of, nodes):
            ways.setdefault("late_multiply", []).extend(str(parameter.target) for parameter in node.args[1:])
        own = {name for n in nodes if info(n).state is State.BATCH for name in tensors_of_node(program, n)}
        summed_over_all = {name for stage in stages for name in stage.own_sums}
        held = {name for stage in stages for name in stage.tensors}
        alone = not plan.trains_copies(role)
        for layer in (layer for stage in stages for layer in stage.layers):
            place = plan.placements[layer]
            for name in program.layer(layer).tensors:
                if not program.tensors[name].trainable or name not in held or name in program.tied:
                    continue
                found = {way: times for way, names in ways.items() if (times := names.count(name))}
                if name in own:
                    wrong = found != {"all_reduce": 1} or name not in summed_over_all
                elif alone and place.sync in ("none", "all_reduce"):
                    wrong = bool(found.keys() - {"all_reduce"})  # which sums over one rank
                elif place.sync in ("none", "average"):
                    wrong = bool(found) or not alone
                else:
                    once = place.sync not in ("all_reduce", "parameter_server") or found.get(str(place.sync)) == 1
                    wrong = set(found) != {place.sync} or not once
                if wrong:
                    summary = ", ".join(f"{times} times by {way}" for way, times in found.items()) or "not at all"
                    problems.append(
                        f"the gradient of {name} in role {role} is summed {summary}, not once by {place.sync}"
                    )
    return list(dict.fromkeys(problems))


def shapes_hold(program: LoweredProgram) -> list[str]:
    """Every stage runs on fake tensors at each batch size of its ranks, with the shapes of its specs.

    A batch below 2 is checked as 2: BatchNorm refuses to normalise a single value.
    """
    plan = program.plan
    problems: list[str] = []
    for stage in program.stages:
        for batch in sorted({max(2, plan.peak_batch(stage.role, rank)) for rank in plan.roles[stage.role]}):
            problems += shapes_at(program, batch, stage)
    return problems
