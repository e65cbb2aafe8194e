"""Regions: modules of a build that run the user's own code, out of the user's own model."""

from __future__ import annotations

import copy
import functools
import importlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from .errors import LaunchError
from .nested import Path, replaced, tensors


class OwnModel(nn.Module):
    """A stage that is a user's whole model: `own`, whose tensors it has under their own names."""

    own: nn.Module

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.__dict__["own"] = model

    @property
    def training(self) -> bool:
        """The user's flag: it is set without `train`, too."""
        return "own" in self.__dict__ and self.own.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "own" in self.__dict__:
            self.own.training = mode

    def train(self, mode: bool = True) -> OwnModel:
        self.own.train(mode)
        return self


class OwnFunction(nn.Module):
    """A user's function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def own_model(origin: Any) -> nn.Module:
    """A user's model, ready for its weights: all of its tensors are empty.

    origin: "module:name" of the model, or of a class or function without arguments that makes it; or the model itself,
    of which a copy is taken.  Plain tensor attributes become buffers, so that they are filled like these.
    Raises LaunchError when `origin` cannot be imported.
    """
    found = _imported(origin) if isinstance(origin, str) else origin
    model: nn.Module = _copied(found) if isinstance(found, nn.Module) else found()
    adopt_plain_tensors(model)
    return model


def own_module(
    model: nn.Module, path: str = "", evaluating: Sequence[str] = (), differentiates: bool = False
) -> nn.Module:
    """The submodule `path` of a user's model.

    evaluating: submodules that stay in evaluation mode in training.  differentiates: its forward takes gradients, and
    so may in evaluation.
    """
    module: nn.Module = model.get_submodule(path)
    if differentiates:
        module.forward = functools.partial(_with_gradients, module.forward)
    module.train = types.MethodType(functools.partial(_train, evaluating=tuple(evaluating)), module)  # type: ignore[method-assign]
    return module


def own_function(origin: Any) -> OwnFunction:
    """A user's function, or "module:name" of one, as a module.  Raises LaunchError when it cannot be imported."""
    return OwnFunction(_imported(origin) if isinstance(origin, str) else origin)


def has_own_buffers(stage: nn.Module) -> bool:
    """Whether modules of a stage that run the user's own code have buffers, which they may write."""
    own = (each for each in stage.modules() if isinstance(each, OwnModel) or "train" in vars(each))  # by `own_module`
    return any(True for each in own for _ in each.buffers())


def _imported(origin: str) -> Any:
    file, _, name = origin.partition(":")
    try:
        return attrgetter(name)(importlib.import_module(file))  # a file of any name, which `resolve_name` does not take
    except Exception as error:
        raise LaunchError(
            f"this build runs the user's own code, {origin}, which cannot be imported here "
            f"({type(error).__name__}: {error}); put the folder of {file.partition('.')[0]} into PYTHONPATH"
        ) from error


def adopt_plain_tensors(module: nn.Module, made: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
    """Turn plain tensor attributes into buffers that no state_dict has.  made: gives the buffer of a tensor."""
    for path, value in plain_tensors(module).items():
        owner, _, name = path.rpartition(".")
        each = module.get_submodule(owner)
        delattr(each, name)
        each.register_buffer(name, made(value), persistent=False)


def plain_tensors(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """The tensors that are plain attributes of modules, by name."""
    attributes = (
        ((path, name), value) for path, m in module.named_modules(prefix=prefix) for name, value in vars(m).items()
    )
    return {".".join(filter(None, path)): value for path, value in attributes if isinstance(value, Tensor)}


def _copied(origin: nn.Module) -> nn.Module:
    """A copy whose tensors are empty."""
    memo: dict[int, Any] = {}
    for tensor in (*origin.parameters(), *origin.buffers(), *plain_tensors(origin).values()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(origin, memo)


def _with_gradients(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.enable_grad():
        made = forward(*args, **kwargs)
    return made if torch.is_grad_enabled() else replaced(made, {path: t.detach() for path, t in tensors(made)})


def _train(module: nn.Module, mode: bool = True, *, evaluating: Sequence[str] = ()) -> nn.Module:
    type(module).train(module, mode)
    for path in evaluating:
        module.get_submodule(path).training = False
    return module


@contextmanager
def with_copies(module: nn.Module, copies: dict[int, Tensor] | None) -> Iterator[None]:
    """Let a region read and write copies of its buffers, but for those of normalisations; None: its own buffers.

    copies: `id` of a buffer -> its copy, as earlier calls left it.
    """
    swapped = [] if copies is None else [(held, name, held[name]) for held, name in _counters(module)]
    for held, name, own in swapped:
        held[name] = copies.setdefault(id(own), own.detach().clone())  # type: ignore[union-attr]
    try:
        yield
    finally:
        for held, name, own in swapped:
            copies[id(own)], held[name] = held[name], own  # type: ignore[index]


def _counters(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where a region has the buffers that all ranks write alike."""
    owners = (each for each in module.modules() if not isinstance(each, nn.modules.batchnorm._NormBase))
    return [(each._buffers, name) for each in owners for name, tensor in each._buffers.items() if tensor is not None]


def of_no_examples(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What a region returns on a rank without examples: tensors without any, and gradients of zero.

    Python on data rarely expects none: a copy of the module runs on one and on two examples of zeros, and the dims in
    which its results differ are without examples; the first ones, where numbers in the data say how many there are.
    Buffers that count calls count this one.
    """
    given, copied = list(tensors((args, kwargs))), copy.deepcopy(module)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        second = _ran(copy.deepcopy(module), (args, kwargs), 2)
        first = _ran(copied, (args, kwargs), 1)
        for (held, name), (other, _) in zip(_counters(module), _counters(copied), strict=True):
            held[name].copy_(other[name])
    sources = [*(tensor for _, tensor in given), *module.parameters()]
    anchor = sum((source.sum() * 0.0 for source in sources if source.requires_grad), torch.zeros(()))
    sizes = {path: tensor.shape for path, tensor in tensors(second)}
    alike = all(tensor.shape == sizes[path] for path, tensor in tensors(first))

    def without(path: Path, tensor: Tensor) -> Tensor:
        both = enumerate(zip(tensor.shape, sizes[path], strict=True))
        made = tensor.new_zeros([0 if n != m or (alike and d == 0) else n for d, (n, m) in both])
        return made + anchor.to(made) if made.is_floating_point() or made.is_complex() else made

    return replaced(first, {path: without(path, tensor) for path, tensor in tensors(first)})


def _ran(module: nn.Module, given: tuple[Any, Any], number: int) -> Any:
    """What a module returns for as many examples of zeros."""
    made = {path: tensor.new_zeros([n or number for n in tensor.shape]) for path, tensor in tensors(given)}
    args, kwargs = replaced(given, made)
    return module(*args, **kwargs)
