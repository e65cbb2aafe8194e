"""Count what each layer computes, moves and keeps, by running the step on fake tensors.

The graph runs forward node by node and then backward as a whole, so that every op is one that a rank executes: without
the gradient of what needs none, with the sums of gradients where a value has several readers.  An op of the backward
belongs to the layer whose forward it differentiates.  Kept bytes are the tensors that autograd saves.  A program under
autocast is counted under it: what is kept is in its dtype, with the copies of weights that are cast.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import Node as GradFn
from torch.utils._pytree import tree_leaves

from splitc.cost_models.compute.counting import OpCounter, Recorded, merged_pairs
from splitc.ir.costs import CostLine, LayerCost, OpCost
from splitc.ir.interpreter import NodeRunner, fake_inputs, mode_of, quiet
from splitc.ir.program import Program, under_autocast


def layer_costs(program: Program) -> dict[str, CostLine]:
    """Layer -> its cost line, counted at the example's batch and at twice that."""
    batch = max(program.batch, 2)
    small, large = _Count(program, batch), _Count(program, 2 * batch)
    lines = {}
    for layer in program.layers:
        name = layer.name
        pairs = merged_pairs(small.costs(name), large.costs(name))
        guesses = tuple(dict.fromkeys(each.cost.name for each in small.ops[name] if each.guessed))
        a, b = (
            LayerCost.of_ops(count.batch, tuple(pair[k] for pair in pairs), count.kept[name], guesses)
            for k, count in enumerate((small, large))
        )
        lines[name] = CostLine(a, b)
    return lines


@dataclass
class _Kept:
    """Storages that autograd saved; each counts once, for the node that saved it first."""

    owned: set[int]
    alive: list[Any] = field(default_factory=list)
    nbytes: float = 0.0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.owned:
            self.owned.add(storage._cdata)
            self.alive.append(storage)
            self.nbytes += storage.nbytes()
        return tensor


@dataclass
class _Made:
    """The ops of one node's forward; waiting: functions of its backward that have not run."""

    layer: str
    ops: list[Recorded]
    waiting: int = 0

    def leave(self, *gradients: Any) -> None:
        self.waiting -= 1


class _Count:
    """What a step of `batch` examples runs and keeps, layer by layer."""

    def __init__(self, program: Program, batch: int) -> None:
        self.batch = batch
        self.ops: dict[str, list[Recorded]] = defaultdict(list)
        self.kept: dict[str, float] = defaultdict(float)
        self._layer = program.layers[0].name
        self._made: dict[GradFn, _Made] = {}
        self._hooks: list[Any] = []
        self._run(program)

    def costs(self, layer: str) -> list[OpCost]:
        return [each.cost for each in self.ops[layer]]

    def _run(self, program: Program) -> None:
        root, mode = program.root, mode_of(program.root)
        saved = _Kept({t.untyped_storage()._cdata for t in (*root.parameters(), *root.buffers())})

        def hook(node: fx.Node, run: Callable[[], Any]) -> Any:
            if node.op in ("placeholder", "output"):
                return run()
            self._layer = node.meta["layer"] or self._layer
            before, first = saved.nbytes, len(self.ops[self._layer])
            value = run()
            self.kept[self._layer] += saved.nbytes - before
            self._watch(value, _Made(self._layer, self.ops[self._layer][first:]))
            return value

        with mode, quiet():
            inputs = fake_inputs(program, self.batch, mode)
            with OpCounter(lambda op: self.ops[self._layer].append(op)) as counter:
                with (
                    under_autocast(root, program.autocast),
                    torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor),
                ):
                    loss = NodeRunner(root, program.graph, hook).run_named(inputs)
                counter.backward = True
                if loss.requires_grad:
                    self._run_backward(loss)
        for handle in self._hooks:
            handle.remove()
        for parameter in root.parameters():
            parameter.grad = None

    def _watch(self, value: Any, made: _Made) -> None:
        """Have what differentiates a node say so when it runs."""
        found = [each.grad_fn for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
        while found:
            grad_fn = found.pop()
            if grad_fn is None or grad_fn in self._made or not isinstance(grad_fn, GradFn):
                continue
            self._made[grad_fn] = made
            made.waiting += 1
            self._hooks += [grad_fn.register_prehook(partial(self._enter, made)), grad_fn.register_hook(made.leave)]
            found += [before for before, _ in grad_fn.next_functions]

    def _enter(self, made: _Made, gradients: Any) -> None:
        self._layer = made.layer

    def _run_backward(self, loss: torch.Tensor) -> None:
        """Where torch cannot differentiate on fake tensors, a backward is taken for twice its forward, and told."""
        try:
            loss.backward()
        except Exception:
            for made in {id(each): each for each in self._made.values() if each.waiting}.values():
                self.ops[made.layer] += [_twice(each) for each in made.ops]


def _twice(op: Recorded) -> Recorded:
    """What a backward is taken for: the gradients of two inputs, each as much work as the forward."""
    cost = op.cost
    guess = replace(
        cost,
        backward=True,
        flops=2 * cost.flops,
        bytes_accessed=2 * cost.bytes_accessed,
        kernel_launches=2 * cost.kernel_launches,
    )
    return Recorded(replace(guess, name=f"{cost.name}_backward"), guessed=True)
