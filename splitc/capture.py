"""Turn a model, its loss and an example batch into a Program.

    model + loss + example  ->  graph, specs, layers, holdings

The trace runs on fake tensors at the example's batch size and one more (see `tracer`), so every node's batch dimension
is known and a program runs at any batch.  What is captured is then compared with the model itself, on a few real
examples: the loss and every gradient (see `confirm`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from splitc.constructors import construction
from splitc.errors import CaptureError
from splitc.fake import fake_copy
from splitc.layers import group_layers
from splitc.program import Holding, Input, Program, SizeSpec, Spec, TensorSpec
from splitc.tracer import Tracer
from splitc.value_range import class_bound

Example = torch.Tensor | Sequence[Any] | Mapping[str, Any]
Loss = Callable[..., torch.Tensor] | nn.Module | None

LOSS = "loss"  # the name under which a loss module's buffers appear beside the model's


def as_arguments(model: nn.Module, example: Example) -> dict[str, Any]:
    """The example by the names of `model.forward`'s parameters.  Raises CaptureError when it does not fit."""
    signature = inspect.signature(model.forward)
    try:
        if isinstance(example, Mapping):
            bound = signature.bind(**example)
        elif isinstance(example, torch.Tensor):
            bound = signature.bind(example)
        else:
            bound = signature.bind(*example)
    except TypeError as error:
        raise CaptureError(
            f"the example does not fit {type(model).__name__}.forward{signature}: {error}; give example=(tensor, ...) "
            f"or a dict of keyword arguments"
        ) from error
    flat: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            flat.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            raise CaptureError(f"{type(model).__name__}.forward takes *{name}: give it named parameters to compile it")
        else:
            flat[name] = value
    return flat


def capture(model: nn.Module, example: Example, target: Any = None, loss: Loss = None, name: str | None = None) -> Program:
    """Trace `loss(model(*example), target)` into a Program.

    example: a tensor, a tuple of tensors, or a dict of keyword arguments: one data-parallel rank's batch, dim 0 is the
    batch.  target: a tensor or a tuple of them.  loss None: the model returns the loss.
    Raises CaptureError with the op, the user's line and a remedy.
    """
    model_inputs = as_arguments(model, example)
    targets = target_names(target, model_inputs)
    tensors = {k: v for k, v in {**model_inputs, **targets}.items() if isinstance(v, torch.Tensor)}
    batch = _batch_of(tensors)
    if loss is None and targets:
        raise CaptureError(
            "a target is given but no loss; give loss=..., or let the model return it and pass the target as an input"
        )
    if loss is not None and not targets:
        raise CaptureError("a loss is given but no target; give target=..., one row for each example")
    batches = (batch, batch + 1) if batch > 1 else (2, 3)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    root = fake_copy(step_root(model, loss), mode)
    leaves = {module for module in root.modules() if construction(module) is not None}
    tracer = Tracer(root, mode, leaves.__contains__, batches)
    _trace(tracer, mode, root, model_inputs, targets, loss)
    specs = {node: _spec(values, batches) for node, values in tracer.values.items()}
    for node in tracer.graph.nodes:
        node.meta["spec"] = specs.get(node.name)
    for constant, tensor in tracer.constants.items():
        root.register_buffer(constant, tensor, persistent=False)
    _plain_sizes(tracer.graph)
    tracer.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or n.target is _SETITEM)
    holdings = _holdings(model, root, tracer.graph)
    program = Program(
        name=name or type(model).__name__,
        graph=tracer.graph,
        root=root,
        inputs=tuple(_input(k, v, tracer.graph, root, k in targets) for k, v in tensors.items()),
        batch=batch,
        layers=(),
        holdings=holdings,
    )
    _require_loss(program)
    return replace(program, **group_layers(program))


