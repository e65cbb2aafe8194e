"""Leave out the middle of what a graph repeats: a deep model runs on fake tensors as if it had few blocks.

    block0 - block1 - block2 - ... - block35 - head      ->      block0 - block1 - block34 - block35 - head

Parts are alike where their nodes call the same on values of the same specs and tensors of the same shapes, and read the
same nodes, or those of the part before.  What a part computes and keeps depends on its neighbours, so two parts stay at
either end; the second one stands for those that are left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from operator import attrgetter

import torch
from torch import fx, nn

from splitc.ir.graph import called_module, copy_node, info
from splitc.ir.regions import Region

_KEPT, _TRIED = 2, 8  # parts at either end; distances at which a part may begin anew


def without_repeats(root: nn.Module, graph: fx.Graph) -> tuple[fx.Graph, dict[str, str]]:
    """A copy without the parts that others stand for, and the name of each of their nodes -> its stand-in's."""
    nodes, stand_in = list(graph.nodes), dict[fx.Node, fx.Node]()
    place = {node: k for k, node in enumerate(nodes)}
    for start, size, number in _repeats(root, place):
        first, last, end = (start + k * size for k in (_KEPT, number - _KEPT, number))
        if all(place[user] < end for node in nodes[first - size : last] for user in node.users):
            stand_in |= {nodes[k]: nodes[first - size + (k - first) % size] for k in range(first, last)}
    new, mapping = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        mapping[node] = mapping[stand_in[node]] if node in stand_in else copy_node(new, node, mapping)
    return new, {node.name: other.name for node, other in stand_in.items()}


def _repeats(root: nn.Module, place: dict[fx.Node, int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first node, nodes of a part, parts) of repeats of which some can be left out."""
    nodes, texts, places = list(place), _texts(root, list(place)), defaultdict[Hashable, list[int]](list)
    for k, text in enumerate(texts):
        places[text].append(k)

    def alike(i: int, k: int) -> bool:
        reads = zip(nodes[i].all_input_nodes, nodes[k].all_input_nodes, strict=False)
        return texts[i] == texts[k] and all(a is b or place[b] - place[a] == k - i for a, b in reads)

    start = 0
    while start < len(nodes):
        same = places[texts[start]]
        for size in (k - start for k in same[bisect_right(same, start) :][:_TRIED]):
            end = start + size
            while end < len(nodes) and alike(end - size, end):
                end += 1
            if (number := (end - start) // size) > 2 * _KEPT:
                yield start, size, number
                start += number * size - 1
                break
        start += 1


def _texts(root: nn.Module, nodes: list[fx.Node]) -> list[Hashable]:
    """All that is known of each node but its name and which nodes it reads."""
    read = [_read(root, node) for node in nodes]
    readers = Counter(id(tensor) for _, tensors in read for tensor in tensors)
    found = list[Hashable]()
    for node, (called, tensors) in zip(nodes, read, strict=True):
        inputs = {value: f"%{k}" for k, value in enumerate(node.all_input_nodes)}
        kwargs = {name: value for name, value in node.kwargs.items() if name != "draw"}
        shared = [(t.shape, t.stride(), t.dtype, t.requires_grad, readers[id(t)] > 1 and id(t)) for t in tensors]
        specs = [info(value).spec for value in (node, *inputs)]
        found.append((called, f"{fx.node.map_arg((node.args, kwargs), inputs.__getitem__)} {shared} {specs}"))
    return found


def _read(root: nn.Module, node: fx.Node) -> tuple[Hashable, list[torch.Tensor]]:
    """What a node calls, the node itself where that is known of no other, and which tensors of the model it reads."""
    module = called_module(root, node)
    tensors = [] if module is None else [*module.parameters(), *module.buffers()]
    if node.op in ("placeholder", "output") or info(node).is_module or isinstance(module, Region):
        return node, tensors
    if node.op == "get_attr":
        return node.op, [attrgetter(str(node.target))(root)]
    options = {name: value for name, value in vars(module).items() if not name.startswith("_")} if module else {}
    return (node.op, node.target if module is None else type(module), str(options)), tensors
