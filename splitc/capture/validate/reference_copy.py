"""Run a model, its loss and its captured graph on private copies: the user's objects stay as they are.

In float64 sums and means over examples are exact to 1e-9: tensors are copied in that dtype, and casts to a narrower one
go there too.  Dropout is off.
"""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from enum import Enum, auto
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from splitc.capture.example.example import LOSS, Example
from splitc.capture.regions.module_calls import unchanged
from splitc.capture.regions.regions import own_draws, with_loss_module
from splitc.capture.trace.proxy import map_tree
from splitc.capture.trace.random_calls import draw_layouts
from splitc.ir.autocast import under_autocast
from splitc.ir.graph import stores, tensors_of_node
from splitc.ir.program import Program, Refusal
from splitc.ir.regions import Region, regions
from splitc.runtime.seeded.draws import Draws
from splitc.runtime.seeded.mode import SeededRandom

CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
WIDE = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64) | {
    torch.complex64: torch.complex128
}
LAYERS = (
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d
)  # fmt: skip
_UNFOLDED = (F.conv2d, F.conv3d)
"""In float64 torch unfolds their inputs, up to 27 times as many numbers, of all examples at once; here of one."""


class NoDropout(SeededRandom):
    """Makes dropout the identity; other random functions draw the same numbers for all examples, as `program` does."""

    def __init__(self, program: Program | None = None) -> None:
        super().__init__(Draws(0, 0, None), {} if program is None else draw_layouts(program), dropout=False)


