"""Count the FLOPs, memory traffic and saved activations of each layer by running the step on fake tensors.

The graph runs forward node by node and then backward as a whole, so every counted op is one that a rank executes:
gradients that nothing needs are left out, sums of gradients of a value with several readers are included.  An op of
the backward belongs to the layer whose forward it differentiates.  Saved bytes are those of the tensors that autograd
saves.  A program under autocast is counted under it, with its casts of weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import Node as GradFn
from torch.utils._pytree import tree_leaves

from splitc.cost_models.compute.counting import OpCounter, merged_pairs
from splitc.ir.autocast import under_autocast
from splitc.ir.costs import CostLine, LayerCost, OpCost
from splitc.ir.graph import info, region_of
from splitc.ir.interpreter import NodeRunner, fake_inputs, mode_of, quiet
from splitc.ir.program import Program
from splitc.ir.regions import OwnCode
from splitc.ir.repeats import without_repeats


def layer_costs(program: Program) -> dict[str, CostLine]:
    """Layer -> its cost line, counted at the example's batch and at twice that."""
    batch = max(program.batch, 2)
    graph, stands_for = without_repeats(program.root, program.graph)
    counts = [_Count(program, graph, size) for size in (batch, 2 * batch)]
    nodes: dict[str, list[str]] = defaultdict(list)
    for node in program.graph.nodes:
        nodes[info(node).layer].append(stands_for.get(node.name, node.name))
    lines = {}
    for name in (layer.name for layer in program.layers):
        both = [count.cost(nodes[name]) for count in counts]
        pairs = merged_pairs(*(cost.ops for cost in both))
        lines[name] = CostLine(*(replace(cost, ops=tuple(pair[k] for pair in pairs)) for k, cost in enumerate(both)))
    return lines


@dataclass
class _Saved:
    """Storages that autograd saved; each counts once, for the node that saved it first."""

    seen: set[int]
    storages: list[Any] = field(default_factory=list)  # kept alive, so that no other one gets its address
    nbytes: float = 0.0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            self.storages.append(storage)
            self.nbytes += storage.nbytes()
        return tensor


@dataclass
class _NodeForward:
    """The ops of one node's forward.  pending: its functions that the backward has not run yet."""

    node: str
    ops: list[OpCost]
    pending: int = 0

    def leave(self, *gradients: Any) -> None:
        self.pending -= 1


class _Count:
    """The ops that a step of `batch` examples runs, and the bytes that it saves for backward, by node."""

    def __init__(self, program: Program, graph: fx.Graph, batch: int) -> None:
        self._batch = batch
        self._ops: dict[str, list[OpCost]] = defaultdict(list)
        self._saved_bytes: dict[str, float] = defaultdict(float)
        self._node = program.layers[0].nodes[0]  # whose op runs
        self._forwards: dict[GradFn, _NodeForward] = {}
        self._hooks: list[Any] = []
        self._run(program, graph)

    def cost(self, nodes: Sequence[str]) -> LayerCost:
        """The cost of some nodes, with their ops in the order of a step."""
        forward = [op for node in nodes for op in self._ops[node] if not op.backward]
        backward = [op for node in reversed(nodes) for op in self._ops[node] if op.backward]
        return LayerCost(self._batch, (*forward, *backward), sum(self._saved_bytes[node] for node in nodes))

    def _run(self, program: Program, graph: fx.Graph) -> None:
        root, mode = program.root, mode_of(program.root)
        saved = _Saved({t.untyped_storage()._cdata for t in (*root.parameters(), *root.buffers())})

        def hook(node: fx.Node, run: Callable[[], Any]) -> Any:
            if node.op in ("placeholder", "output"):
                return run()
            self._node = node.name if info(node).layer else self._node
            before, first = saved.nbytes, len(self._ops[self._node])
            value = run()
            self._saved_bytes[self._node] += saved.nbytes - before
            if (own := region_of(program, node)) is not None:
                self._ops[self._node][first:] = _region_ops(own, self._batch)
                self._node = ""  # of the stand-in's backward
            self._watch(value, _NodeForward(self._node, self._ops[self._node][first:]))
            return value

        with mode, quiet():
            inputs = fake_inputs(program, self._batch, mode)
            with OpCounter(lambda op: self._ops[self._node].append(op)) as counter:
                with (
                    under_autocast(root, program.autocast),
                    torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor),
                ):
                    loss = NodeRunner(root, graph, hook).run_named(inputs)
                counter.backward = True
                if loss.requires_grad:
                    self._run_backward(loss)
        for handle in self._hooks:
            handle.remove()
        for parameter in root.parameters():
            parameter.grad = None

    def _watch(self, value: Any, forward: _NodeForward) -> None:
        """Hook the autograd functions of a node, so that the ops of its backward count for it."""
        for function in _new_functions(value, self._forwards):
            self._forwards[function] = forward
            forward.pending += 1
            self._hooks += [function.register_prehook(partial(self._enter, forward))]
            self._hooks += [function.register_hook(forward.leave)]

    def _enter(self, forward: _NodeForward, gradients: Any) -> None:
        self._node = forward.node

    def _run_backward(self, loss: torch.Tensor) -> None:
        """Run the backward; what torch cannot differentiate on fake tensors is estimated from its forward."""
        try:
            loss.backward()
        except Exception:
            for forward in {id(each): each for each in self._forwards.values() if each.pending}.values():
                self._ops[forward.node] += [_estimated_backward(op) for op in forward.ops]


def _new_functions(value: Any, known: Container[GradFn]) -> Iterator[GradFn]:
    """The autograd functions that `value` was computed by, back to those that are `known`."""
    waiting = [each.grad_fn for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
    while waiting:
        function = waiting.pop()
        if isinstance(function, GradFn) and function not in known:
            yield function
            waiting += [before for before, _ in function.next_functions]


def _region_ops(own: OwnCode, batch: int) -> list[OpCost]:
    """The forward of a region as it was counted on a few examples, and its estimated backward."""
    small, large = own.costs
    t = (batch - small.batch) / (large.batch - small.batch)
    forward = [a.along(b, t) for a, b in merged_pairs(small.ops, large.ops)]
    return forward + [replace(_estimated_backward(op), unknown=op.unknown) for op in forward]


def _estimated_backward(op: OpCost) -> OpCost:
    """The gradients of two inputs, each as much work as the forward."""
    flops, nbytes, launches, padding = op.numbers
    twice = op.with_numbers((2 * flops, 2 * nbytes, 2 * launches, padding))
    return replace(twice, name=f"{op.name}_backward", backward=True, unknown=True)
