"""Compare what was captured with the model itself, and find how its loss adds up over parts of the batch.

Both are measured on a few real examples, with dropout off and BatchNorm in evaluation mode: a tracer that loses a
gradient, or a loss that couples examples, shows here and not after a week of training.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from splitc.capture import Loss, as_arguments, step_root, target_names
from splitc.errors import CaptureError
from splitc.fake import NodeRunner
from splitc.program import LossTerm, Program, TensorSpec
from splitc.runtime.loss import target_weight

DROPOUTS = {
    F.dropout: 0, F.dropout1d: 2, F.dropout2d: 2, F.dropout3d: 2, F.alpha_dropout: 0, F.feature_alpha_dropout: 2,
    torch.dropout: 0,
}
"""Dropout functions -> the number of leading dims whose elements are dropped together; 0: each element by itself."""

_TOLERANCE = 1e-4
_LINEAR = {"add", "sub", "neg", "mul", "truediv", "div", "rsub"}


class NoDropout(TorchFunctionMode):
    """Dropout passes its input through."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in DROPOUTS else func(*args, **(kwargs or {}))


@contextmanager
def steady(model: nn.Module) -> Iterator[None]:
    """Dropout off and normalisation by running statistics, so that examples are independent of each other."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.training]
    for norm in norms:
        norm.training = False
    try:
        with NoDropout():
            yield
    finally:
        for norm in norms:
            norm.training = True


def confirm(program: Program, model: nn.Module, example: Any, target: Any, loss: Loss) -> tuple[LossTerm, ...]:
    """The terms of the loss, after the captured graph was seen to compute the model's own loss and gradients.

    Raises CaptureError when a gradient or the loss differs, or when a term is no sum or mean over examples.
    """
    inputs = as_arguments(model, example)
    targets = target_names(target, inputs)
    root = step_root(model, loss)
    for name, constant in program.root.named_buffers(recurse=False):
        if name not in root._buffers and name not in dict(model.named_buffers(recurse=False)):
            root._buffers = {**root._buffers, name: constant}
    everything = {**inputs, **targets}
    few = {name: _first(value, 3) for name, value in everything.items()}
    with steady(model):
        _compare(program, root, model, few, inputs, targets, loss)
        values = [_scalars(program, root, few, part) for part in (slice(0, 3), slice(0, 1), slice(1, 3))]
    return tuple(_classify(node, values) for node in _terms(program))


def _first(value: Any, number: int) -> Any:
    """The first `number` examples, repeated when there are fewer."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.cat([value] * -(-number // value.shape[0]))[:number].detach()


def _compare(program: Program, root: nn.Module, model: nn.Module, few: Mapping[str, Any], inputs: Mapping[str, Any],
             targets: Mapping[str, Any], loss: Loss) -> None:
    two = {name: _first(value, 2) for name, value in few.items()}
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def gradients(value: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return torch.autograd.grad(value, list(parameters.values()), allow_unused=True)

    signature = inspect.signature(model.forward)
    positional = [n for n, p in signature.parameters.items() if p.kind is p.POSITIONAL_ONLY and n in inputs]
    own = model(*(two[n] for n in positional), **{n: two[n] for n in inputs if n not in positional})
    if loss is not None:
        own = loss(own, *(two[name] for name in targets))
    captured = NodeRunner(root, program.graph).run_named(two)
    if not torch.allclose(own, captured, rtol=_TOLERANCE, atol=1e-6, equal_nan=True):
        raise CaptureError(
            f"the captured graph computes a loss of {captured.item():.6g} where the model computes {own.item():.6g}: the "
            f"model does something that a graph cannot hold (state kept between calls, random numbers, writing into tensors)"
        )
    for name, a, b in zip(parameters, gradients(own), gradients(captured), strict=True):
        if (a is None) != (b is None) or (a is not None and b is not None and not _close(a, b)):
            raise CaptureError(
                f"the gradient of {name} differs between the model and its captured graph: something in between has its "
                f"own backward (a custom autograd function, a hook); write it with torch operations"
            )


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).norm() <= _TOLERANCE * max(float(a.norm()), 1e-6) or (a.isnan() == b.isnan()).all() and
    a.isnan().any())


# -- the terms of the loss ---------------------------------------------------------------------------------------------


