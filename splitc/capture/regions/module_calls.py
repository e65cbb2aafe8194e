"""Stand in the way of the calls of some modules, and undo what they write."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


@contextmanager
def intercepted(
    modules: Container[nn.Module], run: Callable[[nn.Module, Callable[..., Any], Any, Any], Any]
) -> Iterator[None]:
    """Let `run(module, call, args, kwargs)` make the calls of some modules, their hooks included."""
    call = nn.Module.__call__

    def replaced(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = partial(call, module)
        return run(module, own, args, kwargs) if module in modules else own(*args, **kwargs)

    with mock.patch.object(nn.Module, "__call__", replaced):
        yield


@contextmanager
def unchanged(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore tensors afterwards, which calls may change."""
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, was in before:
            if not torch.equal(tensor, was):  # else it may be an expanded one, which nothing can be written into
                tensor.data.copy_(was)  # backward may still read it
