"""Rewrite operations that contain a dropout, so that the dropout becomes a node.

splitc seeds every dropout by its examples, not by its rank, so the dropout must be in the graph:

    scaled_dot_product_attention(q, k, v, dropout_p=0.1)  ->  dropout(softmax(q @ k.T / sqrt(d)), 0.1) @ v
    x.new_empty(n, 1).bernoulli_(0.9)                     ->  dropout(ones(n, 1), 0.1) * 0.9

`without_dropout` runs the same calls with dropout off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from splitc.capture.calls import Call
from splitc.capture.refusals import Unsupported
from splitc.ir.elementwise import DROPOUTS

_ATTENTION = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}
"""Attention functions -> the position of `dropout_p`."""


def has_inner_dropout(call: Call) -> bool:
    """Whether `with_explicit_dropout` rewrites the call."""
    if call.op == "call_method":
        return bool(call.target == "bernoulli_")
    if call.op != "call_function" or call.target not in _ATTENTION:
        return False
    position = _ATTENTION[call.target]
    p = call.args[position] if len(call.args) > position else call.kwargs.get("dropout_p", 0.0)
    return bool(p) and call.kwargs.get("training", True) is True


def with_explicit_dropout(call: Call) -> Any:
    """Compute the same by operations that are recorded one by one."""
    if call.target == "bernoulli_":
        return _bernoulli(*call.args, **call.kwargs)
    if call.target is F.scaled_dot_product_attention:
        return _attention(*call.args, **call.kwargs)
    with mock.patch.object(F, "has_torch_function", lambda arguments: False):  # trace through its Python
        return call.target(*call.args, **call.kwargs)


def without_dropout(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run the call with dropout off: dropout is the identity, a random mask has its expected value."""
    if function in DROPOUTS:
        return args[0] if args else kwargs["input"]
    if function is torch.Tensor.bernoulli_:
        return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
    if function in _ATTENTION:
        position = _ATTENTION[function]
        args = (*args[:position], 0.0, *args[position + 1 :]) if len(args) > position else args
        kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
    return function(*args, **kwargs)


def _bernoulli(tensor: torch.Tensor, p: Any = 0.5, generator: torch.Generator | None = None) -> torch.Tensor:
    if not isinstance(p, (int, float)) or type(tensor.shape) is torch.Size or generator is not None:
        raise Unsupported(
            "bernoulli_ is traced for a plain probability and one row for each example, without a generator of its "
            "own; use F.dropout"
        )
    return tensor.copy_(F.dropout(torch.ones_like(tensor), 1 - p) * p)


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
