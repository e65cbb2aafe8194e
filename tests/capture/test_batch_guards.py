"""Branches on the batch size are kept with the batches for which they hold, and every batch is checked against them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.checks.batch_sizes import require_batch_sizes
from splitc.errors import LaunchError, PlacementError
from splitc.runtime.pieces import Pieces
from splitc.runtime.worker import Worker
from tests.support.capturing import capture, here, refusal, validated
from tests.support.compiled import compiled
from tests.support.ranks import on_workers

Change = Callable[[Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.first, self.second, self.change = nn.Linear(6, 8), nn.Linear(8, 5), change

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.change(self.first(x).relu()))


def over(x: Tensor) -> Tensor:
    return x * 2 if x.size(0) > 50 else x  # here


def at_most(x: Tensor) -> Tensor:
    return x * min(x.size(0), 64)


def hundreds(x: Tensor) -> Tensor:
    return x * (1 + x.size(0) // 100)


def six(x: Tensor) -> Tensor:
    return x * 2 if x.size(0) == 6 else x


def even(x: Tensor) -> Tensor:
    return x * 2 if x.size(0) % 2 else x


def asserted(x: Tensor) -> Tensor:
    assert x.shape == (8, 8)
    return x


def far_away(x: Tensor) -> Tensor:
    return x if x.shape[0] * 3 < 300_000 else x * 2


def features(x: Tensor) -> Tensor:
    return x * (x.numel() // x.size(0)) if x.shape[:1] == x.reshape(-1, 2, 4).shape[:1] else x


def some(x: Tensor) -> Tensor:
    return x * 2 if x.size(0) else x


def dense(x: Tensor) -> Tensor:
    return x.contiguous() if x.shape[0] >= 64 else x


def dense_then_doubled(x: Tensor) -> Tensor:
    return dense(x) * 2 if x.size(0) > 99 else dense(x)


def small_by_hand(x: Tensor) -> Tensor:
    return x + 0 if x.size(0) < 5 else 1 * x if x.size(0) == 9 else x


def of(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 6), torch.randint(0, 5, (rows,))


@pytest.mark.parametrize(
    ("change", "rows", "ranges"),
    [
        (over, 8, ["1 to 50"]),
        (over, 64, ["51 or more"]),
        (at_most, 8, ["1 to 64"]),
        (hundreds, 8, ["1 to 99"]),
        (asserted, 8, ["8"]),
        (six, 8, ["1 to 5 or 7 or more"]),
        (even, 8, ["8"]),
        (far_away, 8, ["1 to 65536"]),
        (features, 8, []),
        (some, 8, []),
    ],
)
def test_a_branch_holds_for_the_batches_with_its_outcome(change: Change, rows: int, ranges: list[str]) -> None:
    assert [str(guard) for guard in capture(Net(change), *of(rows), F.cross_entropy).guards] == ranges


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "rows", "ranges"),
    [
        (dense, 8, []),
        (dense_then_doubled, 8, ["1 to 99"]),
        (small_by_hand, 8, []),
        (over, 30, ["1 to 50"]),
        (six, 8, ["1 to 5 or 7 or more"]),
    ],
)
def test_a_branch_that_computes_the_same_fixes_no_batch(change: Change, rows: int, ranges: list[str]) -> None:
    program = validated(Net(change), *of(rows), F.cross_entropy)
    assert [str(guard) for guard in program.guards] == ranges


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (lambda n: n // 4, "no linear function of the batch size"),
        (lambda n: n % 1000, "no linear function of the batch size"),
        (lambda n: n / (n - 1), "truediv fails on 1 examples"),
    ],
)
def test_a_number_that_is_no_share_of_the_batch_couples_examples(number: Callable[[Any], Any], said: str) -> None:
    assert said in refusal(Net(lambda x: x * number(x.size(0))), *of(8), F.cross_entropy)


@pytest.mark.slow
def test_a_number_that_is_used_keeps_its_line() -> None:
    (guard,) = capture(Net(over), *of(8), F.cross_entropy).guards
    assert guard.source == here(over)
    report = compiled(Net(over), *of(8), F.cross_entropy, 2, "data_parallel").report()
    assert f"Traced for batches of 1 to 50 ({here(over)})." in report


def test_a_plan_with_batches_beyond_the_branch_is_refused() -> None:
    world, rows = 8, 8
    said = (
        rf"{here(over)}: .* traced for batches of 1 to 50, and one process.* runs {world * rows} examples; compile with"
    )
    with pytest.raises(PlacementError, match=said):
        compiled(Net(over), *of(rows), F.cross_entropy, world, "data_parallel")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["layer_separation", "modulo_shard"])
def test_within_the_range_training_is_that_of_one_process(strategy: str) -> None:
    assert compiled(Net(over), *of(8), F.cross_entropy, 2, strategy).verify(dtype=torch.float64).holds
    assert compiled(Net(over), *of(52), F.cross_entropy, 2, strategy).verify(dtype=torch.float64).holds


@pytest.mark.slow
def test_the_parts_of_a_piece_are_listed_once_for_all_layers_and_ranks_of_a_role(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [each for _ in range(6) for each in (nn.Linear(8, 8), nn.BatchNorm1d(8))]
    model = nn.Sequential(*layers, nn.Linear(8, 4))
    program = compiled(model, torch.randn(8, 8), torch.randint(4, (8,)), F.cross_entropy, 4, "data_parallel").program
    listed, parts = list[int](), Pieces.parts

    def noted(self: Pieces, piece: int) -> list[tuple[int, int]]:
        listed.append(piece)
        return parts(self, piece)

    monkeypatch.setattr(Pieces, "parts", noted)
    require_batch_sizes(program)
    assert listed == [0]


NORMALISED = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "batch", "rank"),
    [("data_parallel", 4, 0), ("data_parallel", 7, 3), ("data_parallel(microbatches=2)", 12, 0)],
)
def test_a_norm_that_would_have_one_value_is_refused_before_training(strategy: str, batch: int, rank: int) -> None:
    example = torch.randn(2, 8), torch.randint(4, (2,))
    with pytest.raises(PlacementError, match=rf"1 \(Sequential\): BatchNorm needs several .* rank {rank} .* has [01]"):
        compiled(NORMALISED, *example, F.cross_entropy, 4, strategy, global_batch=batch)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data_parallel(sync_batchnorm=True)", "modulo_shard(mp=2)", "single_device"])
def test_a_norm_may_have_one_example_of_each_rank(strategy: str) -> None:
    example = torch.randn(2, 8), torch.randint(4, (2,))
    program = compiled(NORMALISED, *example, F.cross_entropy, 4, strategy, global_batch=4)
    assert program.verify(dtype=torch.float64).holds  # a norm of one example a rank makes much of rounding


@pytest.mark.slow
def test_every_step_is_checked_tails_included() -> None:
    program = compiled(Net(over), *of(52), F.cross_entropy, 2, "data_parallel")

    def run(worker: Worker) -> Any:
        worker.step(*of(52))
        worker.use_sizes((51, 20))
        with pytest.raises(LaunchError, match=r"traced for batches of 51 or more, and rank 1 \(all\) runs 20 examples"):
            worker.step(*of((51, 20)[worker.data_rank or 0]))
        worker.use_sizes(None)
        return float(worker.step(*of(52)))

    first, second = on_workers(program, run, optimizer=lambda params: torch.optim.SGD([p for _, p in params], 0.1))
    assert first == second
