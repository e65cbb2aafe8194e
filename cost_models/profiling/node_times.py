"""Time every node of a program's graph, forward and backward, in training steps on random data on this machine.

The graph runs node by node, and values are freed after their last use, so that caches and memory are as in training.
  The backward is one `loss.backward()`: every function that autograd recorded for
a node says when it begins, and the time until the next one begins is the node's.  So what lies between the functions
is counted too: gradients of a value with several readers are added up, and parameters receive theirs.

    seconds of a node = median over the passes, less what saying "it begins" takes

On a CPU one thread computes, as torchrun gives each of the ranks that share a host, and seconds are those in which
this thread ran, which other processes hardly change.  On a GPU they are those between two events of its stream;
kernels so small that the GPU waits for Python wait here for the events too.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn

from splitc.capture.evaluate import execute
from splitc.cost_models.compute.clocks import clock_of
from splitc.cost_models.compute.flops import new_functions
from splitc.errors import CostError
from splitc.ir.autocast import under_autocast
from splitc.ir.costs import Measured
from splitc.ir.graph import info
from splitc.ir.program import Program
from splitc.runtime.clocks import Clock

FIRST, LEAST, MOST = 2, 3, 25
"""Warm-up passes, which allocate memory and choose algorithms; then the fewest and the most timed passes."""

_SHORT, _ROUND = 0.1, 5  # seconds of a pass, so many of which follow one product of matrices


class NodeTimer:
    """Times the nodes of a program.  root: its modules with real tensors on `where`."""

    def __init__(self, program: Program, root: nn.Module, where: torch.device) -> None:
        self._program, self._root, self._where = program, root, where
        self._clock = clock_of(where)
        self._nodes = [node for node in program.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
        self._last_reads_of = _last_reads(program.graph)
        self._at = ""  # the node that runs

    def times(self, inputs: Mapping[str, torch.Tensor], budget: float) -> dict[str, Measured]:
        """Node -> its seconds on `inputs`, with the FLOP/s of large float32 matrix products at the same time.

        budget: seconds that timing takes, about.  Raises CostError when a node fails.
        """
        begin = time.perf_counter()
        try:
            with torch.enable_grad():
                lag = _mark_seconds(self._clock) if self._where.type == "cpu" else 0.0
                product = _product(self._clock, self._where)
                for _ in range(FIRST):
                    self._pass(inputs, lag)
                passes: list[tuple[dict[fx.Node, float], dict[fx.Node, float]]] = []
                rates: list[float] = []
                while len(passes) < LEAST or (len(passes) < MOST and time.perf_counter() - begin < budget):
                    rates.append(product())
                    began = time.perf_counter()
                    again = self._pass(inputs, lag)
                    if time.perf_counter() - began < _SHORT:  # it found the caches full of the matrices
                        passes += [self._pass(inputs, lag) for _ in range(_ROUND)]
                    else:
                        passes.append(again)
        except Exception as error:
            said = str(error).partition("\n")[0]
            raise CostError(
                f"{self._program.name} cannot be measured: {self._at} fails on random numbers with "
                f'{type(error).__name__}: {said}; use counted costs (costs="counted")'
            ) from error
        rate = statistics.median(rates)
        return {
            node.name: Measured(
                statistics.median(forward[node] for forward, _ in passes),
                statistics.median(backward[node] for _, backward in passes),
                rate,
            )
            for node in self._nodes
        }

    def _pass(
        self, inputs: Mapping[str, torch.Tensor], lag: float
    ) -> tuple[dict[fx.Node, float], dict[fx.Node, float]]:
        """Seconds of all nodes in one forward, and in its backward.  lag: seconds that a mark takes."""
        for parameter in self._root.parameters():
            parameter.grad = None
        clock, spans, marks = self._clock, dict[fx.Node, tuple[Any, Any]](), list[tuple[fx.Node | None, Any]]()
        with under_autocast(self._root, self._program.autocast):
            loss = self._forward(inputs, spans, marks)
        self._at = "the backward"
        marks.append((self._program.loss, clock.now()))
        loss.backward()
        marks.append((None, clock.now()))
        clock.settle()
        backward = dict.fromkeys(self._nodes, 0.0)
        for (node, begun), (_, ended) in pairwise(marks):
            assert node is not None
            backward[node] += max(clock.between(begun, ended) - lag, 0.0)
        return {node: clock.between(*span) for node, span in spans.items()}, backward

    def _forward(
        self,
        inputs: Mapping[str, torch.Tensor],
        spans: dict[fx.Node, tuple[Any, Any]],
        marks: list[tuple[fx.Node | None, Any]],
    ) -> torch.Tensor:
        """Run the forward and return the loss.  Fills `spans`, and hooks autograd to fill `marks` in the backward."""
        values: dict[fx.Node, Any] = {}
        owners: dict[Any, fx.Node] = {}
        now = self._clock.now
        for node in self._program.graph.nodes:
            if node.op == "placeholder":
                values[node] = inputs[str(node.target)]
            elif node.op == "get_attr":
                owner, _, name = str(node.target).rpartition(".")
                values[node] = getattr(self._root.get_submodule(owner), name)
            elif node.op != "output":
                self._at = f"{node.name} ({info(node).source})"
                target = self._root.get_submodule(str(node.target)) if node.op == "call_module" else node.target
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                begun = now()
                values[node] = execute(node.op, target, args, kwargs)
                del args, kwargs
                for value in self._last_reads_of[node]:
                    del values[value]
                spans[node] = begun, now()
                self._follow(node, values[node], owners, marks)
        loss: torch.Tensor = values[self._program.loss]
        return loss

    def _follow(
        self, node: fx.Node, value: Any, owners: dict[Any, fx.Node], marks: list[tuple[fx.Node | None, Any]]
    ) -> None:
        """Hook the autograd functions of `node`, unless of an earlier node, to mark when they begin."""
        now = self._clock.now
        for function in new_functions(value, owners):
            if not hasattr(function, "variable"):  # accumulating a parameter's gradient is part of the function before
                owners[function] = node
                function.register_prehook(lambda _: marks.append((node, now())))


def _last_reads(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Node -> the values whose last reader it is."""
    found: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    seen: set[fx.Node] = set()
    for reader in reversed(graph.nodes):
        new = [value for value in reader.all_input_nodes if value not in seen]
        seen.update(new)
        found[reader] += new
    return found


def _product(clock: Clock, where: torch.device) -> Callable[[], float]:
    """A function that multiplies two large matrices and returns the FLOP/s."""
    size = 8192 if where.type == "cuda" else 1024
    matrix = torch.randn(size, size, device=where)
    result = torch.empty_like(matrix)

    def rate() -> float:
        begun = clock.now()
        torch.mm(matrix, matrix, out=result)
        ended = clock.now()
        clock.settle()
        return 2.0 * size**3 / float(clock.between(begun, ended))

    rate()
    return rate


def _mark_seconds(clock: Clock) -> float:
    """Seconds that a mark adds to a backward, from a chain of small functions with and without marks."""
    ops = 100

    def backward(marked: bool) -> float:
        marks: list[Any] = []
        value = torch.ones(1, requires_grad=True)
        for _ in range(ops):
            value = value + 1.0
            if marked and value.grad_fn is not None:
                value.grad_fn.register_prehook(lambda _: marks.append((None, clock.now())))
        begun = clock.now()
        value.backward()
        return float(clock.between(begun, clock.now()))

    lags = [(backward(True) - backward(False)) / ops for _ in range(11)]
    return max(statistics.median(lags), 0.0)
