"""What is computed while transfers travel: the gradients of weights, later, and the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from splitc.runtime.collectives.deferred_gradients import DeferredGradients
from tests.support.sampling import along, in_one


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]


@in_one
@along(
    shape=[(6, 5), (3, 2, 5), (2, 3, 2, 5), (0, 5), (5,)],
    with_bias=[True, False],
    dtype=[torch.float64, torch.float64, torch.float32],
)
def test_value_and_gradients_are_those_of_a_linear_layer(
    shape: tuple[int, ...], with_bias: bool, dtype: torch.dtype
) -> None:
    x, weight, bias = tensors(shape, (4, 5), (4,), dtype=dtype)
    given = (x, weight, bias) if with_bias else (x, weight)
    expected = F.linear(*given)
    error = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, given, error)
    deferred = DeferredGradients()
    value = deferred.linear(*given)
    value.backward(error)
    torch.testing.assert_close(x.grad, gradients[0])
    assert x.dim() == 1 or (weight.grad is None and bias.grad is None), "which are computed later"
    deferred.finish()
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close([p.grad for p in given[1:]], list(gradients[1:]))


@in_one
@pytest.mark.parametrize("shape", [(6, 5), (3, 2, 5)])
def test_a_rank_may_have_no_features(shape: tuple[int, ...]) -> None:
    x, weight, bias = tensors(shape, (0, 5), (0,))
    deferred = DeferredGradients()
    value = deferred.linear(x, weight, bias)
    value.sum().backward()
    deferred.finish()
    assert value.shape == (*shape[:-1], 0)
    assert torch.equal(x.grad, torch.zeros_like(x))  # type: ignore[arg-type]


def test_gradients_of_several_uses_add_up() -> None:
    x, weight = tensors((6, 5), (5, 5))
    expected = torch.autograd.grad(F.linear(F.linear(x, weight), weight).sum(), [x, weight])
    deferred = DeferredGradients()
    deferred.linear(deferred.linear(x, weight), weight).sum().backward()
    deferred.finish()
    torch.testing.assert_close([x.grad, weight.grad], list(expected))


@in_one
@pytest.mark.parametrize("frozen", ["x", "weight", "bias"])
def test_where_a_gradient_is_not_needed_this_is_the_plain_layer(frozen: str) -> None:
    named = dict(zip(("x", "weight", "bias"), tensors((3, 2, 5), (4, 5), (4,)), strict=True))
    named[frozen].requires_grad_(False)
    others = [tensor for tensor in named.values() if tensor.requires_grad]
    deferred = DeferredGradients()
    gradients = torch.autograd.grad(deferred.linear(*named.values()).sum(), others)
    torch.testing.assert_close(gradients, torch.autograd.grad(F.linear(*named.values()).sum(), others))


def test_what_is_left_is_done_one_at_a_time_or_all_at_once() -> None:
    done: list[int] = []
    deferred = DeferredGradients()
    for k in range(4):
        deferred.later(lambda k=k: done.append(k))  # type: ignore[misc]
    deferred.one()
    assert done == [0]
    deferred.finish()
    deferred.one()
    assert done == [0, 1, 2, 3]


def test_the_error_of_rows_in_more_dims_is_not_copied_for_a_view() -> None:
    x, weight, bias = tensors((3, 2, 5), (4, 5), (4,))
    value = DeferredGradients().linear(x, weight, bias)
    assert value.shape == (3, 2, 4)
    steps, seen = [value.grad_fn], list[str]()
    for step in steps:
        seen += [] if step is None else [step.name()]
        steps += [] if step is None else [before for before, _ in step.next_functions]
    assert "_WatchErrorBackward" in seen and not {"CopySlices", "AsStridedBackward0"} & {*seen}, seen
