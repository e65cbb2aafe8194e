"""The Program: one training step of a model as a graph, and what is known about it.

A Program is frozen.  A pass that decides returns it with a new `plan` or new `costs`; a pass that rewrites returns it
with a new graph.  Every node carries in its `meta`

    spec      TensorSpec, SizeSpec, a tuple of them, or None: what the node's value is, at any batch size
    source    "alexnet.py:12": the user's line that made it
    layer     name of the layer it belongs to
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

if TYPE_CHECKING:
    from splitc.actions import Action
    from splitc.plan import Plan


@dataclass(frozen=True)
class TensorSpec:
    """A tensor whose size along `batch_dim` is `rows` for each example of the batch.

    `shape` is the shape at a batch of one example.  A tensor without `batch_dim` (a mask, a scalar) has the same shape
    at every batch size.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None = None
    requires_grad: bool = False

    @property
    def rows(self) -> int:
        """How many rows along `batch_dim` one example has; 0 for a tensor without a batch dimension."""
        return 0 if self.batch_dim is None else self.shape[self.batch_dim]

    def at(self, batch: int) -> tuple[int, ...]:
        """The shape at `batch` examples."""
        return tuple(n * batch if d == self.batch_dim else n for d, n in enumerate(self.shape))

    def nbytes(self, batch: int) -> int:
        """Bytes at `batch` examples."""
        return math.prod(self.at(batch)) * self.dtype.itemsize

    def template(self) -> tuple[int, ...]:
        """The shape with -1 in place of the batch dimension, as generated programs write it."""
        return tuple(-1 if d == self.batch_dim else n for d, n in enumerate(self.shape))


@dataclass(frozen=True)
class SizeSpec:
    """A whole number in the graph that depends on the batch: `scale * batch + offset`."""

    scale: int
    offset: int = 0


Spec = TensorSpec | SizeSpec | tuple["Spec", ...] | None


@dataclass(frozen=True)
class Input:
    """One input of the step, a placeholder of the graph.

    high: bound of its whole numbers (exclusive), for synthetic data.  target: whether it goes to the loss.
    """

    name: str
    spec: TensorSpec
    high: int | None = None
    target: bool = False


