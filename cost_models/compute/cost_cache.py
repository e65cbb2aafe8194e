"""Keep the counted costs of graphs on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from splitc.cost_models.compute.flops import layer_costs
from splitc.ir.constructors import construction
from splitc.ir.costs import CostLine, LayerCost, OpCost
from splitc.ir.disk_cache import digest_of, is_off, keep, recall
from splitc.ir.graph import info
from splitc.ir.program import Program

_KNOWN = ("torch", "_operator", "builtins", "math", "splitc")  # whose functions their name tells


def cached_layer_costs(program: Program) -> dict[str, CostLine]:
    """`layer_costs`, counted once for each graph."""
    text = None if is_off() else graph_text(program)
    key = None if text is None else digest_of(text)
    if key is not None and (found := _read(recall("costs", key), [layer.name for layer in program.layers])):
        return found
    counted = layer_costs(program)
    if key is not None:
        keep("costs", key, {name: [_data(line.small), _data(line.large)] for name, line in counted.items()})
    return counted


def graph_text(program: Program) -> str | None:
    """Everything that the counted costs depend on; None if a node calls what a text does not tell."""
    lines = [f"{program.batch} {program.autocast} {program.inputs} {program.layers} {[*program.tensors.values()]}"]
    for name, tensor in (*program.root.named_parameters(), *program.root.named_buffers()):
        lines.append(f"{name} {tensor.stride()} {tensor.device} {type(tensor).__name__}")
    for node in program.graph.nodes:
        called = _called(program, node)
        if called is None:
            return None
        lines.append(f"{node.op} {node.name} {called} {node.args} {node.kwargs} {info(node)}")
    return "\n".join(lines)


def _called(program: Program, node: fx.Node) -> str | None:
    """What a node calls: the constructor of a module, the full name of a function."""
    target: Any = node.target
    if node.op == "call_module":
        called = program.root.get_submodule(target)
        made = construction(called)
        return None if made is None else f"{target} {made} {called.training}"
    if node.op == "call_function":
        module, name = getattr(target, "__module__", None) or "torch", getattr(target, "__qualname__", None)
        return f"{module}.{name}" if name and module.partition(".")[0] in _KNOWN else None
    return str(target)


def _data(cost: LayerCost) -> list[Any]:
    ops = [[op.name, op.op_class, op.backward, *op.numbers, op.unknown] for op in cost.ops]
    return [cost.batch, ops, cost.saved_bytes]


def _read(data: Any, layers: list[str]) -> dict[str, CostLine] | None:
    """The inverse of `_data` for each layer; None if it is something else."""
    if not isinstance(data, Mapping) or list(data) != layers:
        return None
    return {
        name: CostLine(*(LayerCost(batch, tuple(OpCost(*op) for op in ops), saved) for batch, ops, saved in line))
        for name, line in data.items()
    }
