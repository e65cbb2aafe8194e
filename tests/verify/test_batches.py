"""Batches for `verify`: generic data that the model takes, the same for the same seed, divided among the readers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.capture.example.example import Example
from splitc.capture.validate.generic_data import Draw
from splitc.verify.batches import draw_batches, split_batch
from splitc.verify.reference import loss_of_copy
from tests.support.capturing import captured
from tests.support.sampling import in_one

X, Y = torch.zeros(4, 3), torch.tensor([0, 1, 1, 0])


def drawn(model: nn.Module, x: Tensor = X, size: int = 16, seed: int = 0) -> tuple[Any, Any, Draw]:
    """The program of a model, two batches for it, and how they were drawn."""
    example = Example.bind(model, (x,), Y, F.cross_entropy)
    program = captured(model, x, Y, F.cross_entropy)
    batches, how = draw_batches(program, example, size, 2, seed, lambda b: loss_of_copy(program, model, example, b))
    return program, batches, how


def test_a_constant_example_gives_batches_of_which_no_two_examples_are_the_same() -> None:
    _, batches, how = drawn(nn.Linear(3, 2))
    assert how is Draw.GENERIC
    assert len({tuple(row.tolist()) for batch in batches for row in batch[next(iter(batch))]}) == 32


def test_a_seed_decides_the_batches() -> None:
    model = nn.Linear(3, 2)
    (_, first, _), (_, again, _), (_, other, _) = (drawn(model, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first[1]["target"], again[1]["target"])
    assert torch.equal(first[1]["input"], again[1]["input"])
    assert not torch.equal(first[1]["input"], other[1]["input"])


class Positive(nn.Module):
    """Whose loss is a number on its example only."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.where(x == X[0], x, torch.inf))


def test_where_generic_data_gives_no_number_the_rows_of_the_example_are_taken() -> None:
    assert drawn(Positive())[2] >= Draw.SEEN


class Definite(nn.Linear):
    """Fails on matrices that are not positive definite."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.linalg.cholesky(x).diagonal(0, 1, 2))


def test_where_generic_data_fail_the_rows_of_the_example_are_taken() -> None:
    assert drawn(Definite(3, 2), torch.eye(3).expand(4, 3, 3) * 2)[2] >= Draw.SEEN


@in_one
@pytest.mark.parametrize("local_batches", [(3, 2), (5, 0)])
def test_each_reader_gets_its_rows_of_every_tensor(local_batches: tuple[int, ...]) -> None:
    program, (batch, _), _ = drawn(nn.Linear(3, 2), size=5)
    parts = split_batch(program, batch, local_batches)
    assert [tuple(map(len, part)) for part in parts] == [(size, size) for size in local_batches]
    assert torch.equal(torch.cat([part[0] for part in parts]), batch["input"])
