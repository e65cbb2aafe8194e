"""A batch size that a model fixes, in any disguise, is refused at the line that fixes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.capturing import here, refusal
from tests.support.models import labels, made, vectors

Run = Callable[..., Any]


def view(m: Any, x: Tensor) -> Tensor:
    y = m.a(x).view(4, 8)  # here
    return m.fc(y)


def view_that_fits(m: Any, x: Tensor) -> Tensor:
    y = m.a(x).view(4, -1)  # here
    return m.fc(y)


def arange(m: Any, x: Tensor) -> Tensor:
    rows = torch.arange(4)  # here
    return m.fc(x)[rows, x.argmax(1).clamp(max=4)][:, None] + m.fc(x)


def initial_state(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros(4, 8)  # here
    return m.fc(torch.tanh(x + h))


def expanded(m: Any, x: Tensor) -> Tensor:
    token = m.token.expand(4, -1)  # here
    return m.fc(torch.cat([token, x], 1)[:, :8])


def half(m: Any, x: Tensor) -> Tensor:
    part = x[: x.size(0) // 2]  # here
    return m.fc(x) + part.mean()


BAKED: list[tuple[Run, str]] = [
    (view, "the batch size 4 is baked into the graph: view runs at a batch of 4 but not of 5"),
    (view_that_fits, "the batch size 4 is baked into view: fc runs at a batch of 4 but not of 5"),
    (arange, "the batch size 4 is baked into arange: getitem runs at a batch of 4 but not of 5"),
    (initial_state, "the batch size 4 is baked into zeros: add runs at a batch of 4 but not of 5"),
    (expanded, "the batch size 4 is baked into expand: cat runs at a batch of 4 but not of 5"),
    (lambda m, x: m.fc(torch.cat(x.split([2, 2]))), "split runs at a batch of 4 but not of 5"),
    (lambda m, x: m.fc(x).view(int(x.size(0)), 5), "int() fixes the batch size: x.size(0) changes with the batch"),
    (
        lambda m, x: torch.stack([m.fc(row) for row in x]),
        "a loop over a tensor fixes the batch size: x.size(0) changes with the batch",
    ),
    (
        lambda m, x: torch.stack([m.fc(x[i]) for i in range(x.size(0))]),
        "range() or an index fixes the batch size: x.size(0) changes with the batch",
    ),
    (
        lambda m, x: torch.stack([m.fc(x[i]) for i in range(len(x))]),
        "leave range() or an index out, and write operations over the whole batch",
    ),
    (lambda m, x: m.fc(torch.stack(x.unbind(0))), "unbind makes as many tensors as the batch has examples"),
    (
        lambda m, x: m.fc(x - x[:4].mean(0)),
        "getitem takes particular examples of the batch, and each rank has other ones",
    ),
    (lambda m, x: m.fc(x - x[0]), "getitem takes particular examples of the batch"),
    (half, "getitem is (5, 8) at a batch of 11, not (2, 8); ranks run other batches than the example's"),
]


@pytest.mark.slow
def test_a_batch_size_in_any_disguise_is_refused_at_its_line() -> None:
    for run, text in BAKED:
        said = refusal(made(run, token=nn.Parameter(torch.randn(1, 8))), vectors()(), labels()(), F.cross_entropy)
        assert said.startswith(f"{here(run)}: ") and text in said


def test_a_batch_size_baked_into_a_plain_attribute_is_refused_where_it_fails() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.fc(x + m.state)  # here

    said = refusal(made(run, state=torch.zeros(4, 8)), vectors()(), labels()(), F.cross_entropy)
    assert said.startswith(f"{here(run)}: add runs at a batch of 4 but not of 5")


def test_a_batch_size_baked_into_the_loss_is_refused_too() -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(out.log_softmax(-1).view(4, 5), y)  # here

    assert refusal(made(lambda m, x: m.fc(x)), vectors()(), labels()(), loss).startswith(
        f"{here(loss)}: the batch size 4"
    )
