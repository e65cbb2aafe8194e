"""Where a stage's layers begin in its graph, and what of them a rank trains."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from splitc.ir.comm_ops import finish_of, op_of
from splitc.ir.graph import info, is_entry, tensor_spec
from splitc.ir.linears import as_table
from splitc.ir.program import PlacedProgram, Stage
from splitc.ir.wire import nbytes_trained


@dataclass(frozen=True)
class Walk:
    """What a step meets along a stage.

    first: layer -> its first node that computes, where its forward begins and its backward ends.  nodes: these, and
    the operations of `ir/comm_ops.py`, in order.
    """

    first: Mapping[str, fx.Node]
    nodes: tuple[fx.Node, ...]

    @classmethod
    def of(cls, stage: Stage) -> Walk:
        """That of a stage."""
        first, nodes, layers = dict[str, fx.Node](), list[fx.Node](), {*stage.layers}
        for node in stage.graph.nodes:
            layer, computes = info(node).layer, node.op not in ("placeholder", "output", "get_attr")
            begins = computes and not is_entry(node) and layer in layers and first.setdefault(layer, node) is node
            nodes += [node] * (begins or op_of(node) is not None)
        return cls(first, tuple(nodes))


def trainable(program: PlacedProgram, stage: Stage, rank: int, but: Iterable[str] = ()) -> float:
    """Return the bytes of a stage's parameters, or of their rows, that a rank trains.  but: parameters to leave out."""
    names = [name for name in stage.tensors if program.tensors[name].trainable and name not in but]
    rows: dict[str, int] = defaultdict(int)
    for node in stage.graph.nodes:
        if (table := _sparse_table(program, node)) is not None:
            indices, weight = table
            everyone = tensor_spec(indices).at(program.plan.batch_offsets[stage.role][-1])
            rows[program.first_names[weight]] += math.prod((*everyone, tensor_spec(node).shape[-1]))
    known = {name: numel * program.tensors[name].dtype.itemsize for name, numel in rows.items()}
    return float(sum(min(nbytes_trained(program, stage, name, rank), known.get(name, math.inf)) for name in names))


def _sparse_table(program: PlacedProgram, node: fx.Node) -> tuple[fx.Node, str] | None:
    """The indices and the weight's name of a node that looks up rows of a table with a sparse gradient."""
    if finish_of(node) and node.kwargs.get("sparse"):
        indices, weight = (each for each in node.args if isinstance(each, fx.Node))
        return indices, str(weight.target)
    table = as_table(program, node)
    return (table.values[0], table.weight) if table is not None and table.options.get("sparse") else None
