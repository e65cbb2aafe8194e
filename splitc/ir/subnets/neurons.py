"""Find the hidden neurons of a model that can be dealt to ranks: independent subnets (IST 3).

A neuron is a feature of a linear layer, or of an embedding, that only linear layers read.  Between the two, elementwise
functions, normalisations over examples, sums of equally dealt values and concatenations may stand:

    fc1 = linear(x, W1)            (b, 512)   dealt: W1 by rows
    norm = batch_norm(fc1)         (b, 512)   its parameters with the neurons
    fc2 = linear(relu(norm), W2)   (b, 512)   dealt: W2 by rows and columns
    out = linear(norm2(fc2), W3)   (b, 10)    whole: the loss reads it; W3 by columns

Layers whose values meet in a sum are dealt alike.  A layer whose features anything else reads stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from splitc.ir.elementwise import is_elementwise, keeps_features
from splitc.ir.graph import arguments_of, called_module, info, op_name, reached, shape_of, tensors_of_node
from splitc.ir.linears import Linear, as_linear, embedding_weight, linear_layers
from splitc.ir.program import Program, TensorSpec
from splitc.runtime.spec import DealtDims, Neurons

_DEALINGS: WeakKeyDictionary[Program, dict[int, Dealing]] = WeakKeyDictionary()
_NORMS = (_BatchNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)

Runs = tuple[Neurons, ...]


@dataclass(frozen=True)
class Dealing:
    """What is dealt in a round.

    values: node -> whose neurons its features are.  tensors: parameter or buffer -> its dealt dims.
    splits: layer -> "columns", where its outputs are dealt, or "rows", where only its inputs are.
    bare: nodes of linear layers whose outputs no normalisation follows, though it must; final: those that the loss
    reads, whose outputs need none to train.
    """

    values: dict[str, Runs]
    tensors: dict[str, DealtDims]
    splits: dict[str, str]
    bare: tuple[fx.Node, ...]
    final: tuple[fx.Node, ...]


def dealing_of(program: Program, ranks: int) -> Dealing:
    """What is dealt to `ranks` of a whole program; computed once."""
    known = _DEALINGS.setdefault(program, {})
    if ranks not in known:
        known[ranks] = find_neurons(program, program.graph, ranks)
    return known[ranks]


def find_neurons(program: Program, graph: fx.Graph, ranks: int) -> Dealing:
    """Find the neurons that can be dealt to `ranks`, which get at least one of each layer."""
    whole: set[str] = set()
    joined: dict[str, Runs] = {}
    while True:
        walk = _Walk(program, graph, ranks, whole, joined)
        if walk.finished():
            return walk.dealing()


class _Walk:
    """One walk over the graph, which ends where a layer turns out to stay whole, or to be dealt with another."""

    def __init__(self, program: Program, graph: fx.Graph, ranks: int, whole: set[str], joined: dict[str, Runs]) -> None:
        self._program, self._graph, self._ranks = program, graph, ranks
        self._whole, self._joined = whole, joined
        self._linears = {
            uses[0].node.name: (layer, uses[0]) for layer, uses in linear_layers(program).items() if len(uses) == 1
        }
        self._calls = [node for node in graph.nodes if node.op in ("call_module", "call_function", "call_method")]
        self._values: dict[fx.Node, Runs] = {}
        self._made: dict[fx.Node, set[fx.Node]] = {}  # a value without a norm yet -> the layers that made it
        self._tensors: dict[str, dict[int, Runs]] = {}
        self._splits: dict[str, str] = {}
        self._bare: dict[fx.Node, None] = {}

    def finished(self) -> bool:
        """Walk; return whether nothing had to be changed."""
        return all(self._visit(node) for node in self._graph.nodes)

    def dealing(self) -> Dealing:
        """What the walk has found."""
        final = []
        for name in (name for name, split in self._splits.items() if split == "rows"):
            node = next(use.node for layer, use in self._linears.values() if layer == name)
            if self._is_final(node):
                final.append(node)
            elif not all(_is_norm(self._program, reader) for reader in _readers(node)):
                self._bare[node] = None
        values = {node.name: runs for node, runs in self._values.items()}
        return Dealing(values, dict(self._tensors), self._splits, tuple(self._bare), tuple(final))

    def _visit(self, node: fx.Node) -> bool:
        """Deal what a node computes where its inputs are dealt; return whether the walk may go on."""
        reads = [value for value in node.all_input_nodes if value in self._values]
        linear = self._linear(node)
        if linear is not None and set(reads) <= {linear.value}:
            return self._visit_linear(node, linear)
        table = embedding_weight(self._program, node)
        if table is not None and self._owns(node):
            self._deal(node, info(node).layer, table, 1)
        if not reads:
            return True
        spec = info(node).spec
        if isinstance(spec, TensorSpec):
            tensors = [n for n in node.all_input_nodes if isinstance(info(n).spec, TensorSpec)]
            is_norm = type(called_module(self._program.root, node)) is nn.BatchNorm1d and self._owns(node)
            if is_norm and len(spec.shape) == 2:
                return self._visit_norm(node, reads[0])
            if _is_concatenation(node, spec):
                return self._keep(node, tensors, tuple(run for n in tensors for run in self._runs(n)))
            fits = is_elementwise(node) and len({shape_of(n) for n in (*tensors, node)}) == 1
            fits = (fits or keeps_features(node)) and all(n in self._values for n in tensors)
            if fits:
                values = tensors[:1] if keeps_features(node) else tensors  # view_as reads the shape of the other
                return self._join(tensors) and self._keep(node, values, self._values[tensors[0]])
        elif not isinstance(spec, tuple) or not any(isinstance(part, TensorSpec) for part in spec):
            return True  # a size
        return self._undeal(reads)

    def _visit_linear(self, node: fx.Node, linear: Linear) -> bool:
        layer = info(node).layer
        if linear.value in self._values:
            self._tensors.setdefault(linear.weight, {})[1] = self._values[linear.value]
            self._splits[layer] = "rows"
            self._bare.update(dict.fromkeys(sorted(self._made[linear.value], key=lambda made: made.name)))
        self._deal(node, layer, linear.weight, 0)
        if node in self._values and linear.bias is not None:
            self._tensors[linear.bias] = {0: self._values[node]}
        return True

    def _deal(self, node: fx.Node, layer: str, weight: str, dim: int) -> None:
        """Deal the outputs of a layer, unless it stays whole."""
        runs = self._resolved((Neurons(layer, shape_of(node)[-1]),)) if shape_of(node) else ()
        if not runs or any(run.layer in self._whole or run.width < self._ranks for run in runs):
            return
        self._values[node], self._made[node] = runs, {node}
        self._tensors.setdefault(weight, {})[dim] = runs
        self._splits[layer] = "columns"

    def _visit_norm(self, node: fx.Node, value: fx.Node) -> bool:
        for name in tensors_of_node(self._program, node):
            if self._program.tensors[name].shape:
                self._tensors[name] = {0: self._values[value]}
        self._splits[info(node).layer] = "columns"
        return self._keep(node, [], self._values[value])

    def _keep(self, node: fx.Node, values: list[fx.Node], runs: Runs) -> bool:
        self._values[node] = runs
        self._made[node] = set().union(*(self._made[value] for value in values if value in self._values))
        return True

    def _join(self, values: list[fx.Node]) -> bool:
        """Let values of one sum be dealt alike; return whether they were."""
        first, *others = sorted((self._values[value] for value in values), key=len, reverse=True)
        for other in (other for other in others if other != first):
            widths = [run.width for run in other]
            ours = [run.width for run in first]
            if any(not run.layer for run in (*first, *other)) or widths not in (ours, [sum(ours)]):
                return self._undeal(values)
            if len(other) < len(first):
                self._joined[other[0].layer] = first
            else:
                self._joined |= {b.layer: (a,) for a, b in zip(first, other, strict=True) if a != b}
            return False
        return True

    def _undeal(self, values: list[fx.Node]) -> bool:
        self._whole.update(run.layer for value in values for run in self._values[value] if run.layer)
        return False

    def _runs(self, value: fx.Node) -> Runs:
        return self._values.get(value) or (Neurons("", shape_of(value)[-1]),)

    def _resolved(self, runs: Runs) -> Runs:
        """The same features as runs of the layers that are dealt for others too."""
        while any(run.layer in self._joined for run in runs):
            runs = tuple(each for run in runs for each in self._joined.get(run.layer, (run,)))
        return runs

    def _linear(self, node: fx.Node) -> Linear | None:
        return as_linear(self._program, node) if node.name in self._linears else None

    def _owns(self, node: fx.Node) -> bool:
        """Whether no other layer, and no other call, reads the tensors of a node."""
        own = set(tensors_of_node(self._program, node))
        calls = sum(bool(own.intersection(tensors_of_node(self._program, other))) for other in self._calls)
        return calls == 1 and all(self._program.users.get(name, 1) == 1 for name in own)

    def _is_final(self, node: fx.Node) -> bool:
        """Whether no layer with parameters follows."""
        others = {layer.name for layer in self._program.layers if layer.tensors} - {info(node).layer}
        return others.isdisjoint(info(user).layer for user in reached(node.users, lambda user: user.users))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The first nodes after a value that are not elementwise functions of it alone."""
    for user in node.users:
        if (is_elementwise(user) and len(user.all_input_nodes) == 1) or keeps_features(user):
            yield from _readers(user) if user.args[0] is node else ()
        else:
            yield user


def _is_norm(program: Program, node: fx.Node) -> bool:
    is_function = op_name(node) in ("batch_norm", "layer_norm", "rms_norm", "group_norm")
    return is_function or isinstance(called_module(program.root, node), _NORMS)


def _is_concatenation(node: fx.Node, spec: TensorSpec) -> bool:
    """Whether a node concatenates features."""
    dim = arguments_of(node, "tensors", "dim").get("dim", 0)
    return node.target in (torch.cat, torch.concat, torch.concatenate) and dim in (-1, len(spec.shape) - 1)
