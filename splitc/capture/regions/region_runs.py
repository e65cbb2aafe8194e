"""Run a copy of a model on a few real examples, and see what some of its modules take, return, change and keep."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.capture.example.example import Example
from splitc.capture.refusals import writes_text
from splitc.capture.regions.kept_attributes import kept_attributes, train_a_little
from splitc.capture.regions.module_calls import intercepted, unchanged
from splitc.capture.source_lines import first_line, line_of
from splitc.capture.trace.batch_dims import infer_spec
from splitc.errors import CaptureError
from splitc.ir.autocast import under_autocast
from splitc.ir.costs import LayerCost, OpCost
from splitc.ir.graph import reached
from splitc.ir.program import SizeSpec, TensorSpec
from splitc.ir.regions import OwnCode, Templates, Unread, fit, is_inside, made_like, specs_in
from splitc.runtime.generators import same_generators
from splitc.runtime.nested import parts, replaced, tensors, with_parts
from splitc.runtime.own_code import OwnFunction
from splitc.runtime.seeded.draws import Draws, Layout
from splitc.runtime.seeded.mode import SeededRandom

SMALL, LARGE = 2, 3
"""Examples of the two batches on which a region is seen."""

Counter = Callable[[Callable[[OpCost], None]], AbstractContextManager[Any]]
"""Makes a context that calls a function with every operation inside."""


class NoRegion(Exception):
    """A module cannot be a region; the text says why."""


class Never(NoRegion):
    """Nor can any module around it: the model itself fails, or ranks would train something else."""


@dataclass
class _Call:
    """One call of a module on real tensors.

    inputs: its tensors.  wrote: whether it wrote into them.  changed: the buffers that it changed, afterwards.
    saved: bytes that autograd keeps.
    """

    module: nn.Module
    inputs: list[Tensor]
    output: Any
    wrote: bool
    changed: dict[str, Tensor]
    saved: float
    watch: _Watch
    random: Sequence[str]
    ops: list[OpCost]


class _Watch(SeededRandom):
    """Notes rows of BatchNorm calls, shapes of draws, gradients, their dtypes, and functions that cannot be seeded."""

    def __init__(self) -> None:
        super().__init__(Draws(0, 0, None))
        self.norms, self.drawn, self.dtypes = list[int](), list[Tensor](), set[torch.dtype]()
        self.differentiates = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            self.norms.append((args[0] if args else (kwargs or {})["input"]).shape[0])
        self.differentiates |= func in (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
        result = super().__torch_function__(func, types, args, kwargs)
        self.dtypes |= {tensor.dtype for _, tensor in tensors(result) if tensor.requires_grad}
        return result

    def _guess(self, value: Tensor, merged: bool, count: int | None) -> Layout:
        self.drawn.append(torch.empty(value.shape, device="meta"))
        return Layout(None)


@dataclass
class Runs:
    """Three runs of a copy of the model: on two examples, on three, and on two others."""

    model: nn.Module
    example: Example
    autocast: torch.dtype | None
    paths: list[str]
    counter: Counter | None

    def __post_init__(self) -> None:
        batch = self.example.batch
        rows = [[k % batch for k in range(n)] for n in (SMALL, LARGE)]
        rows.append([-1 - k % batch for k in range(SMALL)])
        try:
            self.model, self.example = copy.deepcopy((self.model, self.example))
            train_a_little(self.model)
            shared = {id(parameter): parameter for parameter in self.model.parameters()}
            self._parameters = set(shared)
            copies = [copy.deepcopy((self.model, self.example), dict(shared)) for _ in rows]
            self._runs = [self._run(*each, number) for each, number in zip(copies, rows, strict=True)]
            roots = [example.root(model) for model, example in ((self.model, self.example), *copies)]
            self.keeps = kept_attributes(roots, lambda: self._run(*copies[0], rows[0]))
        except CaptureError:
            raise
        except Exception as error:
            where = line_of(error) or type(self.model).__name__
            raise Never(f"{where}: {type(error).__name__}: {first_line(error)}") from error

    def _run(self, model: nn.Module, example: Example, rows: list[int]) -> dict[str, list[_Call]]:
        """Run a model and its loss once; the calls of the modules at `paths`.  Tensors are as before afterwards."""
        calls: dict[str, list[_Call]] = {path: [] for path in self.paths}
        values = example.rows(rows)
        root = example.root(model)
        watched = {root.get_submodule(path) if path else model: calls[path] for path in self.paths}
        own = {id(parameter): parameter for module in watched for parameter in module.parameters()}

        def run(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            watched[module].append(_watch(module, call, args, kwargs, self.counter))
            return watched[module][-1].output

        with (
            warnings.catch_warnings(action="ignore"),
            unchanged((*model.buffers(), *own.values())),
            intercepted(watched, run),
            same_generators(),
            torch.enable_grad(),
            under_autocast(model, self.autocast),
        ):
            example.loss_of(example.output(model, values), values)
        return calls

    def region(self, path: str, why: str, code: str | None) -> OwnCode:
        """What is known of the module at `path`.  Raises NoRegion."""
        small, large, others = (run[path] for run in self._runs)
        if not small or not len(small) == len(large) == len(others):
            raise NoRegion(f"{path or 'the model'} is not called in each forward alike")
        seen: dict[Templates, list[tuple[_Call, _Call, Any]]] = {}
        keeps = {name: self.keeps[name] for name in self.keeps if is_inside(name, path)}
        for a, b, c in zip(small, large, others, strict=True):
            keeps = _kept(path, self._parameters, a, b, c) | keeps
            templates = tuple(spec.template() if spec else None for spec in self._inputs(path, a, b))
            seen.setdefault(templates, []).append((a, b, _output(path, a, b, c)))
        outputs = [(templates, output) for templates, calls in seen.items() for *_, output in calls]
        shapes = [(t, made_like(out, (replace(s, requires_grad=False) for s in specs_in(out)))) for t, out in outputs]
        if any(s != t and fit(one, other) for (one, s), (other, t) in combinations(shapes, 2)):
            raise NoRegion(f"{path} is called several times in a forward, and returns other shapes each time")
        draws = tuple(chain(*(map(_seen, a.watch.drawn, b.watch.drawn) for (a, b, _), *_ in seen.values())))
        made = []
        for templates, calls in seen.items():
            a, b, _ = calls[0]
            specs = enumerate(self._inputs(path, a, b))
            batched = [(k, s.batch_dim, s.rows) for k, s in specs if s and s.batch_dim is not None]
            norms = zip(a.watch.norms, b.watch.norms, strict=False)
            per_example = max((b.saved - a.saved) / (LARGE - SMALL), 0.0)
            own = OwnCode(
                path=path,
                is_function=isinstance(a.module, OwnFunction),
                why=why,
                code=code,
                output=max((out for *_, out in calls), key=lambda out: sum(s.requires_grad for s in specs_in(out))),
                batch=next(iter(batched), None if self.example.division is None else (0, 0, 1)),  # as it is traced
                saved=(max(a.saved - SMALL * per_example, 0.0), per_example),
                norms=tuple(SizeSpec(n - m, m - SMALL * (n - m)) for m, n in norms),
                draws=draws,
                evaluating=tuple(name for name, each in a.module.named_modules() if not each.training),
                costs=(LayerCost(SMALL, tuple(a.ops), 0.0), LayerCost(LARGE, tuple(b.ops), 0.0)),
                random=tuple(sorted({name for call in (*small, *large, *others) for name in call.random})),
                dtypes=frozenset().union(*(call.watch.dtypes for call in small)),
                differentiates=any(call.watch.differentiates for call in small),
                inputs=templates,
                keeps=frozenset(keeps),
                keeps_rows=all(keeps.values()),
            )
            made.append(own)
        return replace(made[0], others=tuple(made[1:]))

    def _inputs(self, path: str, small: _Call, large: _Call) -> list[TensorSpec | None]:
        """The specs of the tensor arguments of a call; none of a divided batch's, of any number.  Raises NoRegion."""
        if self.example.division is not None:
            return []
        if [tensor.dim() for tensor in small.inputs] != [tensor.dim() for tensor in large.inputs]:
            raise NoRegion(f"{path or 'the model'} is given other tensors for other batches")
        pairs = zip(small.inputs, large.inputs, strict=True)
        return [spec if isinstance(spec := infer_spec(pair, (SMALL, LARGE)), TensorSpec) else None for pair in pairs]


