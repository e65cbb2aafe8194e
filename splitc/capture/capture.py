"""Turn a model, its loss and an example batch into a Program.

    model + loss + example  ->  graph, specs, layers, holdings

The trace runs on fake tensors at the example's batch size and one more (see `tracer`), so every node's batch dimension
is known and a program runs at any batch.  What is captured is then compared with the model itself, on a few real
examples: the loss and every gradient (`validate_capture`).  A module's training flag is taken as it is: a BatchNorm in
evaluation mode stays so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from splitc.capture.batch_dims import prune_gradients, require_all_examples, specify
from splitc.capture.group_layers import group_layers
from splitc.capture.loss_terms import isolate_terms
from splitc.capture.patches import intercepted
from splitc.capture.proxy import leaves
from splitc.capture.refusals import Unsupported, no_other_autocast, no_python_randomness, refuse_model
from splitc.capture.source_lines import first_line, line_of
from splitc.capture.tracer import Tracer
from splitc.errors import CaptureError
from splitc.ir.constructors import construction
from splitc.ir.graph import changes_statistics
from splitc.ir.interpreter import fake_copy, quiet, shapes_at
from splitc.ir.program import Input, Program, StateTensor, TensorSpec, under_autocast
from splitc.ir.value_range import class_bound

Example = torch.Tensor | Sequence[Any] | Mapping[str, Any]
Loss = Callable[..., torch.Tensor] | nn.Module | None

LOSS = "loss"  # the name under which a loss module's buffers appear beside the model's


def as_arguments(model: nn.Module, example: Example) -> dict[str, Any]:
    """The example by the names of `model.forward`'s parameters.  Raises CaptureError when it does not fit."""
    signature = inspect.signature(model.forward)
    try:
        if isinstance(example, Mapping):
            bound = signature.bind(**example)
        elif isinstance(example, (tuple, list)):
            bound = signature.bind(*example)
        else:
            bound = signature.bind(example)
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
    for name, value in flat.items():
        if not isinstance(value, torch.Tensor) and any(isinstance(leaf, torch.Tensor) for leaf in leaves(value)):
            raise CaptureError(
                f"the input {name} is a {type(value).__name__} of tensors: let {type(model).__name__}.forward take "
                f"each tensor as a parameter"
            )
    return flat


def target_names(target: Any, taken: Mapping[str, Any]) -> dict[str, Any]:
    """The target tensors by name: `target`, or `target0`, `target1`, ..."""
    if target is None:
        return {}
    parts = {"target": target} if isinstance(target, torch.Tensor) else {f"target{i}": t for i, t in enumerate(target)}
    for name in parts:
        if name in taken:
            raise CaptureError(f"the model's input {name!r} has the name that splitc gives the target; rename it")
    return parts


def capture(
    model: nn.Module,
    example: Example,
    target: Any = None,
    loss: Loss = None,
    name: str | None = None,
    autocast: torch.dtype | None = None,
) -> Program:
    """Trace `loss(model(*example), target)` into a Program.

    example: a tensor, a tuple of tensors, or a dict of keyword arguments: one data-parallel rank's batch, dim 0 is the
    batch.  target: a tensor or a tuple of them.  loss None: the model returns the loss.  autocast: the dtype of the
    torch.autocast that both run under; specs then have the dtypes that values really have.
    Raises CaptureError with the op, the user's line and a remedy.
    """
    refuse_model(model, loss)
    inputs = as_arguments(model, example)
    targets = target_names(target, inputs)
    tensors = {k: v for k, v in {**inputs, **targets}.items() if isinstance(v, torch.Tensor)}
    if tensors.keys() <= targets.keys():
        raise CaptureError("the example has no tensor; give example=(tensor, ...)")
    batch = _batch_of(tensors)
    if loss is None and targets:
        raise CaptureError(
            "a target is given but no loss; give loss=..., or let the model return it and pass the target as one of "
            "its inputs"
        )
    if loss is not None and not targets:
        raise CaptureError("a loss is given but no target; give target=..., one row for each example")
    original = step_root(model, loss)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    root = fake_copy(original, mode)
    tracer = Tracer(root, original, mode, (batch, batch + 1) if batch > 1 else (2, 3))
    with under_autocast(root, autocast), no_other_autocast(autocast, lambda: tracer.evaluator.busy):
        graph = _trace(tracer, model, original, root, mode, inputs, targets, loss)
    tracer.attributes.adopt_constants()
    specify(graph, tracer.values, tracer.evaluator.probes)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or _changes_buffers(node, root))
    trained = prune_gradients(graph, tracer.values)
    program = Program(
        name=name or type(model).__name__,
        graph=graph,
        root=root,
        inputs=tuple(_input(name, tensor, graph, root, name in targets) for name, tensor in tensors.items()),
        batch=batch,
        layers=(),
        tensors=_holdings(model, root, graph, trained),
        autocast=autocast,
    )
    _require_loss(program)
    isolate_terms(graph)
    require_all_examples(graph)
    _require_any_batch(program, tracer.evaluator.probes[2])
    return replace(program, **group_layers(program))


