"""Compile small models for tests: one call, a cluster that is not measured, and plans that tests edit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import splitc.passes.analysis
from splitc.capture.capture import capture
from splitc.capture.example.example import Example
from splitc.capture.validate.python_state import python_state
from splitc.compiled import CompiledProgram
from splitc.cost_models.compute.cost_cache import graph_text
from splitc.cost_models.compute.counting import OpCounter
from splitc.ir.graph import copy_graph, is_region
from splitc.ir.program import LoweredProgram, Program
from splitc.ir.schedule.actions import Action, RankProgram
from splitc.passes.planner.strategy import Strategy
from splitc.specialise import Settings, specialise

CLUSTER = "v100-10gbe"


def compiled(
    model: nn.Module,
    example: Any,
    target: Any,
    loss: Any,
    world: int,
    strategy: str | Strategy = "auto",
    *,
    analysed: Program | None = None,
    **options: Any,
) -> CompiledProgram:
    """`splitc.compile` on a cluster by name; `analysed` saves capturing a model again for another plan."""
    settings = Settings(world, strategy=strategy, **{"cluster": CLUSTER, **options})
    bound = Example.bind(model, example, target, loss)
    program = analysed or _known(model, bound, settings.autocast)
    key = id(program), repr(settings)
    if key not in _LOWERED:
        if len(_LOWERED) == 128:
            _LOWERED.clear()
        _LOWERED[key] = program, specialise(program, settings)
    return CompiledProgram(_copied(_LOWERED[key][1]), model, bound, settings)


_LOWERED: dict[tuple[int, str], tuple[Program, LoweredProgram]] = {}
"""A program, which keeps its id, and settings -> what it was lowered to."""


def _copied(program: LoweredProgram) -> LoweredProgram:
    """The program with graphs of its own, which a test may edit."""
    parts: dict[str, Any] = {
        name: _copied(part)
        for name in ("evaluation", "outputs")
        if isinstance(part := getattr(program, name), LoweredProgram)
    }
    stages = tuple(replace(stage, graph=copy_graph(stage.graph)[0]) for stage in program.stages)
    return replace(program, graph=copy_graph(program.graph)[0], stages=stages, **parts)


def analyse(model: nn.Module, example: Any, target: Any = None, loss: Any = None, **options: Any) -> Program:
    """`splitc.passes.analysis.analyse` of a batch as users give it."""
    return splitc.passes.analysis.analyse(model, Example.bind(model, example, target, loss), **options)


def analysed(model: nn.Module, example: Any, target: Any = None, loss: Any = None) -> Program:
    """`analyse`, once for all models of the same code and shapes: for programs whose graphs are not edited in place."""
    return _known(model, Example.bind(model, example, target, loss), None)


def _known(model: nn.Module, example: Example, autocast: torch.dtype | None) -> Program:
    """The program of a model; it is validated once for all models of the same code, trace and state."""
    state = repr(python_state(model, example.loss))
    key: tuple[object, ...] | None = _code(model, example)
    if key is None:
        text = graph_text(capture(model, example, None, autocast, None, OpCounter))
        loss = getattr(example.loss, "__code__", example.loss)
        key = None if text is None else (*map(type, model.modules()), loss, text)
    if key is None or (*key, state, autocast) not in _PROGRAMS:
        program = splitc.passes.analysis.analyse(model, example, autocast=autocast)
        if key is None or any(map(is_region, program.graph.nodes)):
            return program
        if len(_PROGRAMS) == 32:
            _PROGRAMS.clear()
        _PROGRAMS[*key, state, autocast] = program
    return _PROGRAMS[*key, state, autocast]


_PROGRAMS: dict[tuple[object, ...], Program] = {}
"""Code, trace where it is needed, and Python state of a model and its loss -> its program."""


def _code(model: nn.Module, example: Example) -> tuple[object, ...] | None:
    """What decides about the trace of a model beside its Python state; None where its objects may hold more code."""
    given, form = pytree.tree_flatten((example.inputs, example.targets))
    held: list[object] = [*given, *(() if isinstance(example.loss, nn.Module) else (example.loss,))]
    parts: list[object] = [repr(form), example.positional, example.is_said, tuple(example.batch_dims.items())]
    numbers: dict[int, int] = {}  # of tensors that modules share
    for root in (model, example.loss):
        for path, module in root.named_modules(remove_duplicate=False) if isinstance(root, nn.Module) else ():
            tensors = {**module._parameters, **module._buffers}
            parts += [path, type(module), _form(type(module).forward), *tensors]
            parts += [numbers.setdefault(id(tensor), len(numbers)) for tensor in tensors.values()]
            parts += [repr(mask) for mask in module._buffers.values() if mask is not None and not _is_float(mask)]
            held += [value for name, value in vars(module).items() if name not in _OF_MODULES]
            held += tensors.values()
    if example.division is not None or not all(map(_is_plain, held)):
        return None
    return *parts, *map(_form, held)


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_OF_MODULES = ("_parameters", "_buffers", "_modules")


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_plain(value: object) -> bool:
    """Whether its form and Python state tell all that a value does."""
    if isinstance(value, Tensor):
        return value.layout is torch.strided
    if isinstance(value, FunctionType):
        return not value.__closure__ and not value.__kwdefaults__
    if isinstance(value, (list, tuple, set, Mapping)):
        return all(isinstance(each, _PLAIN) for each in (value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, (*_PLAIN, BuiltinFunctionType))


def _form(value: object) -> object:
    """What a key has of a value: of a tensor all but its numbers, of a function its code, of a container its type."""
    if isinstance(value, Tensor):
        return type(value), value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if isinstance(value, (list, set, Mapping)):
        return type(value)
    return type(value), getattr(value, "__code__", value)


def with_files(program: CompiledProgram, **edits: tuple[str, str]) -> CompiledProgram:
    """The program with text replaced in its generated role files: `conv=("old", "new")`."""
    files = dict(program.files)
    for role, (old, new) in edits.items():
        assert old in files[f"{role}.py"], f"{old!r} is not in {role}.py"
        files[f"{role}.py"] = files[f"{role}.py"].replace(old, new)
    program.__dict__["files"] = files
    return program


def with_actions(program: LoweredProgram, **actions: list[Action]) -> LoweredProgram:
    """The program with other action lists of its parts: `fc=[...]`."""

    def edited(part: RankProgram) -> RankProgram:
        return replace(part, actions=tuple(actions[part.name])) if part.name in actions else part

    assert actions.keys() <= {part.name for part in program.rank_programs}
    return replace(program, rank_programs=tuple(map(edited, program.rank_programs)))


def actions_of(program: LoweredProgram, name: str) -> list[Action]:
    """The action list of a part."""
    return list(next(part for part in program.rank_programs if part.name == name).actions)


def class_batch(
    shape: tuple[int, ...], classes: int = 10, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """A random batch and class numbers for it."""
    return torch.randn(shape, dtype=dtype), torch.randint(0, classes, shape[:1])
