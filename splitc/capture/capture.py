"""Turn a model, its loss and an example batch into a Program.

    model + loss + example  ->  graph, specs, layers, parameters and buffers

The trace runs on fake tensors at the example's batch size and one more (see `tracer`), so every node's batch dimension
is known and the program runs at any batch.  `validate_capture` then compares it with the model on a few real examples:
the loss and every gradient.  Training flags are kept: a BatchNorm in evaluation mode stays in evaluation mode.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from splitc.capture.example.example import LOSS, Example
from splitc.capture.example.loss_value import total
from splitc.capture.group_layers import group_layers
from splitc.capture.loss_terms import isolate_terms
from splitc.capture.refusals import Failure, Unsupported, no_other_autocast, no_python_randomness
from splitc.capture.regions.kept_attributes import left_behind
from splitc.capture.regions.region_runs import Counter
from splitc.capture.regions.regions import Regions, with_loss_module
from splitc.capture.source_lines import first_line, line_of
from splitc.capture.trace.batch_dims import prune_gradients, require_whole_batch, set_specs
from splitc.capture.trace.chunks import chunk_of, join_chunks
from splitc.capture.trace.outputs import mark, outputs_of, taken
from splitc.capture.trace.patches import DROPPING, recorded
from splitc.capture.trace.random_calls import locate_draws
from splitc.capture.trace.tracer import Tracer
from splitc.errors import CaptureError
from splitc.ir import comm_ops
from splitc.ir.autocast import under_autocast
from splitc.ir.constructors import construction
from splitc.ir.fake_mode import FakeMode
from splitc.ir.graph import NORMS, changes_statistics, info, is_region, rename, tensor_spec
from splitc.ir.interpreter import fake_copy, quiet, shapes_at
from splitc.ir.layers import StateTensor
from splitc.ir.names import is_ours
from splitc.ir.program import Input, Program, TensorSpec
from splitc.ir.regions import Region, names_in
from splitc.ir.value_range import are_counts, class_bound
from splitc.runtime.data import limits, readable


def capture(
    model: nn.Module,
    example: Example,
    name: str | None = None,
    autocast: torch.dtype | None = None,
    code: str | None = None,
    counter: Counter | None = None,
    training: Program | None = None,
    chunks: bool = True,
) -> Program:
    """Trace the model and its loss on `example` into a Program.

    Where that fails, the paths that libraries take under compilers (`torch.compiler.is_compiling()`) are tried; where
    both fail, the module around that line becomes a region, and the trace begins again.
    code: where the model's Python can be imported, see `OwnCode`.  counter: counts what regions compute.
    chunks: try first whether loops over chunks of the batch are losses over classes (`trace/chunks.py`).
    autocast: the dtype of the torch.autocast that both run under; specs have the dtypes that values have there.
    training: the program of the same model, now in evaluation mode, whose layers and constants have the same names.
    Raises CaptureError with the op, the user's line and a remedy, of the trace that came further.
    """
    regions = Regions(model, example, autocast, code, counter)
    if example.division is not None and training is None:
        why = CaptureError("a function divides its examples, whose sizes follow from the data")
        regions.add(Failure("", type(model), ""), why)
    if training is not None:
        regions.found = {m.own.path: m.own for m in training.root.modules() if isinstance(m, Region)}
    while True:
        failed: list[tuple[int, CaptureError, Failure | None]] = []
        for joins, compiling in ((chunks, False), (False, False), (False, True)):
            if failed and not joins and not compiling:  # it had no chunks
                continue
            traced = with_loss_module(example) if LOSS in regions.found else example
            tracer = _tracer(traced.root(model), example.batch, regions)
            tracer.joins = joins
            try:
                left = _trace(tracer, regions, traced, compiling, training)
                if training is None and (keeper := regions.keeper(left)):
                    tracer.failure = keeper
                    raise CaptureError(f"{keeper.line}: what this keeps of a batch goes into the next one")
                return _program(tracer, regions, name or type(model).__name__, training)
            except CaptureError as error:
                if joins and any(node.target is chunk_of for node in tracer.values):
                    continue
                failed.append((len(tracer.graph.nodes), error, tracer.failure))
        _, problem, failure = max(failed, key=lambda each: each[0])
        if failure is None or training is not None:
            raise problem
        regions.add(failure, problem)


def _tracer(original: nn.Module, batch: int, regions: Regions) -> Tracer:
    mode = FakeMode()
    root = regions.stand_in(fake_copy(original, mode), mode)
    return Tracer(root, original, mode, (batch, batch + 1) if batch > 1 else (2, 3))


def _program(tracer: Tracer, regions: Regions, name: str, training: Program | None) -> Program:
    """The program of a trace of the model that `regions` are of."""
    model, example = regions.model, regions.example
    graph, root = tracer.graph, tracer.root
    tracer.attributes.adopt_constants()
    for node in graph.find_nodes(op="placeholder"):
        if is_ours(node.name):
            rename(graph, node, f"{node.name}_")
    set_specs(graph, tracer.values, tracer.evaluator.probes, tracer.guards.is_linear)
    locate_draws(graph)
    _without_dead_code(graph, root)
    chunked = join_chunks(graph, root, tracer.values)
    returned = taken(graph)
    _without_dead_code(graph, root)
    reached = prune_gradients(graph, tracer.values)
    program = Program(
        name=name,
        graph=graph,
        root=root,
        inputs=tuple(_input(name, regions, tracer) for name in example.tensors),
        batch=example.batch,
        layers=(),
        tensors=_state_tensors(model, root, graph, reached),
        autocast=regions.autocast,
        notes=(*tracer.notes, *chunked, *tracer.random.notes, *regions.notes),
        guards=tuple(tracer.guards.found),
        part=None if example.division is None else example.division.part,
        reads_mode=tracer.reads_mode or any(_has_mode(node, root) for node in graph.nodes),
    )
    _require_loss(program, training)
    isolate_terms(graph)
    require_whole_batch(graph)
    _require_any_batch(program, tracer.evaluator.probes)
    known = () if training is None else tuple(layer.name for layer in training.layers)
    program = replace(program, **group_layers(program, known=known))
    return replace(program, outputs=outputs_of(program, returned))


def _trace(
    tracer: Tracer, regions: Regions, example: Example, compiling: bool, training: Program | None
) -> dict[str, str]:
    """Run the tracer's fake copy of the model, and the loss, on proxies.  Raises CaptureError.

    Return the attributes in which traced tensors were left, with the user's line.
    """
    root, original, autocast = tracer.root, tracer.original, regions.autocast

    def placeholder(name: str, tensor: torch.Tensor) -> Any:
        dim, sizes = example.batch_dims.get(name, 0), tracer.evaluator.batches
        shapes = (tensor.shape if dim is None else (*tensor.shape[:dim], b, *tensor.shape[dim + 1 :]) for b in sizes)
        with tracer.fake:
            first, second = (torch.empty(shape, dtype=tensor.dtype, device=tensor.device) for shape in shapes)
        return tracer.placeholder(name, (first, second))

    proxies = {name: placeholder(name, tensor) for name, tensor in example.tensors.items()}
    paths = {module: path for tree in (original, root) for path, module in tree.named_modules()}
    built = root if training is None else training.root
    leaf_paths = {path for path, module in built.named_modules() if path and construction(module) is not None}
    leaf_paths |= {path for path, module in root.named_modules() if isinstance(module, Region)}
    if training is not None:
        tracer.attributes.taken = {name: t for name, t in built.named_buffers() if not isinstance(t, FakeTensor)}
        leaf_paths -= {path for path, module in root.named_modules() if _is_norm(module) and module.training}
    loss = None if hasattr(regions.model, LOSS) else root._modules.pop(LOSS, None)
    try:
        with (
            under_autocast(root, autocast),
            no_other_autocast(autocast, lambda: tracer.evaluator.busy),
            recorded(tracer, paths, leaf_paths, compiling),
            no_python_randomness(type(regions.model).__name__),
            quiet(),
            torch.enable_grad(),
        ):
            value = example.output(root, proxies)  # without the loss among its children, which it may iterate over
            if loss is not None:
                root._modules[LOSS] = loss
                example = replace(example, loss=loss)
            if example.loss is not None:
                tracer.begin_loss()
            losses = example.losses_of(value, proxies)
            mark(tracer.graph, value)
            tracer.output(total(losses))
            left = {name: info(proxy._node).source for name, proxy in left_behind(root).items()}
        if len(losses) > 1:
            tracer.notes.append(f"The loss is the sum of {', '.join(losses)}.")
    except (CaptureError, Unsupported) as error:
        found = tracer.refused(error) if isinstance(error, Unsupported) else error
        raise tracer.refusal or found from error.__cause__
    except Exception as error:
        tracer.failed(line_of(error) or tracer.origin)
        raise tracer.refusal or CaptureError(
            f"{line_of(error) or tracer.origin}: {type(error).__name__}: {first_line(error)}; if the model itself "
            f"runs, this line asks of a tensor what a traced one cannot answer: keep to torch functions and tensor "
            f"methods"
        ) from error
    if tracer.refusal is not None:
        raise tracer.refusal
    return left


def _has_mode(node: fx.Node, root: nn.Module) -> bool:
    """Whether evaluation may treat the node in another way than a module of torch that has its mode from the model."""
    if node.target is comm_ops.dropout:
        return not isinstance(root.get_submodule(info(node).module), DROPPING)
    return is_region(node) or node.target in NORMS


def _without_dead_code(graph: fx.Graph, root: nn.Module) -> None:
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or _has_side_effect(node, root))


def _has_side_effect(node: fx.Node, root: nn.Module) -> bool:
    """Whether the node updates a buffer (running statistics, a counter), so that it is kept though nothing reads it."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if isinstance(module, Region):
            return any(True for _ in module.buffers())
        return _is_norm(module) and module.training and bool(module.track_running_stats)
    return info(node).side_effect or changes_statistics(node)


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase)


