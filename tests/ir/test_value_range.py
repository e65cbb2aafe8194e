"""Bounds of integer inputs, read from the nodes that use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.ir.value_range import class_bound
from tests.support.capturing import capture, node
from tests.support.models import made

READERS: dict[str, tuple[Callable[[Any, Tensor], Tensor], int | None]] = {
    "an embedding": (lambda m, x: m.embedding(x), 9),
    "a view of it": (lambda m, x: m.embedding(x.view(-1, 3)), 9),
    "one_hot": (lambda m, x: F.one_hot(x, 6).float() @ m.weight, 6),
    "the smaller of two": (lambda m, x: m.embedding(x) + F.one_hot(x, 4).float(), 4),
    "arithmetic": (lambda m, x: m.embedding(x * 0 + 1), None),
}


@pytest.mark.parametrize("reader", READERS)
def test_indices_are_bounded_by_what_they_index(reader: str) -> None:
    run, bound = READERS[reader]
    model = made(run, embedding=nn.Embedding(9, 4))
    model.weight = nn.Parameter(torch.randn(6, 4))
    program = capture(model, (torch.zeros(2, 3, dtype=torch.long),), torch.randn(2, 3, 4), F.mse_loss)
    assert class_bound(node(program, program.inputs[0].name), program.root) == bound


def test_classes_are_bounded_by_the_logits() -> None:
    program = capture(nn.Linear(3, 7), (torch.randn(4, 3),), torch.zeros(4, dtype=torch.long), F.cross_entropy)
    bounds = {each.name: class_bound(node(program, each.name), program.root) for each in program.inputs if each.target}
    assert list(bounds.values()) == [7]
