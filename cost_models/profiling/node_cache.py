"""A cache of measured node times, keyed by a node's op, arguments, shapes, dtypes and needed gradients.

Nodes with the same key take the same time in every model.  A key reads like a call:

    nn.Linear(9216, 4096) of weight', bias' (float32[32, 9216]') -> backward

with ' where a gradient is needed, + where a later node reads the value too, so that its gradients are added up here,
and strides where a tensor is not contiguous.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from splitc.ir.autocast import under_autocast
from splitc.ir.constructors import construction
from splitc.ir.costs import Measured
from splitc.ir.disk_cache import write_cache
from splitc.ir.graph import info
from splitc.ir.interpreter import NodeRunner, fake_inputs, mode_of
from splitc.ir.program import Program, Spec, TensorSpec

_FORMAT = 2  # a higher one measures again


class NodeCache:
    """Measured times by key, in a file of `folder` for this machine."""

    def __init__(self, folder: Path, machine: str) -> None:
        self.machine = f"{machine}, torch {torch.__version__}, timed by splitc (format {_FORMAT})"
        self.path = folder / f"nodes-{hashlib.sha256(self.machine.encode()).hexdigest()[:12]}.json"
        self.entries = self._read()

    def has(self, keys: Iterable[str]) -> bool:
        """Whether all keys are in the cache."""
        return all(key in self.entries for key in keys)

    def add(self, entries: Mapping[str, Measured]) -> None:
        """Add new entries to those that this or another process has measured before, and write the file."""
        self.entries = {**entries, **self._read(), **self.entries}
        nodes = {key: [e.forward, e.backward, e.flop_rate] for key, e in sorted(self.entries.items())}
        write_cache(self.path, json.dumps({"machine": self.machine, "nodes": nodes}, indent=0))

    def _read(self) -> dict[str, Measured]:
        """The entries of the file; none if it cannot be read."""
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["machine"] != self.machine:
                return {}
            found = {str(key): Measured(*map(float, numbers)) for key, numbers in data["nodes"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        return {key: e for key, e in found.items() if e.flop_rate > 0 and e.forward >= 0 and e.backward >= 0}


def node_keys(program: Program, batch: int) -> dict[str, str]:
    """Name -> key of every node that computes, at `batch` examples."""
    mode = mode_of(program.root)
    values: dict[fx.Node, Any] = {}

    def keep(node: fx.Node, run: Any) -> Any:
        values[node] = run()
        return values[node]

    with mode, under_autocast(program.root, program.autocast), torch.enable_grad():
        NodeRunner(program.root, program.graph, keep).run_named(fake_inputs(program, batch, mode))
    nodes = [node for node in program.graph.nodes if node.op.startswith("call_")]
    last = {source: k for k, node in enumerate(nodes) for source in _sources(program, node, values)}
    autocast = "" if program.autocast is None else f" under {program.autocast}"
    keys = {}
    for k, node in enumerate(nodes):
        again = {source for source in _sources(program, node, values) if last[source] > k}
        backward = " -> backward" if _trains(info(node).spec) else ""
        keys[node.name] = f"{_called(program, node, again)}({_arguments(node, values, again)}){backward}{autocast}"
    return keys


def _sources(program: Program, node: fx.Node, values: Mapping[fx.Node, Any]) -> Iterator[int]:
    """Ids of the tensors that a node reads, its parameters included; tied tensors are one."""
    for value in node.all_input_nodes:
        yield id(values[value])
    if node.op == "call_module":
        yield from map(id, program.root.get_submodule(str(node.target)).parameters())


def _called(program: Program, node: fx.Node, again: set[int]) -> str:
    if node.op == "call_method":
        return f".{node.target}"
    if node.op == "call_function":
        target: Any = node.target
        return f"{getattr(target, '__module__', None)}.{getattr(target, '__qualname__', target)}"
    module = program.root.get_submodule(str(node.target))
    held = ", ".join(f"{name} {_tensor(tensor, again)}" for name, tensor in module.named_parameters())
    return f"{construction(module) or module} of {held} {'training' if module.training else 'evaluating'} "


def _arguments(node: fx.Node, values: Mapping[fx.Node, Any], again: set[int]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            value = values[value]
        if isinstance(value, torch.Tensor):
            return _tensor(value, again)
        if isinstance(value, tuple | list):
            return f"({', '.join(map(text, value))})"
        if isinstance(value, slice):
            return f"{text(value.start)}:{text(value.stop)}:{text(value.step)}"
        return repr(value)

    return ", ".join([*map(text, node.args), *(f"{name}={text(value)}" for name, value in node.kwargs.items())])


def _tensor(value: torch.Tensor, again: set[int]) -> str:
    strides = "" if value.is_contiguous() else f" by {list(value.stride())}"
    needs = ("'" + "+" * (id(value) in again)) if value.requires_grad else ""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{strides}{needs}"


def _trains(spec: Spec) -> bool:
    """Whether a gradient of the loss reaches the node."""
    if isinstance(spec, tuple):
        return any(map(_trains, spec))
    return isinstance(spec, TensorSpec) and spec.requires_grad
