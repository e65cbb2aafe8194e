"""In which order the numbers of a tensor lie in memory: contiguous, or channels last where the user's model has that.

Convolutions on tensor cores want `torch.channels_last`.  Parameters keep it, and so do their gradients, which travel
flat: all ranks must lay a tensor alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_CHANNELS_LAST = torch.channels_last, torch.channels_last_3d


def dense(x: Tensor) -> Tensor:
    """`x`, where it is channels last, else contiguous."""
    return x if any(x.is_contiguous(memory_format=each) for each in _CHANNELS_LAST) else x.contiguous()


def formats(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """What ranks are to have alike of tensors, or of parts of them, that may be channels last."""
    found = {name: x.stride(1) == 1 for name, x in tensors.items() if x.dim() in (4, 5)}
    return {f"the memory format of {name}": "channels last" if yes else "contiguous" for name, yes in found.items()}


def flat(x: Tensor, like: Tensor) -> Tensor:
    """The numbers of `x` in the order in which those of `like` lie; a view where they lie so too."""
    return (x if like.is_contiguous() else x.permute(_outermost_first(like))).reshape(-1)


def shaped(numbers: Tensor, like: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """A view of `flat` numbers in the order of `like`, with its shape or another one."""
    if like.is_contiguous():
        return numbers.view_as(like) if shape is None else numbers.view(shape)
    order, shape = _outermost_first(like), like.shape if shape is None else shape
    return numbers.view([shape[d] for d in order]).permute([order.index(d) for d in range(like.dim())])


def _outermost_first(x: Tensor) -> list[int]:
    return sorted(range(x.dim()), key=x.stride, reverse=True)
