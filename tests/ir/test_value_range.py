"""Bounds of integer inputs, read from the nodes that use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.errors import CaptureError
from splitc.runtime.launch.feed import synthetic
from splitc.runtime.launch.loader import load_rank
from tests.support.capturing import capture
from tests.support.compiled import compiled
from tests.support.models import made
from tests.support.sampling import in_tiers

READERS: dict[str, tuple[Callable[[Any, Tensor], Tensor], int | None]] = {
    "an embedding": (lambda m, x: m.embedding(x), 9),
    "a view of it": (lambda m, x: m.embedding(x.view(-1, 3)), 9),
    "one_hot": (lambda m, x: F.one_hot(x, 6).float() @ m.weight, 6),
    "the smaller of two": (lambda m, x: m.embedding(x) + F.one_hot(x, 4).float(), 4),
    "arithmetic": (lambda m, x: m.embedding(x * 0 + 1), None),
}


def test_indices_are_bounded_by_what_they_index() -> None:
    for reader in READERS:
        run, bound = READERS[reader]
        model = made(run, embedding=nn.Embedding(9, 4))
        model.weight = nn.Parameter(torch.randn(6, 4))
        program = capture(model, (torch.zeros(2, 3, dtype=torch.long),), torch.randn(2, 3, 4), F.mse_loss)
        assert program.inputs[0].bound == bound, reader


def test_classes_are_bounded_by_the_logits() -> None:
    program = capture(nn.Linear(3, 7), (torch.randn(4, 3),), torch.zeros(4, dtype=torch.long), F.cross_entropy)
    assert [each.bound for each in program.inputs] == [None, 7]


def test_floats_that_are_whole_numbers_in_the_example_are_drawn_as_such() -> None:
    for values, high in (
        ([[0.0, 4.0], [1.0, 0.0]], 5),
        ([[0.0, 0.0], [0.0, 0.0]], None),
        ([[-1.0, 1.0], [1.0, 0.0]], 1.0),
        ([[0.0, 0.5], [1.0, 0.0]], 1.0),
    ):
        program = capture(nn.Linear(3, 2), (torch.randn(2, 3),), torch.tensor(values), F.mse_loss)
        assert [each.high for each in program.inputs] == [None, high], values


SIZES = 200, 10, 37
STARTS = torch.tensor([0, 200, 210])


def each(columns: Any) -> Callable[[Any, Tensor], list[Tensor]]:
    """Each column read by a table of its own."""
    return lambda m, ids: [table(column).flatten(1) for table, column in zip(m.tables, columns(ids), strict=True)]


COLUMNS: dict[str, tuple[Callable[[Any, Tensor], list[Tensor]], Any]] = {
    "index": (each(lambda ids: [ids[:, k] for k in range(3)]), [[200, 10, 37]]),
    "slice": (each(lambda ids: [ids[:, k : k + 1] for k in range(3)]), [[200, 10, 37]]),
    "unbind": (each(lambda ids: ids.t().contiguous().unbind()), [[200, 10, 37]]),
    "split": (each(lambda ids: ids.view(len(ids), 3).split(1, dim=1)), [[200, 10, 37]]),
    "transposed": (each(lambda ids: [ids.T[k].long() for k in range(3)]), [[200, 10, 37]]),
    "select": (each(lambda ids: [ids.select(-1, k) for k in range(3)]), [[200, 10, 37]]),
    "two tables": (lambda m, ids: [m.tables[1](ids[:, 0]), m.tables[0](ids[:, :2]).sum(1)], [[10, 200, 21]]),
    "starts": (lambda m, ids: list(m.table(ids + STARTS).unbind(1)), [[247, 47, 37]]),
    "starts in a buffer": (lambda m, ids: list(m.table(m.starts + ids).unbind(1)), [[247, 47, 37]]),
    "rows of a weight": (lambda m, ids: [m.tables[1].weight[ids[:, 1]]], [[10, 10, 21]]),
    "views of shifted columns": (
        lambda m, ids: [m.table(ids[:, 1:].contiguous().view(-1)).view(-1, 2, 4)[:, 0]],
        [[10, 247, 247]],
    ),
    "remainder": (each(lambda ids: [ids[:, k] % n for k, n in enumerate(SIZES)]), None),
}


class Tables(nn.Module):
    """Three tables, one after the other too, whose rows are in the columns of one tensor."""

    def __init__(self, read: Callable[[Any, Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.read, self.dense, self.starts = read, nn.Linear(4, 2), nn.Buffer(STARTS.clone())
        self.tables, self.table = nn.ModuleList(nn.Embedding(n, 4) for n in SIZES), nn.Embedding(sum(SIZES), 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dense(torch.stack(self.read(self, ids)).sum(0))


@in_tiers("cases", COLUMNS.items(), one_in=4)
def test_every_column_is_bounded_by_the_table_that_it_indexes(cases: list[Any]) -> None:
    ids = torch.tensor([[9, 9, 20], [1, 2, 3], [4, 5, 6], [7, 8, 9]])
    for name, (read, bound) in cases:
        program = capture(Tables(read), (ids,), torch.arange(4) % 2, F.cross_entropy)
        assert program.inputs[0].bound == bound, name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["starts in a buffer", "views of shifted columns", "index"])
def test_numbers_of_columns_are_drawn_within_their_bounds(name: str) -> None:
    read, bound = COLUMNS[name]
    ids = torch.tensor([[9, 9, 20], [1, 2, 3], [4, 5, 6], [7, 8, 9]])
    program = compiled(Tables(read), ids, torch.arange(4) % 2, F.cross_entropy, 2, "data_parallel")
    assert not program.program.notes and program.verify(dtype=torch.float64).holds
    drawn, _ = next(synthetic(load_rank(program.files, 0).rank))
    assert bool((drawn < torch.tensor(bound)).all())


def test_floats_and_lengths_are_bounded_by_those_of_the_example() -> None:
    target, lengths = torch.rand(4, 3), torch.tensor([1, 4, 2, 2])

    def loss(made: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
        return F.binary_cross_entropy(made.sigmoid(), target) * lengths.float().mean()

    program = capture(nn.Linear(2, 3), (torch.randn(4, 2) * 9,), (target, lengths), loss)
    assert [(each.low, each.high) for each in program.inputs] == [(0, None), (0, 1), (1, 5)]


def test_a_number_beyond_the_table_of_its_column_is_refused() -> None:
    ids = torch.tensor([[199, 10, 3], [1, 2, 3]])
    with pytest.raises(
        CaptureError, match=r"holds 10, out of bounds: what reads it takes numbers below \[\[200, 10, 37"
    ):
        capture(Tables(COLUMNS["index"][0]), (ids,), torch.arange(2), F.cross_entropy)
