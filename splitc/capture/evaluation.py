"""Capture the model in evaluation mode, where it computes something else than in training with its modes switched.

A program evaluates by its training forward, with dropout off and BatchNorm on running statistics, if a trace in
evaluation mode gives the same graph but for these.  Any other model (`if self.training`, auxiliary heads, dropout that
stays on) has a graph of its own for that, which is validated as the one for training is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx, nn

from splitc.capture.capture import capture
from splitc.capture.example.example import Example
from splitc.capture.group_layers import gather_coupled
from splitc.capture.in_batch import readers_of_kept
from splitc.errors import CaptureError
from splitc.ir import comm_ops
from splitc.ir.graph import NORMS, changes_statistics, copy_graph, info, op_name
from splitc.ir.layers import Coupling
from splitc.ir.program import Program, Refusal
from splitc.runtime.evaluation import evaluating


def capture_evaluation(
    program: Program, model: nn.Module, example: Example, validated: Callable[[Program], Program]
) -> Program | Refusal | None:
    """The program of evaluation mode; None where that of training serves.

    A model that never asks whether it trains, but for dropout, is not traced again.
    validated: `validate_capture` of the model and the example.
    """
    if not program.reads_mode:
        return None
    with evaluating(model, *([example.loss] if isinstance(example.loss, nn.Module) else [])):
        try:
            found = capture(model, example, program.name, program.autocast, training=program)
            for node in found.graph.nodes:
                if changes_statistics(node):
                    raise CaptureError(f"{info(node).source}: {node.name} updates running statistics in evaluation too")
                if node.target is comm_ops.dropout:
                    node.update_kwarg("evaluating", True)
            if _operations(found) == _operations(program) and _of_outputs(found) == _of_outputs(program):
                return None
            known = [layer.name for layer in program.layers]
            found = validated(found)
            kept = [Coupling(node.name, why) for node, why in readers_of_kept(found, program).items()]
            found = gather_coupled(replace(found, coupled=(*found.coupled, *kept)), known)
            if found.in_batch not in ("", *known):
                raise CaptureError(f"in evaluation alone examples are coupled: {found.coupled[0].why}")
            _skip(found.graph, [node for node in found.graph.nodes if op_name(node) == "detach"])
            return found
        except CaptureError as error:
            return Refusal(str(error))


def _skip(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Remove nodes that give their first argument."""
    for node in nodes:
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)


def _only_trains(node: fx.Node) -> bool:
    return node.target is comm_ops.dropout and not node.kwargs.get("evaluating")


def _of_outputs(program: Program) -> Any:
    return program.outputs if isinstance(program.outputs, Refusal) else _operations(program.outputs)


def _operations(program: Program) -> list[tuple[Any, ...]]:
    """What the graph computes when it evaluates: without dropout of training, detach, counting, modes of BatchNorm."""
    graph, _ = copy_graph(program.graph)
    _skip(graph, [node for node in graph.nodes if op_name(node) == "detach" or _only_trains(node)])
    for node in list(graph.nodes):
        if node.target is comm_ops.store_buffer:
            graph.erase_node(node)
        if node.target in NORMS and (len(node.args) > 1 and node.args[1] is not None):
            node.kwargs = {k: v for k, v in node.kwargs.items() if k not in ("training", "use_input_stats")}
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    number = {node: f"%{k}" for k, node in enumerate(graph.nodes)}

    def numbered(arguments: Any) -> Any:
        return fx.node.map_arg(arguments, number.__getitem__)

    return [(n.op, n.target, numbered(n.args), numbered(n.kwargs)) for n in graph.nodes]
