"""Count what each layer computes, moves and keeps, by running the graph on fake tensors.

FLOPs come from torch's FlopCounterMode, forward and backward, a multiply-add as two; kept bytes are the tensors that
autograd saves; moved bytes are those of inputs and outputs, once forward and twice backward.  A program under autocast
is counted under it: what is kept is in its dtype, with the copies of weights that are cast.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from splitc.fake import NodeRunner, fake_inputs, mode_of
from splitc.program import CostLine, LayerCost, Program, under_autocast


def layer_costs(program: Program) -> dict[str, CostLine]:
    """Layer -> its cost line, measured at the example's batch and at twice that."""
    batch = max(program.batch, 2)
    small, large = _count(program, batch), _count(program, 2 * batch)
    return {name: CostLine(small[name], large[name]) for name in small}


@dataclass
class _Tally:
    """Sums over the nodes of one layer."""

    forward_flops: float = 0.0
    backward_flops: float = 0.0
    forward_moved: float = 0.0
    backward_moved: float = 0.0
    kept: float = 0.0
    launches: int = 0


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


def _count(program: Program, batch: int) -> dict[str, LayerCost]:
    mode = mode_of(program.root)
    tallies: dict[str, _Tally] = defaultdict(_Tally)
    kept = _Kept({t.untyped_storage()._cdata for t in (*program.root.parameters(), *program.root.buffers())})
    runner: NodeRunner

    def hook(node: fx.Node, run: Callable[[], Any]) -> Any:
        if node.op in ("placeholder", "output", "get_attr"):
            return run()
        tally = tallies[node.meta["layer"]]
        before = kept.nbytes
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda t: t):
            value = run()
        tally.kept += kept.nbytes - before
        forward, backward = _flops(runner, node)
        tally.forward_flops += forward
        tally.backward_flops += backward
        if isinstance(value, torch.Tensor) and not _is_view(value, runner, node):
            moved = sum(t.nbytes for t in (value, *_tensors(runner, node), *_parameters(program, node)))
            tally.forward_moved += moved
            tally.backward_moved += 2 * moved if value.requires_grad else 0
            tally.launches += 3 if value.requires_grad else 1
        return value

    with mode, under_autocast(program.root, program.autocast):
        runner = NodeRunner(program.root, program.graph, hook)
        runner.run_named(fake_inputs(program, batch, mode))
    return {layer.name: LayerCost(batch, **vars(tallies[layer.name])) for layer in program.layers}


def _flops(runner: NodeRunner, node: fx.Node) -> tuple[float, float]:
    """Forward and backward FLOPs of one node, on detached copies of its inputs."""
    leaves: list[torch.Tensor] = []

    def detach(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = value.detach().requires_grad_(value.requires_grad)
            leaves.append(value)
        return value

    args, kwargs = fx.node.map_aggregate(runner.fetch_args_kwargs_from_env(node), detach)
    with FlopCounterMode(display=False) as counter:
        value = getattr(runner, node.op)(node.target, args, kwargs)
        forward = counter.get_total_flops()
        if forward and isinstance(value, torch.Tensor) and value.requires_grad:
            value.backward(torch.empty_like(value))
            for parameter in _parameters_of(runner, node):
                parameter.grad = None
        return float(forward), float(counter.get_total_flops() - forward)


def _parameters_of(runner: NodeRunner, node: fx.Node) -> list[torch.Tensor]:
    return list(runner.fetch_attr(str(node.target)).parameters()) if node.op == "call_module" else []


def _parameters(program: Program, node: fx.Node) -> list[torch.Tensor]:
    return list(program.root.get_submodule(str(node.target)).parameters()) if node.op == "call_module" else []


def _tensors(runner: NodeRunner, node: fx.Node) -> list[torch.Tensor]:
    return [v for v in (runner.env[n] for n in node.all_input_nodes) if isinstance(v, torch.Tensor)]


def _is_view(value: torch.Tensor, runner: NodeRunner, node: fx.Node) -> bool:
    """A view (flatten, transpose) moves nothing."""
    storage = value.untyped_storage()._cdata
    return any(t.untyped_storage()._cdata == storage for t in _tensors(runner, node))
