"""Patch torch so that a tracer records module calls, reads of parameters, torch functions and tensor factories."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from splitc.capture.refusals import Unsupported, hook_text
from splitc.capture.trace.attributes import identifier
from splitc.capture.trace.proxy import TracedTensor, is_proxy, leaves
from splitc.capture.trace.tracer import Tracer

DROPPING = (nn.modules.dropout._DropoutNd, nn.RNNBase)
"""Modules whose mode decides about dropout alone."""

_FACTORIES = (
    "arange", "as_tensor", "bartlett_window", "blackman_window", "empty", "eye", "full", "hamming_window",
    "hann_window", "kaiser_window", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm",
    "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
)  # fmt: skip
_TRANSFORM = "torch.vmap and torch.func are not traced; write it with operations over the whole batch"
_TENSORS = ("H", "T", "data", "grad", "imag", "mH", "mT", "real")  # attributes that are tensors themselves


@contextmanager
def recorded(tracer: Tracer, paths: Mapping[nn.Module, str], leaf_paths: set[str], compiling: bool) -> Iterator[None]:
    """Let `tracer` record what runs inside.

    paths: of the model's modules; those in `leaf_paths` are one node each.  compiling: what is_compiling() answers.
    """
    refused = partial(_refused, tracer)
    with ExitStack() as stack:
        for module in tracer.root.modules():  # which has its own again afterwards: what forward assigns is traced
            stack.enter_context(mock.patch.dict(vars(module)))
            stack.enter_context(mock.patch.dict(module._buffers))

        def patch(place: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(place, name, value))

        patch(nn.Module, "__call__", _module_call(tracer, paths, leaf_paths))
        patch(nn.Module, "__getattr__", _module_getattr(tracer))
        patch(nn.Module, "__setattr__", _module_setattr(tracer))
        stack.enter_context(mock.patch.object(nn.Module, "training", _training(tracer), create=True))
        patch(torch.autograd.Function.__base__, "apply", _autograd_function(tracer))  # which a kept Fn.apply calls too
        patch(torch.autograd, "grad", refused(hook_text("torch.autograd.grad")))
        patch(torch, "vmap", refused(_TRANSFORM))
        for name in ("grad", "grad_and_value", "jacfwd", "jacrev", "jvp", "vjp", "vmap"):
            patch(torch.func, name, refused(_TRANSFORM))
        patch(torch.jit.ScriptFunction, "__call__", _script_function(tracer))
        patch(builtins, "len", lambda x, real=len: x.size(0) if type(x) is TracedTensor else real(x))  # no plain int
        patch(torch.compiler, "_is_compiling_flag", compiling)  # which every spelling of the question reads
        patch(torch.distributions.Distribution, "_validate_args", False)  # a check of data, without an effect
        # checkpointed functions are traced through
        patch(checkpoint, "_checkpoint_without_reentrant_generator", lambda *args, **kwargs: iter((None,)))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # torch.compile'd code runs as its Python
        for name in _FACTORIES:
            patch(torch, name, _factory(tracer, getattr(torch, name)))
        stack.enter_context(_TorchFunctions(tracer))
        yield


def _refused(tracer: Tracer, text: str) -> Callable[..., Any]:
    """A function that raises a CaptureError with this text."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        tracer.refuse(text)

    return refuse


def _module_call(tracer: Tracer, paths: Mapping[nn.Module, str], leaf_paths: set[str]) -> Callable[..., Any]:
    call = nn.Module.__call__

    def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(module)
        if tracer.evaluator.busy or path is None:
            return call(module, *args, **kwargs)
        has_offsets = isinstance(module, nn.EmbeddingBag) and (len(args) > 1 or kwargs.get("offsets") is not None)
        if path in leaf_paths and not (has_offsets or _is_changed(tracer, module)):
            name = identifier(path, module) if path else type(tracer.original).__name__.lower()
            if kind := next((type(v).__name__ for v in (*args, *kwargs.values()) if hasattr(type(v), "_fields")), ""):
                tracer.refuse(f"{name} is given a {kind}, which a graph would make a plain tuple; give it a dict")
            return tracer.record("call_module", path, args, kwargs, name=name)
        with tracer.running(path, module):
            return call(module, *args, **kwargs)

    return module_call


def _is_changed(tracer: Tracer, module: nn.Module) -> bool:
    """Whether the user's code has written into a tensor of the module, which a node that calls it would not see."""
    tensors = (*module.parameters(), *module.buffers()) if tracer.writes.changing else ()
    return any(tracer.attributes.known(each) in tracer.writes.changing for each in tensors)


def _module_getattr(tracer: Tracer) -> Callable[..., Any]:
    get = nn.Module.__getattr__

    def module_getattr(module: nn.Module, name: str) -> Any:
        value = get(module, name)
        return tracer.attribute_of(value) if isinstance(value, torch.Tensor) and not tracer.evaluator.busy else value

    return module_getattr


def _module_setattr(tracer: Tracer) -> Callable[..., Any]:
    put = nn.Module.__setattr__

    def module_setattr(module: nn.Module, name: str, value: Any) -> None:
        held = {**module._parameters, **module._buffers}.get(name)
        if held is None or tracer.evaluator.busy:
            put(module, name, value)
        elif (proxy := tracer.attribute_of(held)) is not value:  # `self.steps += 1` has written into it already
            try:
                tracer.writes.assign(proxy, value)
            except Unsupported as error:
                raise tracer.refused(error) from None

    return module_setattr


def _training(tracer: Tracer) -> property:
    """The flag of a module, noting whether Python reads it other than for dropout, which evaluation leaves out."""

    def get(module: nn.Module) -> bool:
        if not tracer.evaluator.busy and not isinstance(module, DROPPING):
            tracer.reads_mode = True
        return bool(vars(module)["training"])

    return property(get, lambda module, value: vars(module).update(training=value))


def _autograd_function(tracer: Tracer) -> Any:
    base: Any = torch.autograd.Function.__base__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if tracer.evaluator.busy:
            return super(base, cls).apply(*args, **kwargs)
        if cls is checkpoint.CheckpointFunction:
            function, _, *inputs = args
            return function(*inputs)
        tracer.refuse(
            f"the custom autograd function {cls.__name__} has a backward that a traced graph would lose; write it "
            f"with torch operations, or with .detach() (straight-through: x + (f(x) - x).detach())"
        )

    return classmethod(apply)


def _script_function(tracer: Tracer) -> Callable[..., Any]:
    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        tracer.refuse(
            f"{getattr(function, 'name', 'a function')} is compiled by torch.jit.script and cannot be traced; use the "
            f"Python function it was made from"
        )

    return call


def _factory(tracer: Tracer, function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.zeros` and the like, recorded unless they are given numpy data."""

    def make(*args: Any, **kwargs: Any) -> Any:
        from_numpy = any(type(v).__module__ == "numpy" for v in leaves((args, kwargs)) if not is_proxy(v))
        if tracer.evaluator.busy or from_numpy:
            return function(*args, **kwargs)
        return tracer.record("call_function", function, args, kwargs)

    return make


class _TorchFunctions(TorchFunctionMode):
    """Records torch calls on tensors that are no proxies, such as parameters reached by iteration."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_plain_attribute = getattr(func, "__name__", "") == "__get__" and func.__self__.__name__ not in _TENSORS
        if self._tracer.evaluator.busy or is_plain_attribute:
            return func(*args, **(kwargs or {}))
        return self._tracer.torch_call(func, args, kwargs or {})
