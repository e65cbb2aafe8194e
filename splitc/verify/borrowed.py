"""Lend the user's own model to a training run, and give it back as it was.

A copy would not do: a loss that closes over the model (a penalty on its weights) reads the model, not the copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from splitc.ir.decode import Limit
from splitc.runtime.nested import tensors

Floating = Annotated[torch.dtype, Limit(lambda dtype: dtype.is_floating_point, "of floating-point numbers")]
_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}


@contextmanager
def borrowed(model: nn.Module, loss: Any, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Inside, model and loss hold copies of their tensors and attributes; afterwards the originals are back.

    dtype: of the copies of floating-point tensors; None: as they are.
    """
    modules = list({id(m): m for root in (model, loss) if isinstance(root, nn.Module) for m in root.modules()}.values())
    held = {id(t): t for m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))}
    before = [(tensor, tensor.data, tensor.grad) for tensor in held.values()]
    attributes = [(module, module.__dict__) for module in modules]
    memo: dict[int, Any] = {**held, **{id(module): module for module in modules}}
    try:
        for module, own in attributes:
            module.__dict__ = {name: _copy(value, memo, dtype) for name, value in own.items()}
        for tensor, data, _ in before:
            tensor.grad = None
            tensor.data = converted(data, dtype).clone()
        yield
    finally:
        for module, own in attributes:
            module.__dict__ = own
        for tensor, data, gradient in before:
            tensor.grad = None
            tensor.data = data
            tensor.grad = gradient


def converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A floating-point or complex tensor in the precision of `dtype`; any other as it is."""
    if dtype is not None and tensor.is_complex():
        return tensor.to(_COMPLEX.get(dtype, tensor.dtype))
    return tensor if dtype is None or not tensor.dtype.is_floating_point else tensor.to(dtype)


def _copy(value: Any, memo: dict[int, Any], dtype: torch.dtype | None) -> Any:
    for _, tensor in tensors(value):
        if type(tensor) is Tensor and tensor.is_leaf and id(tensor) not in memo:
            memo[id(tensor)] = converted(tensor.detach(), dtype).clone().requires_grad_(tensor.requires_grad)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, a file, a tensor with history: shared
        return value