@dataclass(frozen=True)
class Holding:
    """A parameter or a buffer of the model, under its own name.

    `names` are all the names under which the model's state_dict has it; more than one when it is tied.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parameter: bool
    requires_grad: bool = False
    persistent: bool = True
    names: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def trainable(self) -> bool:
        return self.parameter and self.requires_grad


@dataclass(frozen=True)
class Layer:
    """A node that owns parameters, with the parameterless nodes that follow it.

    `nodes` are in the order of the graph; `holdings` are the names of the parameters and buffers it uses.
    """

    name: str
    nodes: tuple[str, ...]
    holdings: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class LossTerm:
    """How one scalar of the loss adds up over parts of the batch.

    kind    "mean": equal weights, a part counts by its share of the examples
            "weighted": `reduction="mean"` over weights (`ignore_index`, class weights); the denominator is summed
            "sum": parts simply add
    node    the scalar's node
    """

    node: str
    kind: str


@dataclass(frozen=True)
class OpCost:
    """One kind of op of a layer, as torch runs it in a step; `launches` equal ones together.

    op_class: at what rate a device computes or moves it, as of `Device.reached`.  flops: a multiply-add is two.
    moved: bytes read and written in memory.  filling: FLOPs besides, of channels that are not there but are computed.
    """

    name: str
    op_class: str
    backward: bool
    flops: float
    moved: float
    launches: float = 1.0
    filling: float = 0.0

    def along(self, other: OpCost, t: float) -> OpCost:
        """What lies at part `t` of the way from this op to `other`, or beyond; never less than nothing."""
        flops, moved, launches, filling = (
            max((1 - t) * a + t * b, 0.0) for a, b in zip(self.numbers, other.numbers, strict=True)
        )
        return replace(self, flops=flops, moved=moved, launches=launches, filling=filling)

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        return self.flops, self.moved, self.launches, self.filling


@dataclass(frozen=True)
class Measured:
    """Seconds that a layer took on this machine, when float32 matrix products reached `flop_rate` FLOP/s on it."""

    forward: float
    backward: float
    flop_rate: float


@dataclass(frozen=True)
class LayerCost:
    """What one layer does in one step of `batch` examples on one rank, forward and backward.

    seconds: compute time (s).  flops: a multiply-add is two.  moved: bytes read and written in memory.
    kept: bytes of activations that stay until backward.
    measured: what it took where its layers were measured; it then counts instead of flops and moved.
    ops: the same op by op; a cost without them is priced as one matrix product forward and one backward.
    by_bytes: ops among them that may compute more than their bytes tell: nothing is known of them.
    """

    batch: int
    forward_flops: float
    backward_flops: float
    forward_moved: float
    backward_moved: float
    kept: float
    launches: float
    seconds: float = 0.0
    measured: Measured | None = None
    ops: tuple[OpCost, ...] = ()
    by_bytes: tuple[str, ...] = ()

    @classmethod
    def of_ops(cls, batch: int, ops: tuple[OpCost, ...], kept: float, by_bytes: tuple[str, ...] = ()) -> LayerCost:
        """The cost that is the sum of `ops`."""
        forward, backward = ([op for op in ops if op.backward == back] for back in (False, True))
        return cls(
            batch,
            sum(op.flops for op in forward),
            sum(op.flops for op in backward),
            sum(op.moved for op in forward),
            sum(op.moved for op in backward),
            kept,
            sum(op.launches for op in ops),
            ops=ops,
            by_bytes=by_bytes,
        )

    @property
    def flops(self) -> float:
        return self.forward_flops + self.backward_flops


@dataclass(frozen=True)
class CostLine:
    """A layer's cost at any batch: FLOPs, bytes and kept activations are a constant plus a slope per example.

    Measured at two batch sizes, op for op; `at` draws the lines through them (exact for work linear in the batch).
    """

    small: LayerCost
    large: LayerCost

    def at(self, batch: int) -> LayerCost:
        """The cost of `batch` examples, without seconds: they depend on a device."""
        t = (batch - self.small.batch) / (self.large.batch - self.small.batch)

        def line(a: float, b: float) -> float:
            return max(a + t * (b - a), 0.0)

        small, large = self.small, self.large
        if small.ops:
            ops = tuple(a.along(b, t) for a, b in zip(small.ops, large.ops, strict=True))
            return LayerCost.of_ops(batch, ops, line(small.kept, large.kept), small.by_bytes)
        return LayerCost(
            batch,
            line(small.forward_flops, large.forward_flops),
            line(small.backward_flops, large.backward_flops),
            line(small.forward_moved, large.forward_moved),
            line(small.backward_moved, large.backward_moved),
            line(small.kept, large.kept),
            small.launches,
        )


@dataclass(frozen=True)
class Cut:
    """A value that crosses from one role to another; its gradient comes back when `gradient` is set.

    name: the value's name in both generated programs.  value: the node that makes it.
    local: both roles are the same ranks with the same examples, so that nothing is sent.
    enters: the consumer has groups, which gather their members' examples; partial: the gradient of the members is
    to be summed then, else they have it alike.  leaves: the producer has groups, of which each rank keeps its own.
    """

    name: str
    value: str
    producer: str
    consumer: str
    spec: TensorSpec
    gradient: bool
    local: bool = False
    enters: bool = False
    partial: bool = True
    leaves: bool = False

    @property
    def divides(self) -> bool:
        """Whether it has examples; what has none, a sum over all ranks, is the same everywhere."""
        return self.spec.batch_dim is not None


@dataclass(frozen=True)
class Stage:
    """The part of the graph that one role runs.

    buckets: names of the parameters whose gradients are summed together, in the order in which backward fills them.
    served: likewise, of the parameters that servers hold.
    shards: parameter -> the dim along which the ranks of a group share it.
    """

    role: str
    graph: fx.Graph
    layers: tuple[str, ...]
    inputs: tuple[str, ...]
    receives: tuple[Cut, ...]
    sends: tuple[Cut, ...]
    holdings: tuple[str, ...]
    buckets: tuple[tuple[str, ...], ...] = ()
    served: tuple[tuple[str, ...], ...] = ()
    shards: Mapping[str, int] = field(default_factory=dict)
    has_loss: bool = False


@dataclass(frozen=True)
class Part:
    """The program of the ranks that are in the same roles: its stages, and the action list of a step."""

    roles: tuple[str, ...]
    ranks: tuple[int, ...]
    actions: tuple[Action, ...] = ()

    @property
    def name(self) -> str:
        """The name of its file: `conv`, `conv_fc`."""
        return "_".join(self.roles)


@dataclass(frozen=True)
class Program:
    """A model and its loss as one forward graph, and what the passes have added.

    root: the model's modules as fake tensors (shapes without memory), under their original names.
    batch: examples in the user's example batch.  autocast: what the forward of every stage runs under, None: nothing.
    """

    name: str
    graph: fx.Graph
    root: nn.Module
    inputs: tuple[Input, ...]
    batch: int
    layers: tuple[Layer, ...]
    holdings: Mapping[str, Holding]
    loss_terms: tuple[LossTerm, ...] = ()
    frozen_layers: tuple[str, ...] = ()
    autocast: torch.dtype | None = None
    costs: Mapping[str, CostLine] = field(default_factory=dict)
    plan: Plan | None = None
    stages: tuple[Stage, ...] = ()
    parts: tuple[Part, ...] = ()

    def layer(self, name: str) -> Layer:
        return next(layer for layer in self.layers if layer.name == name)

    def stage(self, role: str) -> Stage:
        return next(stage for stage in self.stages if stage.role == role)

    def turns(self, stage: Stage) -> int:
        """How often a stage goes forward and backward in a step: the role of the loss once a turn of its groups."""
        grouping = self.required_plan.groups.get(stage.role)
        return grouping.turns if grouping is not None and stage.has_loss else 1

    def part_of(self, rank: int) -> Part:
        """The part that `rank` runs."""
        return next(part for part in self.parts if rank in part.ranks)

    @property
    def layer_of(self) -> dict[str, str]:
        """Node name -> name of its layer."""
        return {node: layer.name for layer in self.layers for node in layer.nodes}

    def edges(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Every (value, reader) of the graph; `all_input_nodes` also sees through lists and kwargs."""
        for reader in self.graph.nodes:
            for value in reader.all_input_nodes:
                yield value, reader

    @property
    def loss(self) -> fx.Node:
        """The node of the loss, a 0-d tensor."""
        output = next(node for node in reversed(self.graph.nodes) if node.op == "output")
        loss: fx.Node
        (loss,) = output.all_input_nodes
        return loss

    @property
    def required_plan(self) -> Plan:
        """The plan, for passes that run after `place`."""
        assert self.plan is not None, "no pass has placed this program yet"
        return self.plan


def under_autocast(root: nn.Module, dtype: torch.dtype | None) -> torch.autocast:
    """Autocast to `dtype` on the device of a model, or none, whatever is on around it.

    For the forward only: autograd runs each backward in the dtype that its forward had.
    """
    device = next((tensor.device.type for tensor in (*root.parameters(), *root.buffers())), "cpu")
    if not torch.amp.is_autocast_available(device):
        device = "cpu"
    return torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None)


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy whose nodes keep names and meta, and the map from old nodes to new ones."""
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        mapping[node] = copy_node(new, node, mapping)
    return new, mapping


def copy_node(graph: fx.Graph, node: fx.Node, mapping: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """A copy of `node` in `graph`, with its name and meta, that reads what its inputs map to."""
    args: Any = fx.node.map_arg(node.args, lambda old: mapping[old])
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda old: mapping[old])
    copied = graph.create_node(node.op, node.target, args, kwargs, node.name)
    assert copied.name == node.name, f"{node.name} is taken"
    copied.meta = dict(node.meta)
    return copied


def rename(graph: fx.Graph, node: fx.Node, name: str) -> None:
    """Call `node` by `name`, or by a name made from it when that is taken."""
    node.name = graph._graph_namespace.create_name(name, None)
