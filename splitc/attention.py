"""Attention with dropout, written out so that the mask of its dropout is an operation of its own.

`scaled_dot_product_attention` draws its mask inside; splitc gives every dropout a mask that depends on the examples and
not on the rank, so it must see it.  Without dropout the function stays one operation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F


def drops_inside(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the call is attention with a dropout of its own."""
    if function is F.scaled_dot_product_attention:
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    if function is F.multi_head_attention_forward:
        return bool(args[10] if len(args) > 10 else kwargs["dropout_p"]) and kwargs.get("training", True) is True
    return False


def written_out(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The same computation in operations of which each is recorded."""
    if function is F.scaled_dot_product_attention:
        return _attention(*args, **kwargs)
    with mock.patch.object(F, "has_torch_function", lambda arguments: False):  # run its Python instead of recording it
        return function(*args, **kwargs)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return F.dropout(F.softmax(scores, dim=-1), dropout_p) @ value
