"""Find the part of a program that needs the whole global batch at once: in-batch negatives, batch statistics.

It becomes one layer, the last one, which runs where the whole batch is: on one rank, or on every rank of a role after
`modulo` has gathered the examples.  What it reads from outside has examples to gather, so it holds

    the nodes that couple examples, and values over the batch without a batch dimension (a sum over examples)
    everything that is computed from those, up to the loss
    whatever has no examples to gather, or shares a parameter with it
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from splitc.ir.graph import has_examples, info, stores, tensors_of_node
from splitc.ir.program import Program, SizeSpec, TensorSpec
from splitc.ir.regions import regions

LAYER = "in_batch"


def in_batch_nodes(program: Program, coupling: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that need the whole batch, from those that couple its examples."""
    depends = _on_examples(program.graph)
    outer = ("placeholder", "get_attr", "output")
    inner = {n: _parameters(program, n) for n in program.graph.nodes if n.op not in outer}
    found = set(coupling) | {n for n in inner if n in depends and not _has_examples(n)}
    while True:
        used = {name for node in found for name in inner[node]}
        more = {n for n in inner if not found.isdisjoint(n.all_input_nodes) or not used.isdisjoint(inner[n])}
        more |= {n for node in found for n in node.all_input_nodes if n in inner and not _may_enter(n)}
        if more <= found:
            return found
        found |= more


def readers_of_kept(program: Program, training: Program | None = None) -> dict[fx.Node, str]:
    """The nodes that use tensors in which the model keeps what it computed from a batch -> why they need all of it.

    So these are alike on all ranks.  training: the program that writes into them, if it is another one.
    """
    writing = training or program
    own = {name: info(node).source for node, each in regions(writing) for name in each.keeps}
    attributes = {node: tuple(each.keeps) for node, each in regions(program)}
    lines, found = _kept(writing.graph, own), dict[fx.Node, str]()
    for node in program.graph.nodes:
        reads = () if node.op in ("get_attr", "output") or node in found else tensors_of_node(program, node)
        reads = (*reads, *attributes.get(node, ()))
        if name := next((name for name in reads if name in lines), None):
            found[node] = (
                f"{name} keeps values of the batch ({lines[name]}), and is alike on all ranks where they have all of it"
            )
    return found


def _kept(graph: fx.Graph, kept: dict[str, str]) -> dict[str, str]:
    """Tensors of the model that are given values that depend on the batch -> the user's line.  kept: some of them."""
    while True:
        depends: set[fx.Node] = set()
        for node in graph.nodes:
            is_device = node.target is getattr and node.args[1] == "device"
            if node.op == "placeholder" or node.target in kept or not depends.isdisjoint(node.all_input_nodes):
                depends |= {node} - ({node} if is_device else set())
        found = {str(n.all_input_nodes[0].target): info(n).source for n in stores(graph) if n.args[1] in depends}
        if found.keys() <= kept.keys():
            return kept
        kept = kept | found


def _parameters(program: Program, node: fx.Node) -> frozenset[str]:
    return frozenset(name for name in tensors_of_node(program, node) if program.tensors[name].parameter)


def _on_examples(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose values depend on the inputs' data, not only on their sizes."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_size = isinstance(info(node).spec, SizeSpec) or info(node).copied_to_each_stage
        if node.op == "placeholder" or (not is_size and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _has_examples(node: fx.Node) -> bool:
    spec = info(node).spec
    parts = spec if isinstance(spec, tuple) else (spec,)
    return all(isinstance(part, TensorSpec) and part.batch_dim is not None for part in parts)


def _may_enter(node: fx.Node) -> bool:
    """Whether a role that does not compute the value may read it."""
    return info(node).copied_to_each_stage or (has_examples(node) and info(node).outer > 0)
