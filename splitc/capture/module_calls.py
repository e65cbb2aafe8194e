"""Stand in the way of the calls of some modules."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

from torch import nn


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