def target_names(target: Any, taken: Mapping[str, Any]) -> dict[str, Any]:
    """The target tensors by name: `target`, or `target0`, `target1`, ..."""
    if target is None:
        return {}
    parts = {"target": target} if isinstance(target, torch.Tensor) else {f"target{i}": t for i, t in enumerate(target)}
    for name in parts:
        if name in taken:
            raise CaptureError(f"the model's input {name!r} has the name that splitc gives the target; rename it")
    return parts


def step_root(model: nn.Module, loss: Loss) -> nn.Module:
    """The model, with a loss module (its class weights, say) as a child beside its own children."""
    root = nn.Module()
    root.__dict__ = dict(model.__dict__)
    root.__class__ = type(model)
    root._modules = dict(model._modules)
    if isinstance(loss, nn.Module):
        if LOSS in root._modules or hasattr(model, LOSS):
            raise CaptureError(f"the model has an attribute {LOSS!r}, which is also the loss module's name; rename it or "
                               f"pass the loss as a function")
        root._modules[LOSS] = loss
    return root


def _trace(tracer: Tracer, mode: FakeTensorMode, root: nn.Module, inputs: Mapping[str, Any],
           targets: Mapping[str, Any], loss: Loss) -> None:
    def fakes(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with mode:
            first, second = (torch.empty((b, *value.shape[1:]), dtype=value.dtype, device=value.device)
                             for b in tracer.batches)
        return first, second

    def feed(name: str, value: Any) -> Any:
        return tracer.placeholder(name, fakes(value)) if isinstance(value, torch.Tensor) else value

    fed = {name: feed(name, value) for name, value in inputs.items()}
    fed_targets = [feed(name, value) for name, value in targets.items()]
    parameters = inspect.signature(root.forward).parameters
    args = [fed.pop(n) for n, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_ONLY and n in fed]
    loss_call = root._modules[LOSS] if isinstance(loss, nn.Module) else loss
    with tracer.patched():
        value = root.forward(*args, **fed)
        if loss_call is not None:
            value = loss_call(value, *fed_targets)  # type: ignore[misc]
    tracer.output(value)


def _batch_of(tensors: Mapping[str, torch.Tensor]) -> int:
    if not tensors:
        raise CaptureError("the example has no tensor; give example=(tensor, ...)")
    scalar = [name for name, tensor in tensors.items() if tensor.dim() == 0]
    if scalar:
        raise CaptureError(f"the input {scalar[0]} is a 0-d tensor; dim 0 of every input must be the batch")
    sizes = {name: tensor.shape[0] for name, tensor in tensors.items()}
    batch = next(iter(sizes.values()))
    if set(sizes.values()) != {batch}:
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise CaptureError(f"the example's tensors disagree about the batch: {listed} rows; dim 0 must be the batch in all")
    if batch == 0:
        raise CaptureError("the example batch is empty; give at least one example")
    return batch


def _spec(values: tuple[Any, Any], batches: tuple[int, int]) -> Spec:
    a, b = values
    if isinstance(a, torch.Tensor):
        differing = [d for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
        shape = list(a.shape)
        if not differing:
            return TensorSpec(tuple(shape), a.dtype, None, a.requires_grad)
        dim = differing[0]
        if len(differing) > 1 or a.shape[dim] % batches[0] or a.shape[dim] // batches[0] * batches[1] != b.shape[dim]:
            return None  # the batch appears twice (a similarity matrix of examples): it can live on one rank only
        shape[dim] = a.shape[dim] // batches[0]
        return TensorSpec(tuple(shape), a.dtype, dim, a.requires_grad)
    if isinstance(a, (tuple, list)):
        return tuple(_spec(pair, batches) for pair in zip(a, b, strict=True))
    if type(a) is int:
        scale = (b - a) // (batches[1] - batches[0])
        return SizeSpec(scale, a - scale * batches[0])
    return None


_SETITEM = __import__("operator").setitem


def _plain_sizes(graph: fx.Graph) -> None:
    """Rewrite whole shapes into their parts: `x.shape` used as a value becomes `(x.size(0), 3, 4)`.

    After this every number that depends on the batch is one SizeSpec node that can be recomputed in any role.
    """
    for node in list(graph.nodes):
        if not _is_shape(node):
            continue
        tensor = node.args[0]
        with graph.inserting_after(node):
            parts = [_size_of(graph, tensor, d, node) if isinstance(spec, SizeSpec) and spec.scale else
                     (spec.offset if isinstance(spec, SizeSpec) else spec)
                     for d, spec in enumerate(node.meta["spec"])]
        for user in list(node.users):
            if user.op == "call_function" and user.target is _GETITEM and type(user.args[1]) is int:
                part = parts[user.args[1]]
                if isinstance(part, fx.Node):
                    user.replace_all_uses_with(part)
                    continue
        for user in list(node.users):
            user.args = fx.node.map_arg(user.args, lambda n, node=node, parts=parts: tuple(parts) if n is node else n)
            user.kwargs = fx.node.map_arg(user.kwargs, lambda n, node=node, parts=parts: tuple(parts) if n is node else n)


_GETITEM = __import__("operator").getitem


def _is_shape(node: fx.Node) -> bool:
    whole_size = node.op == "call_method" and node.target == "size" and len(node.args) == 1 and not node.kwargs
    return whole_size or (node.op == "call_function" and node.target is getattr and node.args[1] == "shape")


def _size_of(graph: fx.Graph, tensor: Any, dim: int, like: fx.Node) -> fx.Node:
    node = graph.call_method("size", (tensor, dim))
    node.meta.update(like.meta, spec=like.meta["spec"][dim])
    return node


def _holdings(model: nn.Module, root: nn.Module, graph: fx.Graph) -> dict[str, Holding]:
    """Every parameter and buffer that the graph uses, under its first name."""
    names: dict[int, list[str]] = {}
    for name, tensor in (*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)):
        names.setdefault(id(tensor), []).append(name)
    persistent = set(model.state_dict(keep_vars=True))
    used: set[str] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            used.add(node.target)
        elif node.op == "call_module":
            module = root.get_submodule(node.target)
            used.update(f"{node.target}.{n}" for n, _ in (*module.named_parameters(), *module.named_buffers()))
    holdings: dict[str, Holding] = {}
    for tensors, parameter in ((root.named_parameters(), True), (root.named_buffers(), False)):
        for name, tensor in tensors:
            aliases = tuple(names[id(tensor)])
            if used.intersection(aliases):
                kept = tuple(a for a in aliases if a in persistent)
                holdings[name] = Holding(name, tuple(tensor.shape), tensor.dtype, parameter, tensor.requires_grad,
                                         bool(kept), kept)
    return holdings


def _input(name: str, tensor: torch.Tensor, graph: fx.Graph, root: nn.Module, is_target: bool) -> Input:
    node = next(n for n in graph.nodes if n.op == "placeholder" and n.target == name)
    spec = node.meta["spec"]
    assert isinstance(spec, TensorSpec)
    high = None
    if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
        high = class_bound(node, root)
        if high is None and tensor.device.type != "meta":
            high = int(tensor.max()) + 1
    return Input(name, spec, high, is_target)


def _require_loss(program: Program) -> None:
    output = next(node for node in program.graph.nodes if node.op == "output")
    spec = output.args[0].meta["spec"] if isinstance(output.args[0], fx.Node) else None
    if not isinstance(spec, TensorSpec) or spec.shape != () or not spec.dtype.is_floating_point:
        got = f"a tensor of shape {spec.template()}" if isinstance(spec, TensorSpec) else type(output.args[0]).__name__
        raise CaptureError(
            f"what is traced returns {got}, not a loss (a 0-d float tensor); give loss=... and target=..., for example "
            f"loss=torch.nn.functional.cross_entropy"
        )
    if not any(h.trainable for h in program.holdings.values()):
        raise CaptureError(f"{program.name} has no trainable parameter that its loss depends on; there is nothing to train")
