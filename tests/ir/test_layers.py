"""Sizes of parameters and buffers, and which of them are trained."""

from __future__ import annotations

import torch

from splitc.ir.layers import StateTensor


def test_bytes_follow_the_shape_and_the_dtype() -> None:
    weight = StateTensor("w", (64, 9), torch.bfloat16, parameter=True)
    assert (weight.numel, weight.nbytes) == (576, 1152)
    scalar = StateTensor("count", (), torch.int64, parameter=False)
    assert (scalar.numel, scalar.nbytes) == (1, 8)


def test_a_parameter_without_elements_has_nothing_to_train() -> None:
    assert not StateTensor("w", (0, 4), torch.float32, parameter=True, requires_grad=True).trainable


def test_only_parameters_that_require_a_gradient_are_trainable() -> None:
    kinds = [(True, True), (True, False), (False, True), (False, False)]
    trained = [StateTensor("t", (1,), torch.float32, parameter, grad).trainable for parameter, grad in kinds]
    assert trained == [True, False, False, False]
