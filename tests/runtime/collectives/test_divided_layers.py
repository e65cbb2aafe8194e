"""Cross entropy of divided classes, and tables of divided rows, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from splitc.runtime.collectives.divided_layers import DividedLayers
from splitc.runtime.collectives.model_parallel import Group, feature_widths
from tests.runtime.collectives.test_model_parallel import on_group, random
from tests.support.sampling import along, in_one

OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored targets": {"ignore_index": 3},
    "class weights": {"weight": True, "ignore_index": -100},
    "label smoothing": {"label_smoothing": 0.1},
    "all of it": {"label_smoothing": 0.3, "weight": True, "ignore_index": 3},
    "all of it, each": {"label_smoothing": 0.3, "weight": True, "ignore_index": 3, "reduction": "none"},
}


def layers_of(group: Group) -> DividedLayers:
    return DividedLayers(group)


def problem(classes: int, rows: int = 6, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    target = torch.arange(rows) * 5 % classes
    target[0] = 3
    return (30 * random(0, rows, classes)).to(dtype), target


@in_one
@along(name=OPTIONS, group=[(6, 4), (2, 11), (3, 11)])
def test_value_and_gradient_are_those_of_whole_logits(name: str, group: tuple[int, int]) -> None:
    """In groups of more ranks than classes, some have none."""
    size, classes = group
    options = dict(OPTIONS[name])
    options["weight"] = random(1, classes).abs() if options.get("weight") else None
    logits, target = problem(classes)
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, target, **options)
    expected.backward(torch.ones_like(expected))
    assert whole.grad is not None

    def member(group: Group) -> tuple[Tensor, Tensor | None]:
        own = logits.split(feature_widths(classes, size), 1)[group.index].clone().requires_grad_()
        loss = layers_of(group).cross_entropy(own, target, features=classes, **options)
        loss.backward(torch.ones_like(loss))
        return loss.detach(), own.grad

    found = on_group(size, member)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(torch.cat([grad for _, grad in found], 1), whole.grad, rtol=1e-11, atol=1e-11)


@in_one
@along(name=["sum", "none", "ignored targets", "label smoothing"], group=[(1, 11), (6, 4), (3, 11)])
def test_chunks_of_a_linear_layer_give_the_loss_and_gradients_of_the_whole(name: str, group: tuple[int, int]) -> None:
    size, classes = group
    options: dict[str, Any] = {"reduction": "sum", **OPTIONS[name]}
    _, target = problem(classes)
    value, weight, bias = random(2, 2, 3, 5), random(3, classes, 5), random(4, classes)
    whole = [each.clone().requires_grad_() for each in (value, weight, bias)]
    expected = F.cross_entropy(F.linear(*whole).flatten(0, 1), target, **options)
    expected.backward(torch.ones_like(expected))

    def member(group: Group) -> list[Any]:
        parts = (each.split(feature_widths(classes, size))[group.index] for each in (weight, bias))
        own = [each.clone().requires_grad_() for each in (value, *parts)]
        loss = layers_of(group).linear_cross_entropy(*own, target=target, features=classes, rows=4, **options)
        loss.backward(torch.ones_like(loss))
        return [loss.detach(), *(each.grad for each in own)]

    losses, *grads = zip(*on_group(size, member), strict=True)
    for loss in losses:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-11, atol=1e-11)
    joined = (sum(grads[0]), torch.cat(grads[1]), torch.cat(grads[2]))
    for own, each in zip(joined, whole, strict=True):
        torch.testing.assert_close(own, each.grad, rtol=1e-11, atol=1e-11)


EXTREME: dict[str, Callable[[Tensor], Tensor]] = {
    "masked": lambda logits: logits.index_fill(1, torch.tensor([4, 5, 9]), -torch.inf),
    "all of a rank masked": lambda logits: logits.index_fill(1, torch.arange(4, 8), -torch.inf),
    "large": lambda logits: logits * 1e6,
    "no rows": lambda logits: logits[:0],
}


@in_one
@pytest.mark.parametrize("name", EXTREME)
def test_logits_of_extreme_values_give_the_same_loss(name: str) -> None:
    logits, target = problem(11)
    logits = EXTREME[name](logits)
    target = target.where(target % 5 < 4, 3)[: len(logits)]  # a class that is not masked
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, target, reduction="sum")
    expected.backward()
    assert whole.grad is not None

    def member(group: Group) -> tuple[Tensor, Tensor | None]:
        own = logits.split([4, 4, 3], 1)[group.index].clone().requires_grad_()
        loss = layers_of(group).cross_entropy(own, target, features=11, reduction="sum")
        loss.backward()
        return loss.detach(), own.grad

    found = on_group(3, member)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(torch.cat([grad for _, grad in found], 1), whole.grad, rtol=1e-11, atol=1e-11)


@in_one
@pytest.mark.parametrize(("smoothing", "numbers"), [(0.0, 3), (0.1, 4)])
def test_three_numbers_of_a_row_are_summed_and_a_fourth_for_label_smoothing(smoothing: float, numbers: int) -> None:
    logits, target = problem(8)

    def member(group: Group) -> int:
        own = logits.split(2, 1)[group.index].clone().requires_grad_()
        layers_of(group).cross_entropy(own, target, features=8, label_smoothing=smoothing).backward()
        return group.transport.sent_bytes

    assert on_group(4, member) == [2 * 3 * numbers * 6 * 8 // 4] * 4, "nothing in backward"


def test_logits_of_low_precision_are_summed_in_float32() -> None:
    logits, target = problem(8, dtype=torch.bfloat16)
    expected = F.cross_entropy(logits.float(), target)

    def member(group: Group) -> Tensor:
        return layers_of(group).cross_entropy(logits.split(4, 1)[group.index], target, features=8)

    for loss in on_group(2, member):
        assert loss.dtype is torch.bfloat16
        torch.testing.assert_close(loss, expected.bfloat16())


def test_a_target_that_is_no_class_is_refused() -> None:
    logits, target = problem(8)
    target[1] = 8
    with pytest.raises(RuntimeError, match="a target is not below 8"):
        on_group(2, lambda group: layers_of(group).cross_entropy(logits.split(4, 1)[group.index], target, features=8))


def test_the_rows_that_ranks_find_in_their_parts_of_a_table_sum_to_those_of_the_whole_one() -> None:
    table, indices = random(2, 5, 3), torch.tensor([[0, 4, 2], [3, 1, 4]])

    def member(group: Group) -> Tensor:
        own = table.split(feature_widths(5, 2))[group.index]
        return layers_of(group).embedding(indices, own, rows=5)

    first, second = on_group(2, member)
    assert torch.equal(first + second, F.embedding(indices, table))
