"""Recurrent functions of torch with dropout between their layers, one layer at a time.

    y, h, c = torch.lstm(x, (h0, c0), weights, True, 2, 0.1, ...)
->  y, h, c = torch.lstm(x, (h0[:1], c0[:1]), weights[:4], True, 1, 0.0, ...)
    y = draw.dropout(y, 0.1)
    y, g, d = torch.lstm(y, (h0[1:], c0[1:]), weights[4:], True, 1, 0.0, ...)
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def rate(args: tuple[Any, ...]) -> float:
    """The probability of dropout in the arguments of such a function."""
    found: float = args[5 + _is_packed(args)]
    return found


def layer_by_layer(name: str, draw: Any, *args: Any) -> Any:
    """(x, state, weights, biased, layers, p, trains, bidirectional, batch_first), or (x, batch_sizes, ...) if packed.

    Each layer is called as in training, whose dropout is the only difference to evaluation.
    """
    packed = _is_packed(args)
    x, sizes = args[0], args[1 : 1 + packed]
    given, weights, biased, layers, p, trains, bidirectional, *rest = args[1 + packed :]
    states = given if isinstance(given, (tuple, list)) else (given,)
    each, ways = len(weights) // layers, 2 if bidirectional else 1
    found: list[tuple[Any, ...]] = []
    for k in range(layers):
        if k and trains:
            x = x * _packed_mask(draw, x, sizes[0], p) if packed else draw.dropout(x, p, 0)
        first = tuple(state[k * ways : (k + 1) * ways] for state in states)
        state = first if isinstance(given, (tuple, list)) else first[0]
        own = list(weights[k * each : (k + 1) * each])
        x, *last = getattr(torch, name)(x, *sizes, state, own, biased, 1, 0.0, True, bidirectional, *rest)
        found.append(tuple(last))
    return x, *(torch.cat(parts) for parts in zip(*found, strict=True))


def _is_packed(args: tuple[Any, ...]) -> bool:
    return not isinstance(args[3], bool)


def _packed_mask(draw: Any, data: Tensor, sizes: Tensor, p: float) -> Tensor:
    """A dropout mask for packed sequences: that of padded ones, whose examples are in the order of the batch."""
    count = int(sizes[0])
    mask: Tensor = draw.dropout(data.new_ones(count, len(sizes), data.shape[-1]), p, 0)
    order = _order()
    mask = mask if order is None else mask.index_select(0, order)
    inside = torch.arange(count, device=data.device) < sizes.to(data.device).unsqueeze(1)
    return mask.transpose(0, 1)[inside]


def _order() -> Tensor | None:
    """The examples of the packed sequence that a module of torch is running on, as it was sorted by length."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"] != "torch.nn.modules.rnn":
        frame = frame.f_back
    found: Tensor | None = frame.f_locals.get("sorted_indices")
    return found