def _state_tensors(model: nn.Module, root: nn.Module, graph: fx.Graph, reached: set[fx.Node]) -> dict[str, StateTensor]:
    """Every parameter and buffer that the graph reads, by its first name; those read by `reached` nodes are trained."""
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
            reads = set(names_in(root, str(node.target)))
        else:
            continue
        used |= reads
        trained |= reads if node in reached else set()
    found: dict[str, StateTensor] = {}
    for tensors, parameter in ((root.named_parameters(), True), (root.named_buffers(), False)):
        for name, tensor in tensors:
            aliases = tuple(names[id(tensor)])
            if used.intersection(aliases):
                kept = tuple(a for a in aliases if a in persistent)
                trains = tensor.requires_grad and not trained.isdisjoint(aliases)
                found[name] = StateTensor(name, tuple(tensor.shape), tensor.dtype, parameter, trains, bool(kept), kept)
    return found


def _input(name: str, regions: Regions, tracer: Tracer) -> Input:
    example = regions.example
    tensor = readable(example.tensors[name].detach())
    node = next(n for n in tracer.graph.nodes if n.op == "placeholder" and n.target == name)
    bound = class_bound(node, tracer.root, tensor, tracer.attributes.real)
    low, high = limits(tensor) if bound is None or tensor.is_floating_point() else (0, bound)
    if tensor.is_floating_point() and are_counts(tensor):
        low, high = 0, int(tensor.max()) + 1
    elif bound is not None and not tensor.is_floating_point() and not tensor.is_meta:
        ignored = {reader.kwargs.get("ignore_index") for reader in tracer.graph.nodes}
        if wrong := {*tensor.cpu()[tensor.cpu() >= torch.tensor(high)].tolist()} - ignored:
            raise CaptureError(f"{name} holds {max(wrong)}, out of bounds: what reads it takes numbers below {high}")
    path = example.paths[name]
    if path[-1].startswith(("bag_starts", "bag_bounds")) and node.users and not regions.found:
        raise CaptureError(
            f"{'.'.join(path[:-1])} counts in equal steps in the example, as offsets of bags do, and is read as "
            f"something else too; give an example with other numbers"
        )
    loose = None if example.division is None else example.division.loose.get(name)
    nested = path if len(path) > 1 else None
    return Input(name, tensor_spec(node), high, path[0] in example.targets, nested, bound, loose, low)