def _watch(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any, counter: Counter | None) -> _Call:
    """Call a module on inputs that hang together with nothing before it."""
    cut = {path: t.detach().requires_grad_(t.requires_grad) for path, t in tensors((args, kwargs))}
    args, kwargs = replaced((args, kwargs), cut)
    inputs, ops = [tensor for _, tensor in tensors((args, kwargs))], list[OpCost]()
    before = _copied(module)
    versions, state = [tensor._version for tensor in inputs], torch.get_rng_state()
    kept = {t.untyped_storage()._cdata: t.untyped_storage() for t in (*inputs, *module.parameters(), *module.buffers())}
    given = len(kept)

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor.untyped_storage())
        return tensor

    watch = _Watch()
    counting = nullcontext() if counter is None else counter(ops.append)
    with watch, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), counting:
        output = call(*args, **kwargs)
    after = _copied(module)
    drawn = ["torch's generator"] if not torch.equal(torch.get_rng_state(), state) else []
    return _Call(
        module,
        inputs,
        output,
        any(tensor._version != version for tensor, version in zip(inputs, versions, strict=True)),
        {name: after[name] for name, was in before.items() if name in after and not torch.equal(after[name], was)},
        sum(storage.nbytes() for storage in list(kept.values())[given:]),
        watch,
        sorted(watch.unseeded) or drawn,
        ops,
    )


