"""Programs made by hand, for tests of what needs a graph and costs but no model.

Every layer is one node that reads other nodes and makes `width` numbers for each example.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from splitc.ir.cluster import Cluster
from splitc.ir.costs import CostLine, LayerCost, OpCost
from splitc.ir.device import Device, Link
from splitc.ir.graph import NodeInfo, set_info
from splitc.ir.layers import Layer, StateTensor
from splitc.ir.pass_manager import run_pass
from splitc.ir.plan import Plan
from splitc.ir.prediction import Candidate
from splitc.ir.program import Input, Program, TensorSpec
from splitc.passes.place import Place
from splitc.passes.planner.strategy import Strategy
from splitc.strategies.layer_separation import LayerSeparation


@dataclass(frozen=True)
class Row:
    """One layer: parameters (numbers), reads (layers or inputs), flops, moved and kept an example."""

    name: str
    reads: tuple[str, ...]
    parameters: int = 0
    width: int = 1
    flops: float = 0.0
    moved: float = 0.0
    kept: float = 0.0
    trains: bool = True
    batched: bool = True  # whether what it makes has a row for each example
    shares: str | None = None  # a layer whose parameter it uses instead of one of its own


def compute(*values: Any) -> Any:
    """What every node calls; it is never run."""
    return values[0]


def small_program(rows: Iterable[Row], batch: int = 4, inputs: Mapping[str, int] | None = None) -> Program:
    """The program of `rows`; the last one makes the loss.  inputs: name -> numbers an example."""
    graph, rows = fx.Graph(), list(rows)
    nodes: dict[str, fx.Node] = {}
    specs = {
        name: TensorSpec((1, width), torch.float32, 0) for name, width in (inputs or {"images": 8, "labels": 1}).items()
    }
    for name, spec in specs.items():
        nodes[name] = graph.placeholder(name)
        set_info(nodes[name], NodeInfo(spec, "model.py:1"))
    holdings, layers, root = {}, [], nn.Module()
    trained: set[str] = set()
    for line, row in enumerate(rows, start=2):
        held = f"{row.shares or row.name}.weight"
        own = bool(row.parameters or row.shares)
        if row.parameters:
            holdings[held] = StateTensor(held, (row.parameters,), torch.float32, True, row.trains, names=(held,))
        if (own and holdings[held].trainable) or trained & set(row.reads):
            trained.add(row.name)
        read = [nodes[name] for name in row.reads]
        if own:
            read.append(_parameter(graph, root, holdings[held], row.name, line))
        node = graph.call_function(compute, tuple(read))
        node.name = row.name
        spec = TensorSpec((1, row.width), torch.float32, 0 if row.batched else None, row.name in trained)
        set_info(node, NodeInfo(spec, f"model.py:{line}", layer=row.name))
        nodes[row.name] = node
        layers.append(Layer(row.name, (row.name,), (held,) if own else (), f"model.py:{line}"))
    graph.output(nodes[rows[-1].name])
    return Program(
        name="small",
        graph=graph,
        root=root,
        inputs=tuple(Input(name, spec) for name, spec in specs.items()),
        batch=batch,
        layers=tuple(layers),
        tensors=holdings,
        costs={row.name: CostLine(_cost(row, batch), _cost(row, 2 * batch)) for row in rows},
    )


def _parameter(graph: fx.Graph, root: nn.Module, tensor: StateTensor, layer: str, line: int) -> fx.Node:
    """The node of a parameter, which the root has."""
    owner, name = tensor.name.rsplit(".", 1)
    if owner not in dict(root.named_children()):
        held = nn.Parameter(torch.empty(tensor.shape, device="meta"), tensor.trainable)
        root.add_module(owner, nn.Module())
        root.get_submodule(owner).register_parameter(name, held)
    node = graph.create_node("get_attr", tensor.name, name=f"{layer}_weight")
    set_info(
        node, NodeInfo(TensorSpec(tensor.shape, torch.float32, None, tensor.trainable), f"model.py:{line}", layer=layer)
    )
    return node


def _cost(row: Row, batch: int) -> LayerCost:
    """One op forward and one backward, of a third and of two thirds of the work; three launches."""
    op_class = "matmul" if row.flops else "memory"
    ops = tuple(
        OpCost("layer", op_class, part == 2, batch * row.flops * part / 3, batch * row.moved * part / 3, part)
        for part in (1, 2)
    )
    return LayerCost(batch, ops, batch * row.kept)


def small_cluster(bandwidth: float = 1e6, latency: float = 1e-4, memory: float = 1e9, **others: Any) -> Cluster:
    """1 MFLOP/s and 1 MB/s at full efficiency, nothing for a launch: seconds are easy to see."""
    device = Device("toy", {"float32": 1e6}, 1e6, memory, {"matmul": 1.0, "memory": 1.0}, 0.0)
    return Cluster("toy", device, Link(bandwidth, latency), **others)


def separable(batch: int = 4) -> Program:
    """Two layers that compute and two that hold parameters, in a chain, and a loss on the targets."""
    return small_program(
        (
            Row("conv1", ("images",), parameters=100, width=64, flops=4e5, kept=256),
            Row("conv2", ("conv1",), parameters=200, width=32, flops=4e5, kept=128),
            Row("fc1", ("conv2",), parameters=50_000, width=64, flops=2e4, kept=256),
            Row("fc2", ("fc1",), parameters=10_000, width=10, flops=1e4, kept=40),
            Row("loss", ("fc2", "labels"), width=1),
        ),
        batch,
    )


def place(
    program: Program, world: int = 4, strategy: Strategy | None = None, cluster: Cluster | None = None, **options: Any
) -> Plan:
    """The plan that the pass `Place` makes; a layer separation on the toy cluster, unless told."""
    strategy = LayerSeparation() if strategy is None else strategy
    pass_ = Place(cluster or small_cluster(), world, strategy, **options)
    return run_pass(pass_, program).plan


def fc_layers(plan: Plan) -> set[str]:
    """The layers of the second role."""
    return {layer for layer, placed in plan.placements.items() if placed.role == list(plan.roles)[1]}


def candidate(plan: Plan, strategy: str) -> Candidate:
    (found,) = (c for c in plan.candidates if c.strategy == strategy)
    return found
