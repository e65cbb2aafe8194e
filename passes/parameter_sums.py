"""Sum the gradient of every parameter of a role with groups over the ranks that have terms of it, and none twice.

A parameter that all ranks of a group use alike, or divide, is summed over one rank of each group; one that each rank
uses on its own examples over all ranks of the role.  A parameter that is used in both ways is brought to the first sum:

    y = linear(x, weight)   batch            weight_enter = copy_to_group(weight)    its backward sums over the group
    z = linear(h, weight)   replicate   ->   y = linear(x, weight_enter); z = linear(h, weight)
"""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from splitc.errors import PlacementError
from splitc.ir import comm_ops
from splitc.ir.graph import at_the_end, info, tensors_of_node, update_info
from splitc.ir.linears import call_as_function
from splitc.ir.program import PlacedProgram, TensorSpec
from splitc.passes.insert_transitions import Transitions
from splitc.runtime.collectives.layouts import State


def require_one_division(program: PlacedProgram, graph: fx.Graph, role: str) -> None:
    """Raise PlacementError for a tensor that two nodes of a role divide unlike each other."""
    for name, readers in readers_of_parameters(program, graph, role).items():
        dims = {info(reader).shards.get(name): reader for reader in readers}
        if len(dims) > 1:
            how = " and ".join(
                f"{'whole' if dim is None else f'divided along dim {dim}'} by {node.name} ({info(node).source})"
                for dim, node in dims.items()
            )
            raise PlacementError(f"{name} is used {how}; give the layers that share it one division")


def sum_over_role(program: PlacedProgram, graph: fx.Graph, role: str, transitions: Transitions) -> None:
    """Let parameters that ranks use on their own examples be summed over the role, or over the group first."""
    own, others = list[str](), list[str]()
    for name, readers in readers_of_parameters(program, graph, role).items():
        alone = [node for node in readers if info(node).state is State.BATCH]
        if not alone or not program.tensors[name].trainable:
            continue
        if len(alone) == len(readers):
            own.append(name)
            continue
        for node in alone:
            if node.op == "call_module" and call_as_function(program, graph, node):
                return sum_over_role(program, graph, role, transitions)
            parameter = next((n for n in node.all_input_nodes if name in tensors_of_node(program, n)), None)
            if parameter is None:
                raise PlacementError(
                    f"{name} is used in state batch by {node.name} ({info(node).source}), and in another by "
                    f"{next(n.name for n in readers if n not in alone)}; give the layers that share it one state"
                )
            tensor = program.tensors[name]
            update_info(parameter, spec=TensorSpec(tensor.shape, tensor.dtype, None, tensor.requires_grad))
            transitions.divides(parameter, node)
    if not own:
        return
    for node in list(graph.nodes):
        if node.target is comm_ops.all_reduce and info(node).role == role:
            others = [name for name in node.kwargs["parameters"] if name not in own]
            graph.erase_node(node)
    at_the_end(graph, role, comm_ops.all_reduce, (*own, *others), own=tuple(own))  # buckets fill from the last one


def readers_of_parameters(program: PlacedProgram, graph: fx.Graph, role: str) -> dict[str, list[fx.Node]]:
    """The parameters of a role -> the nodes that compute with them."""
    found: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if info(node).role == role and node.op.startswith("call") and node.target is not comm_ops.all_reduce:
            for name in dict.fromkeys(tensors_of_node(program, node)):
                found[name].append(node)
    return {name: nodes for name, nodes in found.items() if program.tensors[name].parameter}
