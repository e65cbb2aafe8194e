"""Tables of which ranks exchange the rows that they touched: the training of one process, to the last digits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitc
from splitc.compiled import CompiledProgram
from splitc.ir.wire import wire
from splitc.ir.wire_op import What
from tests.support.compiled import CLUSTER, compiled
from tests.support.ranks import assert_same, on_workers, one_process, train
from tests.support.wire_bytes import assert_defined

ROWS, WIDTH, BAG, BATCH, WORLD = 50, 4, 5, 6, 3


class Recommender(nn.Module):
    """Bags and single rows of tables, one of which is read twice, and one that may be the head's weight too."""

    def __init__(self, tied: bool = False, sparse: bool = False) -> None:
        super().__init__()
        self.mean = nn.EmbeddingBag(ROWS, WIDTH, padding_idx=1, sparse=sparse)
        self.sum = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=sparse)
        self.one = nn.Embedding(ROWS, WIDTH, padding_idx=0, sparse=sparse)
        self.again = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=sparse)
        self.again.weight = self.sum.weight
        self.fc = nn.Linear(6 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS)
        if tied:
            self.head.weight = self.one.weight

    def forward(self, bags: Tensor, weights: Tensor) -> Tensor:
        whole, half = self.sum(bags, per_sample_weights=weights), self.sum(bags.flip(1), per_sample_weights=weights)
        read = [self.mean(bags), whole, half, self.again(bags + 1), self.one(bags[:, 0]), self.one(bags).sum(1)]
        scores: Tensor = self.head(self.fc(torch.cat(read, 1)).relu())
        return scores


def batch(size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows as skewed as they are in recommenders, many of them twice."""
    generator = torch.Generator().manual_seed(seed)
    bags = (torch.rand(size, BAG, generator=generator) ** 3 * (ROWS - 1)).long()
    weights = torch.rand(size, BAG, generator=generator, dtype=torch.float64)
    return bags, weights, torch.randint(ROWS, (size,), generator=generator)


@cache
def program(strategy: str = "late_multiply", **options: Any) -> CompiledProgram:
    *inputs, target = batch(BATCH)
    return compiled(recommender(**options), tuple(inputs), target, F.cross_entropy, WORLD, strategy)


def recommender(**options: Any) -> Recommender:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Recommender(**options).double()


OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1),
}


def assert_trains(
    found: CompiledProgram, model: nn.Module, optimizer: Any, sizes: tuple[int, ...], **options: Any
) -> None:
    """Every rank's training is that of one process, to 1e-8."""
    batches = [batch(sum(sizes), seed) for seed in range(4)]
    got = on_workers(found, lambda worker: train(worker, batches, sizes), optimizer=optimizer, **options)
    losses, state = one_process(model, batches, optimizer, **options)
    for own, _ in got:
        torch.testing.assert_close(own, losses, rtol=1e-8, atol=1e-8)
    assert_same(got[0][1], state, 1e-8)


SIZES, UNEVEN = (BATCH,) * WORLD, (3, 1, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "tied", "sizes", "options"),
    [
        ("Adam", False, SIZES, {}),
        ("SGD", True, SIZES, {"clip_norm": 0.1}),
        ("SGD", False, UNEVEN, {"accumulate": 2}),
        ("Adam", True, UNEVEN, {"clip_norm": 0.1, "accumulate": 2}),
    ],
)
def test_tables_train_as_in_one_process(
    optimizer: str, tied: bool, sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    found = program(tied=tied)
    assert {place.sync for place in found.plan.placements.values()} == {"late_multiply"}
    assert_trains(found, recommender(tied=tied), OPTIMIZERS[optimizer], sizes, **options)


@pytest.mark.slow
def test_tables_hold_in_microbatches_of_several_roles() -> None:
    separated = program("layer_separation(n_c=2, n_f=1, microbatches=2)")
    late = {name: replace(place, sync="late_multiply") for name, place in separated.plan.placements.items()}
    some = {name: late[name] for name in ("mean", "one")}
    plan = replace(separated.plan, placements={**separated.plan.placements, **some})
    *inputs, target = batch(BATCH)
    given: dict[str, Any] = {
        "example": tuple(inputs),
        "target": target,
        "loss": F.cross_entropy,
        "world": WORLD,
        "cluster": CLUSTER,
    }
    verified = splitc.compile(recommender(), plan=plan, **given).verify()
    assert verified.holds, verified


@pytest.mark.slow
def test_what_travels_are_indices_of_32_bits_and_errors_of_bags() -> None:
    found = program()
    packs = {op.dtype: op for op in wire(found.program, 0) if op.payload.what is What.LATE}
    numbers = {torch.int32: 5 * BAG + 1, torch.float64: 2 * BAG + WIDTH * (5 + BAG + 6 + 1 + 1) + ROWS}
    assert {dtype: op.sent for dtype, op in packs.items()} == {
        dtype: (WORLD - 1) * BATCH * each * dtype.itemsize for dtype, each in numbers.items()
    }
    assert_defined(found, batch(WORLD * BATCH))
