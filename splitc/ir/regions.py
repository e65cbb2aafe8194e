"""Regions: modules that stay the user's own code, because they cannot be traced, and what stands in for them.

A region is one `call_module` node.  In `program.root` a `Region` has its place: it holds the module's parameters and
buffers under their names, and makes results of the right shapes at any batch, without the module's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from splitc.ir.costs import LayerCost
from splitc.ir.program import Program, SizeSpec, TensorSpec
from splitc.runtime.nested import parts, with_parts
from splitc.runtime.nested import tensors as tensors_of
from splitc.runtime.seeded.draws import Layout

Templates = tuple[tuple[int, ...] | None, ...]
"""Shapes of tensor arguments, in order, with -1 for the batch; None: of another form at each batch."""


@dataclass(frozen=True)
class OwnCode:
    """What is known of a region; all but `path` was seen when the model ran.

    path: of the module; "" is the whole model.  is_function: a loss that is no module.
    why: the line that could not be traced, and why.
    code: where its Python can be imported, "module:factory" of the model or of the loss; None: nowhere.
    output: containers as the module returns them, with a TensorSpec for each tensor, and `Unread` for other objects.
    batch: which tensor argument has the batch, along which dim, and rows for each example; None: no argument has it.
    saved: bytes that autograd keeps for 0 examples, and for each example.
    costs: the operations of its forward, at two batches.
    norms: rows of the BatchNorm calls inside, in order.
    evaluating: submodules in evaluation mode.  random: random operations inside that are no dropout.
    draws: where the examples of the draws inside lie, in order.
    dtypes: in which it computes with a gradient.  differentiates: its forward takes gradients itself.
    keeps: tensors that it changes as no two ranks do that see parts of the batch.  keeps_rows: one for each example.
    inputs: of the calls that were seen.  others: what is known of calls with inputs of other shapes.
    """

    path: str
    is_function: bool
    why: str
    code: str | None
    output: Any
    batch: tuple[int, int, int] | None
    saved: tuple[float, float] = (0.0, 0.0)
    costs: tuple[LayerCost, ...] = ()
    norms: tuple[SizeSpec, ...] = ()
    evaluating: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    draws: tuple[Layout, ...] = ()
    dtypes: frozenset[torch.dtype] = frozenset()
    differentiates: bool = False
    keeps: frozenset[str] = frozenset()
    keeps_rows: bool = True
    inputs: Templates = ()
    others: tuple[OwnCode, ...] = ()

    def called(self, inputs: Templates) -> OwnCode:
        """What is known of a call with inputs of these shapes."""
        return next((own for own in (self, *self.others) if fit(own.inputs, inputs)), self)


def fit(a: Templates, b: Templates) -> bool:
    """Whether tensors may have the shapes of both, at some batches."""
    known = [(s, t) for s, t in zip(a, b, strict=False) if s is not None and t is not None]
    alike = len(a) == len(b) and all(len(s) == len(t) for s, t in known)
    return alike and all(-1 in pair or pair[0] == pair[1] for s, t in known for pair in zip(s, t, strict=True))


class Unread:
    """Stands for an object that a region returns, such as a cache: it may be passed through Python, but not be used."""


class Region(nn.Module):
    """Stands in for a region: the module's tensors, and results without values.  names: of the tensors, inside it."""

    own: OwnCode
    names: tuple[str, ...]

    def __init__(self, module: nn.Module, own: OwnCode) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, dict(module._modules)
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self.__dict__.update(own=own, names=tuple(_names(self)))  # which the module's tensors may be called too

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensor for _, tensor in tensors_of((args, kwargs))]
        own = self.own.called(tuple(tuple(tensor.shape) for tensor in tensors))
        batch = 0
        if own.batch is not None:
            index, dim, rows = own.batch
            batch = tensors[index].shape[dim] // rows
        results = _NoValues.apply(own, batch, len(tensors), *tensors, *self.parameters())  # type: ignore[no-untyped-call]
        return made_like(own.output, iter(results))


class _NoValues(torch.autograd.Function):
    """Tensors of the shapes of a region's results, which keep as many bytes until backward as its code does."""

    @staticmethod
    def forward(ctx: Any, own: OwnCode, batch: int, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        device = tensors[0].device if tensors else torch.device("cpu")
        saved = torch.empty(int(own.saved[0] + own.saved[1] * batch), dtype=torch.uint8, device=device)
        ctx.save_for_backward(saved, *tensors[:number])
        ctx.parameters = tensors[number:]
        specs = specs_in(own.output)
        made = [torch.empty(spec.at(batch), dtype=spec.dtype, device=device) for spec in specs]
        ctx.mark_non_differentiable(*(t for t, spec in zip(made, specs, strict=True) if not spec.requires_grad))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs = (*ctx.saved_tensors[1:], *ctx.parameters)
        needed = ctx.needs_input_grad[3:]
        return None, None, None, *(torch.zeros_like(t) if n else None for t, n in zip(inputs, needed, strict=True))


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in (*module.named_parameters(), *module.named_buffers())]


def names_in(root: nn.Module, path: str) -> list[str]:
    """Names in `root` of the parameters and buffers of the module at `path`."""
    module = root.get_submodule(path)
    names = module.names if isinstance(module, Region) else _names(module)
    return [f"{path}.{name}" if path else name for name in names]


def is_inside(path: str, outer: str) -> bool:
    """Whether a module is another one or inside it; the loss is outside of the model."""
    return path == outer or path.startswith(f"{outer}.") or (outer == "" and path != "loss")


def regions(program: Program, graph: fx.Graph | None = None) -> Iterator[tuple[fx.Node, OwnCode]]:
    """The nodes that call regions, of the program's graph or that of a stage."""
    for node in (graph or program.graph).nodes:
        module = program.root.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, Region):
            yield node, module.own


def specs_in(output: Any) -> list[TensorSpec]:
    """The specs in nested containers, in order."""
    if isinstance(output, TensorSpec):
        return [output]
    return [spec for part in (parts(output) or {}).values() for spec in specs_in(part)]


def made_like(output: Any, results: Iterator[Any]) -> Any:
    """The same containers with the next of `results` for each spec."""
    if isinstance(output, TensorSpec):
        return next(results)
    held = parts(output)
    return output if held is None else with_parts(output, {key: made_like(part, results) for key, part in held.items()})
