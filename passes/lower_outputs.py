"""Give a lowered program the stages that compute what the model returns, for `worker.predict`.

The same plan places the nodes, in the layers of evaluation.  One more role, `readers`, has the ranks and the examples
of those that read data, so that outputs are cuts to it like any other, whichever role computes them:

    scores = classifier_6(relu7)           fc        scores = classifier_6(relu7)
    returned = returned(scores)     ->               sent_cut1 = send(scores, role="readers")
                                           readers   returned = returned(recv(sent_cut1))
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from splitc.errors import PlacementError, SplitcError
from splitc.ir import comm_ops
from splitc.ir.graph import copy_graph, info, set_info, tensors_of_node, update_info
from splitc.ir.layers import Layer
from splitc.ir.placements import LayerPlacement
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram, Program, Refusal, SizeSpec
from splitc.passes.features import plan_of
from splitc.passes.lower_evaluation import lowered_beside
from splitc.passes.schedule import ScheduleForward


def with_outputs(program: LoweredProgram, captured: Program) -> LoweredProgram:
    """The program with its outputs lowered too; with the reason where that is not possible.

    captured: what `program` was lowered from.
    """
    base = captured.evaluation or captured
    outputs = base if isinstance(base, Refusal) else base.outputs
    if isinstance(base, Program) and isinstance(outputs, Program):
        try:
            outputs = _lowered(program, base, outputs)
        except SplitcError as error:
            outputs = Refusal(str(error))
    return replace(program, outputs=outputs)


def _lowered(program: LoweredProgram, base: Program, outputs: Program) -> LoweredProgram:
    graph, _ = copy_graph(outputs.graph)
    plan, layer = plan_of(program.plan.decided), "returned"
    while layer in plan.placements:
        layer += "_"
    if outputs.coupled and max(map(len, plan.roles.values())) > 1:
        raise PlacementError(outputs.coupled[0].why.replace("the loss couples", "the model's output couples"))
    _place(graph, base, layer)
    marked = Layer(layer, (graph.output_node().all_input_nodes[0].name,), (), "output")
    tensors = {name: replace(tensor, requires_grad=False) for name, tensor in program.tensors.items()}
    whole = replace(outputs, graph=graph, layers=(*base.layers, marked), tensors=tensors, costs=program.costs)
    lowered = lowered_beside(program, whole.placed(_with_readers(plan, layer)), ScheduleForward())
    _require_held(program, lowered)
    return lowered


def _place(graph: fx.Graph, base: Program, layer: str) -> None:
    """Give every node what is known of it in `base`, or what follows from the nodes it reads; `layer`: of the last."""
    known = {node.name: node for node in base.graph.nodes}
    order = [each.name for each in base.layers]
    for node in list(graph.nodes):
        if node.target == "detach":
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
        elif node.name in known and node.op not in ("placeholder", "output"):
            like = known[node.name]
            set_info(node, info(like), spec=info(node).spec)
            node.kwargs = like.kwargs if node.target in comm_ops.DRAWS else node.kwargs
        elif node.op not in ("placeholder", "output"):
            below = [order.index(info(n).layer) for n in node.all_input_nodes if info(n).layer]
            read = () if node.op == "get_attr" else tensors_of_node(base, node)
            below += [k for k, each in enumerate(base.layers) if set(read) & set(each.tensors)]
            copied = node.op == "get_attr" or isinstance(info(node).spec, SizeSpec)
            copied |= bool(node.all_input_nodes) and all(info(n).copied_to_each_stage for n in node.all_input_nodes)
            update_info(node, layer=order[max(below, default=0)], copied_to_each_stage=copied)
    (marked,) = graph.output_node().all_input_nodes
    for node in (marked, *marked.all_input_nodes):
        update_info(node, copied_to_each_stage=False)
    update_info(marked, layer=layer)


def _with_readers(plan: Plan, layer: str) -> Plan:
    """The plan of one batch as a whole, with the role of the readers, which has `layer`."""
    role = "readers"
    while role in plan.roles:
        role += "_"
    return replace(
        plan.ordered(1, plan.schedule),
        roles={**plan.roles, role: plan.roles[plan.reader]},
        batch_offsets={**plan.batch_offsets, role: plan.batch_offsets[plan.reader]},
        placements={**plan.placements, layer: LayerPlacement(role, holding="replicated", sync="none")},
    )


def _require_held(program: LoweredProgram, outputs: LoweredProgram) -> None:
    """Raise PlacementError when a rank reads a tensor that it does not have, or divided otherwise."""
    for stage in outputs.stages:
        rank = outputs.plan.roles[stage.role][0]
        own = [program.stage(role) for role in program.plan.roles_of(rank)]
        shards = {name: dim for each in own for name, dim in each.shards.items()}
        for name in stage.tensors:
            if not any(name in each.tensors for each in own) or shards.get(name) != stage.shards.get(name):
                raise PlacementError(f"the model's output reads {name} in role {stage.role}, which has not all of it")