def _copied(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the module's parameters and buffers by name."""
    return {name: t.detach().clone() for name, t in (*module.named_buffers(), *module.named_parameters())}


def _output(path: str, small: _Call, large: _Call, other: _Call) -> Any:
    """The containers of an output with a TensorSpec for each tensor.  Raises NoRegion."""
    what = path or "the model"

    def spec(a: Any, b: Any, c: Any) -> Any:
        held, others = parts(a), (parts(b) or {}, parts(c) or {})
        if held is not None:
            if type(a) is not type(b) or type(a) is not type(c) or any(each.keys() != held.keys() for each in others):
                raise NoRegion(f"{what} returns other containers for other data")
            made = with_parts(a, {key: spec(part, *(each[key] for each in others)) for key, part in held.items()})
            return Unread if parts(made) is None else made  # None: an object, of which only tensors make a container
        if not isinstance(a, Tensor):
            if not isinstance(a, (bool, int, float, str, type(None))):
                return Unread
            if type(a) is type(b) is type(c) and a == b == c:
                return a
            raise NoRegion(f"{what} returns a {type(a).__name__}")
        if not (
            isinstance(b, Tensor) and isinstance(c, Tensor) and a.dim() == b.dim() and a.dtype == b.dtype == c.dtype
        ):
            raise NoRegion(f"{what} returns other kinds of tensors for other data")
        found = infer_spec((a, b), (SMALL, LARGE))
        if not isinstance(found, TensorSpec) or tuple(c.shape) != found.at(SMALL) or tuple(b.shape) != found.at(LARGE):
            shapes = f"{tuple(a.shape)} for {SMALL} examples and {tuple(b.shape)} for {LARGE}"
            raise NoRegion(f"{what} returns a tensor of shape {shapes}, which has not one batch dimension")
        return found

    return spec(small.output, large.output, other.output)


def _kept(path: str, known: set[int], *calls: _Call) -> dict[str, bool]:
    """The tensors that calls keep for the next one: parameters without gradient, and what they make of the batch.

    With whether their size is that of all calls.
    Raises NoRegion for one that writes into its inputs or reads parameters of other modules, Never for one that writes
    into a parameter that trains.
    """
    norms = {
        f"{name}.{key}".lstrip(".")
        for name, module in calls[0].module.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        for key in ("running_mean", "running_var", "num_batches_tracked")
    }
    parameters, kept = dict(calls[0].module.named_parameters()), dict[str, bool]()
    for call in calls:
        if call.wrote:
            raise NoRegion(f"{path} writes into its input")
        others = known - set(map(id, call.module.parameters()))
        if any(id(leaf) in others for leaf in _leaves(call.output)):
            raise NoRegion(f"{path} reads parameters of other modules")
        for name, value in call.changed.items():
            first = None if name in parameters else calls[0].changed.get(name)
            if name not in norms and (first is None or not torch.equal(first, value)):
                sizes = {each.changed[name].shape for each in calls if name in each.changed}
                kept[f"{path}.{name}".lstrip(".")] = len(sizes) == 1
            if name in parameters and parameters[name].requires_grad:
                raise Never(writes_text(type(calls[0].module).__name__, f"{path}.{name}".lstrip(".")))
    return kept


def _leaves(output: Any) -> list[Tensor]:
    """The leaf tensors that require a gradient, on which an output depends."""
    first: list[Any] = [tensor.grad_fn for _, tensor in tensors(output)]
    seen = reached(first, lambda function: [before for before, _ in function.next_functions] if function else [])
    return [function.variable for function in seen if hasattr(function, "variable")]


def _seen(small: Tensor, large: Tensor) -> Layout:
    spec = infer_spec((small, large), (SMALL, LARGE)) if small.dim() == large.dim() else None
    known = spec if isinstance(spec, TensorSpec) else TensorSpec((), small.dtype, None)  # which it does not fit
    return Layout(known.batch_dim, known.rows, shape=known.shape)