def _require_loss(program: Program, training: Program | None) -> None:
    output = next(node for node in program.graph.nodes if node.op == "output")
    spec = info(output.args[0]).spec if isinstance(output.args[0], fx.Node) else None
    if not isinstance(spec, TensorSpec) or spec.shape != () or not spec.dtype.is_floating_point:
        got = f"a tensor of shape {spec.template()}" if isinstance(spec, TensorSpec) else type(output.args[0]).__name__
        raise CaptureError(
            f"what is traced returns {got}, not a loss (a 0-d float tensor); let forward return the loss alone, or "
            f"give loss=... and target=..., for example loss=torch.nn.functional.cross_entropy"
        )
    if training is None and not any(tensor.trainable for tensor in program.tensors.values()):
        raise CaptureError(
            f"{program.name} has no trainable parameter that its loss depends on; there is nothing to train"
        )


def _require_any_batch(program: Program, probes: tuple[int, ...]) -> None:
    """Raise CaptureError when the graph fails, or its shapes differ, at a batch size that the trace has not seen."""
    others = (probes[2], probes[1] + 1, probes[0] - 1, probes[0] // 2, 1)
    batch = next((b for b in others if b > 0 and program.allows(b)), probes[0])
    with under_autocast(program.root, program.autocast):
        problems = shapes_at(program, batch)
    if problems:
        raise CaptureError(f"{problems[0]}; ranks run other batches than the example's, so forward must work for any")
