"""BatchNorm over the examples of several ranks: one process's values, gradients and running statistics."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.runtime.collectives import sync_batch_norm
from splitc.runtime.collectives.model_parallel import Group
from tests.runtime.collectives.test_model_parallel import on_group, own_of, random
from tests.support.norm_kernels import kernels_on_the_cpu
from tests.support.ranks import on_ranks
from tests.support.sampling import along, in_one

C = 3


@pytest.fixture(autouse=True, params=[False, True], ids=["by sums", "by kernels"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test here is of both ways."""
    with kernels_on_the_cpu() if request.param else nullcontext():
        yield


NEITHER: list[Tensor | None] = [None, None]  # weight and bias


def statistics(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return random(8, C, dtype=dtype), random(9, C, dtype=dtype).square() + 0.5


def batch_norm(
    group: Group,
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """As `F.batch_norm`, by a module that holds these tensors."""
    module = nn.BatchNorm1d(C, eps, momentum, affine=False, track_running_stats=False).train(training)
    module._buffers.update(running_mean=mean, running_var=var)
    module.__dict__["_parameters"] = {"weight": weight, "bias": bias}
    return sync_batch_norm.batch_norm(group, x, module)


def close(ours: Any, theirs: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@in_one
@along(rows=[(2, 2), (1, 4, 2), (3, 0, 1), (0, 0, 5), (1, 1)], space=[(), (4,), (2, 5)], affine=[True, False])
def test_values_gradients_and_running_statistics_are_those_of_one_process(
    rows: tuple[int, ...], space: tuple[int, ...], affine: bool
) -> None:
    x, y_grad = random(1, sum(rows), C, *space) * 3 + 2, random(2, sum(rows), C, *space)
    weights = [random(3, C), random(4, C)] if affine else []
    mean, var = statistics()
    leaves = [t.clone().requires_grad_() for t in (x, *weights)]
    weight, bias = leaves[1:] or NEITHER
    y = F.batch_norm(leaves[0], mean, var, weight, bias, True, 0.3, 1e-4)
    d_x, *expected = torch.autograd.grad(y, leaves, y_grad)

    def member(group: Group) -> list[Tensor]:
        own_mean, own_var = statistics()
        parts = [part.clone().requires_grad_() for part in (own_of(x, rows, group.index, 0), *weights)]
        weight, bias = parts[1:] or NEITHER
        ours = batch_norm(group, parts[0], own_mean, own_var, weight, bias, True, 0.3, 1e-4)
        close(ours, own_of(y, rows, group.index, 0))
        close([own_mean, own_var], [mean, var])
        own_d_x, *gradients = torch.autograd.grad(ours, parts, own_of(y_grad, rows, group.index, 0))
        close(own_d_x, own_of(d_x, rows, group.index, 0), 1e-11)
        n = group.size
        has_kernels = sync_batch_norm.has_kernels(x)
        forward = (n - 1) * 8 * (2 * C + 1) if has_kernels else 2 * (n - 1) * 8 * (2 * C + 1) // n
        assert group.transport.sent_bytes == forward + 2 * (n - 1) * 8 * 2 * C // n
        return [own_mean, own_var, *gradients]

    seen = on_group(len(rows), member)
    for others in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0][:2], others[:2], strict=True))
    for k, gradient in enumerate(expected):
        close(sum(result[2 + k] for result in seen), gradient, 1e-11)


def test_a_small_variance_round_a_large_mean_survives_in_float32() -> None:
    x = (random(1, 8, C) + 3000.0).float()
    expected = F.batch_norm(x.double(), None, None, training=True)

    def member(group: Group) -> None:
        close(batch_norm(group, x.split(4)[group.index], None, None, training=True).double(),
              expected.split(4)[group.index], 1e-3)  # fmt: skip

    on_group(2, member)


@in_one
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_with_parameters_of_either(dtype: torch.dtype) -> None:
    x, y_grad = random(1, 8, C, 4, dtype=dtype), random(2, 8, C, 4, dtype=dtype)
    weight, bias = random(3, C).float(), random(4, C).float()
    mean, var = statistics(torch.float32)
    leaves = [t.clone().requires_grad_() for t in (x.float(), weight, bias)]
    y = F.batch_norm(leaves[0], mean, var, leaves[1], leaves[2], training=True)
    d_x, *_ = torch.autograd.grad(y, leaves, y_grad.float())

    def member(group: Group) -> None:
        for parameters in (torch.float32, dtype):
            own_mean, own_var = statistics(torch.float32)
            parts = [x.split(4)[group.index], weight.to(parameters), bias.to(parameters)]
            parts = [part.clone().requires_grad_() for part in parts]
            ours = batch_norm(group, parts[0], own_mean, own_var, parts[1], parts[2], training=True)
            gradients = torch.autograd.grad(ours, parts, y_grad.split(4)[group.index])
            assert [ours.dtype] + [g.dtype for g in gradients] == [dtype, dtype, parameters, parameters]
            close(ours.float(), y.split(4)[group.index], 4e-2)
            close(gradients[0].float(), d_x.split(4)[group.index], 4e-2)
            close([own_mean, own_var], [mean, var], 1e-5)

    on_group(2, member)


@in_one
@pytest.mark.parametrize("form", [torch.channels_last, torch.contiguous_format, None])
def test_the_result_and_its_gradient_lie_as_the_input_does(form: torch.memory_format | None) -> None:
    def member(group: Group) -> None:
        x = random(1, 4, C, 5, 2)
        x = (x.transpose(2, 3) if form is None else x.contiguous(memory_format=form)).requires_grad_()
        mean, var = (each.bfloat16() for each in statistics())
        y = batch_norm(group, x, mean, var, training=True)
        (d_x,) = torch.autograd.grad(y.square().sum(), x)
        close((mean, var), tuple(each.bfloat16() for each in statistics()), 0.9)
        assert mean.dtype == torch.bfloat16 and not torch.equal(mean, statistics()[0].bfloat16())
        if form is not None:
            assert y.is_contiguous(memory_format=form) and d_x.is_contiguous(memory_format=form)

    on_group(2, member)


@pytest.mark.parametrize("rows", [(1, 0), (0, 1)])
def test_one_value_of_all_members_is_refused_on_every_one(rows: tuple[int, ...]) -> None:
    def member(group: Group) -> None:
        with pytest.raises(ValueError, match=r"BatchNorm of \([01], 3\) float64 in training needs more than one value"):
            batch_norm(group, own_of(random(1, 1, C), rows, group.index, 0), None, None, training=True)

    on_group(2, member)


def test_an_input_without_gradient_sends_nothing_in_backward() -> None:
    def member(group: Group) -> None:
        weight = torch.ones(C).double().requires_grad_()
        y = batch_norm(group, random(group.index, 4, C), None, None, weight, training=True)
        sent = group.transport.sent_bytes
        y.square().sum().backward()
        assert group.transport.sent_bytes == sent > 0

    on_group(2, member)


def test_evaluation_and_a_group_of_one_are_plain_batch_norm() -> None:
    x = random(1, 4, C)

    def member(group: Group) -> None:
        assert torch.equal(batch_norm(group, x, *statistics()), F.batch_norm(x, *statistics()))
        assert group.transport.sent_bytes == 0

    on_group(2, member)

    def alone(transport: Any) -> None:
        ours, theirs = statistics(), statistics()
        y = batch_norm(Group(transport, (0,)), x, *ours, training=True)
        assert torch.equal(y, F.batch_norm(x, *theirs, training=True))
        assert torch.equal(ours[1], theirs[1])

    on_ranks(1, alone)
