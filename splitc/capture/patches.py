"""Lead what the user's forward does to the tracer: calls of modules, parameters, torch functions, tensor factories."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from splitc.capture.proxy import is_proxy, leaves
from splitc.capture.refusals import Unsupported, hook_text
from splitc.capture.tracer import Tracer, identifier

_FACTORIES = (
    "arange",
    "as_tensor",
    "bartlett_window",
    "blackman_window",
    "empty",
    "eye",
    "full",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
)
_TENSORS = ("H", "T", "data", "grad", "imag", "mH", "mT", "real")  # attributes that are tensors themselves


@contextmanager
def intercepted(tracer: Tracer, paths: Mapping[nn.Module, str], leaf_paths: set[str]) -> Iterator[None]:
    """While this holds, `tracer` records.  paths: the model's modules; those of `leaf_paths` stay one node each."""
    call, get, put = nn.Module.__call__, nn.Module.__getattr__, nn.Module.__setattr__
    evaluator = tracer.evaluator

    def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(module)
        if evaluator.busy or path is None:
            return call(module, *args, **kwargs)
        if path in leaf_paths:
            return tracer.record("call_module", path, args, kwargs, name=identifier(path, module))
        tracer.modules.append((path, module))
        try:
            return call(module, *args, **kwargs)
        finally:
            tracer.modules.pop()

    def module_getattr(module: nn.Module, name: str) -> Any:
        value = get(module, name)
        return tracer.attribute_of(value) if isinstance(value, torch.Tensor) and not evaluator.busy else value

    def module_setattr(module: nn.Module, name: str, value: Any) -> None:
        held = {**module._parameters, **module._buffers}.get(name)
        if held is not None and not evaluator.busy:
            if tracer.attribute_of(held) is value:
                return  # `self.steps += 1` has counted already
            raise tracer.refused(
                Unsupported(
                    f"assigns to {name} of {type(module).__name__} while the model runs: ranks see different "
                    f"parts of the batch, so their copies would differ; use a plain attribute for what "
                    f"forward computes anew, or change it outside of forward"
                )
            )
        put(module, name, value)

    def autograd_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is checkpoint.CheckpointFunction:
            function, _, *inputs = args
            return function(*inputs)
        raise tracer.refused(
            Unsupported(
                f"the custom autograd function {cls.__name__} has a backward that a traced graph would lose; write it "
                f"with torch operations, or with .detach() (straight-through: x + (f(x) - x).detach())"
            )
        )

    def gradient(*args: Any, **kwargs: Any) -> Any:
        raise tracer.refused(Unsupported(hook_text("torch.autograd.grad")))

    def transform(*args: Any, **kwargs: Any) -> Any:
        raise tracer.refused(
            Unsupported("torch.vmap and torch.func are not traced; write it with operations over the whole batch")
        )

    def scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
        raise tracer.refused(
            Unsupported(
                f"{getattr(function, 'name', 'a function')} is compiled by torch.jit.script and cannot be traced; "
                f"use the Python function it was made from"
            )
        )

    def factory(function: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            if evaluator.busy or any(
                type(value).__module__ == "numpy" for value in leaves((args, kwargs)) if not is_proxy(value)
            ):
                return function(*args, **kwargs)
            return tracer.record("call_function", function, args, kwargs)

        return made

    with ExitStack() as stack:

        def patch(place: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(place, name, value))

        patch(nn.Module, "__call__", module_call)
        patch(nn.Module, "__getattr__", module_getattr)
        patch(nn.Module, "__setattr__", module_setattr)
        patch(torch.autograd.Function, "apply", classmethod(autograd_function))
        patch(torch.autograd, "grad", gradient)
        patch(torch, "vmap", transform)
        patch(torch.compiler, "is_compiling", lambda: not evaluator.busy)  # libraries then leave out looks at the data
        for name in ("grad", "grad_and_value", "jacfwd", "jacrev", "jvp", "vjp", "vmap"):
            patch(torch.func, name, transform)
        patch(
            checkpoint, "_checkpoint_without_reentrant_generator", lambda *args, **kwargs: iter((None,))
        )  # traced through
        patch(torch.jit.ScriptFunction, "__call__", scripted)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # what the user compiled runs as its Python
        for name in _FACTORIES:
            patch(torch, name, factory(getattr(torch, name)))
        stack.enter_context(_Mode(tracer))
        yield


class _Mode(TorchFunctionMode):
    """Catches torch calls on tensors that are no proxies, such as parameters reached by iteration."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_plain_attribute = getattr(func, "__name__", "") == "__get__" and func.__self__.__name__ not in _TENSORS
        if self._tracer.evaluator.busy or is_plain_attribute:
            return func(*args, **(kwargs or {}))
        return self._tracer.torch_call(func, args, kwargs or {})
