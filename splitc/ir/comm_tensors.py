"""What a rank gives to the collectives of an operation, one tensor after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from splitc.ir.program import Spec, TensorSpec


@dataclass(frozen=True)
class Call:
    """An operation called by a rank: its value, what it is given, and the examples that these are of."""

    value: TensorSpec
    given: tuple[Spec, ...]
    options: Mapping[str, Any]
    examples: int
    backward: bool


Tensors = Iterator[tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of one tensor after the other."""


def own_value(call: Call) -> Tensors:
    yield call.value.at(call.examples), call.value.dtype


def statistics(call: Call) -> Tensors:
    """Sums of each channel, in forward with the number of values."""
    (value, *_), backward = call.given, call.backward
    assert isinstance(value, TensorSpec), value
    if value.requires_grad or not backward:
        yield (2 * call.value.shape[1] + (not backward),), _sum_dtype(call.value.dtype) if backward else torch.float64


def of_classes(call: Call) -> Tensors:
    """The largest logit of each row, then the sums."""
    logits, *target = call.given
    assert isinstance(logits, TensorSpec), call
    rows = math.prod(logits.at(call.examples)[:-1])
    if not call.options.get("features"):
        return
    for numbers in (1, 1 + bool(target) + bool(call.options.get("label_smoothing"))):
        yield (numbers, rows), _sum_dtype(logits.dtype)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that values of `dtype` are summed in."""
    return torch.float32 if dtype.itemsize < 4 else dtype