def _terms(program: Program) -> list[tuple[fx.Node, str]]:
    """(node, use): the scalars that the loss is a linear function of, and the denominators of quotients of sums."""
    found: dict[fx.Node, str] = {}
    batched = _batched(program.graph)

    def scalars(node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if n in batched and _is_scalar(n)]

    def walk(node: fx.Node) -> None:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        parts = scalars(node)
        whole = all(_is_scalar(n) for n in node.all_input_nodes)
        if name in ("truediv", "div") and len(parts) == 2 and whole:
            walk(parts[0])
            denominator(parts[1])
        elif name in _LINEAR and parts and whole and (name in ("add", "sub", "rsub") or len(parts) == 1):
            if name in ("truediv", "div") and node.args[0] is not parts[0]:
                denominator(parts[0])
            for part in parts:
                walk(part)
        else:
            found.setdefault(node, "term")

    def denominator(node: fx.Node) -> None:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        parts = scalars(node)
        if name in ("clamp", "clamp_min", "add", "max", "maximum", "float", "to") and len(parts) == 1:
            denominator(parts[0])
        else:
            found[node] = "denominator"

    walk(program.loss)
    return list(found.items())


def _is_scalar(node: fx.Node) -> bool:
    spec = node.meta["spec"]
    return isinstance(spec, TensorSpec) and spec.shape == ()


def _batched(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose value depends on the batch."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def weighted_mean(node: fx.Node) -> bool:
    """Whether `node` is a cross entropy (or nll_loss) that divides by the weights of its targets."""
    if node.target not in (F.cross_entropy, F.nll_loss) or node.kwargs.get("reduction", "mean") != "mean":
        return False
    target = node.args[1] if len(node.args) > 1 else node.kwargs["target"]
    assert isinstance(target, fx.Node)
    spec = target.meta["spec"]
    return isinstance(spec, TensorSpec) and not spec.dtype.is_floating_point


def _scalars(program: Program, root: nn.Module, few: Mapping[str, Any], part: slice) -> dict[fx.Node, tuple[float,
float]]:
    """Value and weight of every term on a part of the examples."""
    out: dict[fx.Node, tuple[float, float]] = {}
    terms = dict(_terms(program))
    runner: NodeRunner

    def keep(node: fx.Node, run: Any) -> Any:
        value = run()
        if node in terms:
            weight = 1.0
            if weighted_mean(node):
                _, target = runner.map_nodes_to_values(node.args[:2], node)
                named = runner.map_nodes_to_values(dict(node.kwargs), node)
                weight = float(target_weight(target, named.get("weight"), named.get("ignore_index", -100)))
            out[node] = float(value), weight
        return value

    inputs = {n: v[part] if isinstance(v, torch.Tensor) else v for n, v in few.items()}
    with torch.no_grad():
        runner = NodeRunner(root, program.graph, keep)
        runner.run_named(inputs)
    return out


def _classify(item: tuple[fx.Node, str], values: list[dict[fx.Node, tuple[float, float]]]) -> LossTerm:
    node, use = item
    (whole, weight), (first, weight1), (rest, weight2) = (v[node] for v in values)

    def close(a: float, b: float) -> bool:
        return abs(a - b) <= _TOLERANCE * max(abs(a), abs(b), 1e-3) or (a != a and b != b)

    suffix = "" if use == "term" else " denominator"
    if use == "denominator" and node.meta["spec"].requires_grad:
        raise CaptureError(f"{node.meta['source']}: the loss divides by {node.name}, which depends on parameters and on the "
                           f"whole batch; splitc sums denominators without gradient only; detach it")
    if weighted_mean(node):
        parts = [value * w if w else 0.0 for value, w in ((first, weight1), (rest, weight2))]  # 0/0 when all are ignored
        if close(whole * weight if weight else 0.0, sum(parts)):
            return LossTerm(node.name, "weighted")
    elif close(whole, (first + 2 * rest) / 3):
        return LossTerm(node.name, "mean" + suffix)
    elif close(whole, first + rest):
        return LossTerm(node.name, "sum" + suffix)
    raise CaptureError(
        f"{node.meta['source']}: the loss couples examples: {node.name} is {whole:.6g} over 3 examples, {first:.6g} over the "
        f"first and {rest:.6g} over the other two, neither their sum nor their mean; a rank that sees a part of the batch "
        f"cannot compute it (use a loss that is a sum, a mean or a weighted mean over examples)"
    )