class _Standing(NoDropout):
    """Also puts tensors in the place of others, by id, and float64 in the place of narrower dtypes where `wide`.

    apart: BatchNorm uses running statistics, or none, so that examples do not depend on each other.
    layers: the dtype in which linear layers and convolutions compute where `wide`; what they return is in float64.
    """

    layers = torch.float64

    def __init__(self, program: Program, tensors: Mapping[int, Tensor], wide: bool, apart: bool) -> None:
        super().__init__(program)
        self._tensors, self._wide, self._apart = tensors, wide, apart

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not threading.main_thread().is_alive():
            raise InterruptedError("the process ends")
        value = self._computed(func, types, args, kwargs)
        is_narrow = self._wide and isinstance(value, Tensor) and value.dtype in WIDE  # of a layer, or a default
        return value.to(WIDE[value.dtype]) if is_narrow else value

    def _computed(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = (map_tree(part, self._replaced) for part in (args, kwargs or {}))
        if self._wide and func in CASTS:
            func = Tensor.double
        if self._wide and func in LAYERS:
            args, kwargs = (map_tree(part, self._in_layer) for part in (args, kwargs))
        if self._wide and func in _UNFOLDED and len(args) > 1 and args[0].dim() == args[1].dim():
            run = super().__torch_function__
            return torch.cat([run(func, types, (each, *args[1:]), kwargs) for each in args[0].split(1)])
        if func is not F.batch_norm or not self._apart:
            return super().__torch_function__(func, types, args, kwargs)
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        options = {**bound.arguments, "training": False}
        value = options["input"]
        if options["running_mean"] is None:
            channels = value.shape[1]
            options.update(running_mean=value.new_zeros(channels), running_var=value.new_ones(channels))
        return func(**options)

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensors.get(id(value), value)
        return WIDE.get(value, value) if self._wide and isinstance(value, torch.dtype) else value

    def _in_layer(self, value: Any) -> Any:
        return value.to(self.layers) if isinstance(value, Tensor) and value.is_floating_point() else value


class Precision(Enum):
    """How a copy computes, and is compared: in its own dtypes bit by bit, in float64, in its own up to rounding."""

    EXACT = auto()
    WIDE = auto()
    OWN = auto()


class ReferenceCopy:
    """A copy of a model with its loss, and of the modules that the captured graph reads.

    model, example: the copies.  root: further copies, which share parameters that no call changes.  wide: in float64.
    tolerance: the relative rounding error allowed.  narrow: the weights that `read_by_layers` keep their dtype.
    standing: the mode in which the graph or the model runs.  beside: it runs while other threads do, and leaves the
    default dtype and the filters of warnings, which are of the process, as they are.
    """

    standing: _Standing
    beside = False

    def __init__(
        self, program: Program, model: nn.Module, example: Example, precision: Precision, narrow: bool = False
    ) -> None:
        self.wide = wide = precision is Precision.WIDE
        self._autocast = None if wide else program.autocast
        own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        rounding = 2e-2 if (program.autocast or own).itemsize == 2 else 1e-4
        self.tolerance = {Precision.EXACT: 0.0, Precision.WIDE: 1e-9, Precision.OWN: rounding}[precision]
        shared: dict[int, Any] = {}
        if wide and narrow:
            of_layers = read_by_layers(program)
            shared = {id(p): p for name, p in model.named_parameters() if name in of_layers}  # which only read it
        (self.model, loss), self._tensors = _copied((model, example.loss), wide, shared)
        self.example = replace(example, loss=loss)
        changing = {str(node.all_input_nodes[0].target) for node in stores(program.graph)}
        changing = changing.union(*(own.keeps for _, own in regions(program)))
        known = (id(p) for name, p in model.named_parameters() if name not in changing)
        parameters = {key: self._tensors[key] for key in known}
        (other, loss), self._root_tensors = _copied((model, example.loss), wide, parameters)
        self.root = real_root(program, other, replace(example, loss=loss))
        for name, constant in program.root.named_buffers(recurse=False):
            if not hasattr(model, name):
                self.root._buffers[name] = self._tensors[id(constant)] = _converted(constant, wide)
        self._program, self._alive = program, (model, example)  # ids stay theirs

    def values(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of `tensors`, in the dtypes that the reference computes in."""
        return {name: _converted(tensor, self.wide) for name, tensor in tensors.items()}

    def loss(self, values: Mapping[str, Tensor]) -> Tensor:
        """The loss of the model."""
        with self.running(self._tensors), own_draws(self.model, self._program.graph):
            loss: Tensor = self.example.loss_of(self.example.output(self.model, values), values)
        return loss

    @contextmanager
    def running(self, tensors: Mapping[int, Tensor] | None = None, apart: bool = False) -> Iterator[None]:
        """Run the graph inside.  apart: see `_Standing`."""
        held = self._root_tensors if tensors is None else tensors
        with ExitStack() as stack:
            if apart:
                stack.enter_context(unchanged(self.root.buffers()))
            if self.wide and not self.beside:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(torch.float64)
            if not self.beside:
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")  # some functions warn about a single example, std() for one
            stack.enter_context(torch.enable_grad())
            stack.enter_context(under_autocast(self.model, self._autocast))
            self.standing = _Standing(self._program, held, self.wide, apart)
            stack.enter_context(self.standing)
            yield


def read_by_layers(program: Program) -> set[str]:
    """The parameters that torch's linear layers and convolutions read, and nothing else."""
    read: dict[bool, set[str]] = {True: set(), False: set()}
    for each in (program, program.outputs):
        for node in () if isinstance(each, Refusal) else each.graph.nodes:
            module = program.root.get_submodule(str(node.target)) if node.op == "call_module" else None
            is_plain = type(module).__module__.startswith("torch.nn.") and is_layer(node, program.root)
            read[is_plain].update(tensors_of_node(program, node))
    return read[True] - read[False]


def is_layer(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node is a linear layer or a convolution."""
    module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
    return isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) or node.target in LAYERS


def real_root(program: Program, model: nn.Module, example: Example) -> nn.Module:
    """The modules and tensors that the captured graph reads, with their data."""
    loss = program.root._modules.get(LOSS)
    is_region = isinstance(loss, Region) and loss.own.path == LOSS
    root = (with_loss_module(example) if is_region else example).root(model)
    for name, constant in program.root.named_buffers(recurse=False):
        if name not in root._buffers and not hasattr(model, name):
            root._buffers = {**root._buffers, name: constant}
    return root


def _copied(value: Any, wide: bool, memo: Mapping[int, Any]) -> tuple[Any, dict[int, Tensor]]:
    """A deep copy, and its tensors by the ids of the originals.  memo: copies that exist."""
    found: dict[int, Any] = dict(memo)

    def copy_tensor(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(tensor) not in memo:
            memo[id(tensor)] = _converted(tensor, wide)
        copied: Tensor = memo[id(tensor)]
        return copied

    patches = [mock.patch.object(kind, "__deepcopy__", copy_tensor) for kind in (Tensor, nn.Parameter)]
    with patches[0], patches[1]:
        copied = copy.deepcopy(value, found)
    return copied, {key: tensor for key, tensor in found.items() if isinstance(tensor, Tensor)}


def _converted(tensor: Tensor, wide: bool) -> Tensor:
    """A leaf with the same data, in float64 where `wide`."""
    data = tensor.detach().clone()
    data = data.to(WIDE.get(data.dtype, data.dtype)) if wide else data
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=tensor.requires_grad)
    return data.requires_grad_(tensor.requires_grad and tensor.is_leaf)