def step_root(model: nn.Module, loss: Loss) -> nn.Module:
    """The model, with a loss module (its class weights, say) as a child beside its own children."""
    root = nn.Module()
    root.__dict__ = dict(model.__dict__)
    root.__class__ = type(model)
    root._modules = dict(model._modules)
    if isinstance(loss, nn.Module):
        if not hasattr(model, LOSS):
            root._modules[LOSS] = loss
        elif any(True for _ in loss.buffers()):
            raise CaptureError(
                f"the model has an attribute {LOSS!r}, which is also the loss module's name; rename it or pass the "
                f"loss as a function"
            )
    return root


def _trace(
    tracer: Tracer,
    model: nn.Module,
    original: nn.Module,
    root: nn.Module,
    mode: FakeTensorMode,
    inputs: Mapping[str, Any],
    targets: Mapping[str, Any],
    loss: Loss,
) -> fx.Graph:
    def feed(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with mode:
            first, second = (
                torch.empty((b, *value.shape[1:]), dtype=value.dtype, device=value.device)
                for b in tracer.evaluator.batches
            )
        return tracer.placeholder(name, (first, second))

    fed = {name: feed(name, value) for name, value in inputs.items()}
    fed_targets = [feed(name, value) for name, value in targets.items()]
    parameters = inspect.signature(root.forward).parameters
    args = [fed.pop(n) for n, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_ONLY and n in fed]
    paths = {module: path for tree in (original, root) for path, module in tree.named_modules()}
    leaf_paths = {path for path, module in root.named_modules() if path and construction(module) is not None}
    loss_module = root._modules.pop(LOSS, None) if isinstance(loss, nn.Module) and not hasattr(model, LOSS) else None
    try:
        with (
            intercepted(tracer, paths, leaf_paths),
            no_python_randomness(type(model).__name__),
            quiet(),
            torch.enable_grad(),
        ):
            value = root(*args, **fed)  # without the loss among its children, which it may iterate over
            if loss_module is not None:
                root._modules[LOSS] = loss_module
            if loss is not None:
                tracer.elsewhere = "loss"
                value = (loss_module or loss)(value, *fed_targets)
        tracer.output(value)
    except CaptureError:
        raise
    except Unsupported as error:
        raise tracer.refused(error) from None
    except Exception as error:
        raise CaptureError(
            f"{line_of(error) or tracer.elsewhere}: {type(error).__name__}: {first_line(error)}; if the model itself "
            f"runs, this line asks of a tensor what a traced one cannot answer: keep to torch functions and tensor "
            f"methods"
        ) from error
    return tracer.graph


def _batch_of(tensors: Mapping[str, torch.Tensor]) -> int:
    scalar = [name for name, tensor in tensors.items() if tensor.dim() == 0]
    if scalar:
        raise CaptureError(f"the input {scalar[0]} is a 0-d tensor; dim 0 of every input must be the batch")
    sizes = {name: tensor.shape[0] for name, tensor in tensors.items()}
    batch = next(iter(sizes.values()))
    if set(sizes.values()) != {batch}:
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise CaptureError(
            f"the example's tensors disagree about the batch: {listed} rows; dim 0 must be the batch in all"
        )
    if batch == 0:
        raise CaptureError("the example batch is empty; give at least one example")
    return batch


def _changes_buffers(node: fx.Node, root: nn.Module) -> bool:
    """Whether the model is another after this node, though its value may not be used: running statistics, counters."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return isinstance(module, nn.modules.batchnorm._NormBase) and module.training and module.track_running_stats
    return "writes" in node.meta or changes_statistics(node)


def _holdings(model: nn.Module, root: nn.Module, graph: fx.Graph, reached: set[fx.Node]) -> dict[str, StateTensor]:
    """Every parameter and buffer that the graph uses, under its first name; `reached` nodes train theirs."""
    names: dict[int, list[str]] = {}
    for name, tensor in (*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)):
        names.setdefault(id(tensor), []).append(name)
    persistent = set(model.state_dict(keep_vars=True))
    used: set[str] = set()
    trained: set[str] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            reads = {str(node.target)}
        elif node.op == "call_module":
            module = root.get_submodule(str(node.target))
            reads = {f"{node.target}.{n}" for n, _ in (*module.named_parameters(), *module.named_buffers())}
        else:
            continue
        used |= reads
        trained |= reads if node in reached else set()
    holdings: dict[str, StateTensor] = {}
    for tensors, parameter in ((root.named_parameters(), True), (root.named_buffers(), False)):
        for name, tensor in tensors:
            aliases = tuple(names[id(tensor)])
            if used.intersection(aliases):
                kept = tuple(a for a in aliases if a in persistent)
                trains = tensor.requires_grad and not trained.isdisjoint(aliases)
                holdings[name] = StateTensor(
                    name, tuple(tensor.shape), tensor.dtype, parameter, trains, bool(kept), kept
                )
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
            f"what is traced returns {got}, not a loss (a 0-d float tensor); let forward return the loss alone, or "
            f"give loss=... and target=..., for example loss=torch.nn.functional.cross_entropy"
        )
    if not any(h.trainable for h in program.tensors.values()):
        raise CaptureError(
            f"{program.name} has no trainable parameter that its loss depends on; there is nothing to train"
        )


def _require_any_batch(program: Program, batch: int) -> None:
    """Raise CaptureError when the graph is another at a batch size that the trace has not seen."""
    with under_autocast(program.root, program.autocast):
        problems = shapes_at(program, batch)
    if problems:
        raise CaptureError(f"{problems[0]}; ranks run other batches than the example's, so forward must work for any")
