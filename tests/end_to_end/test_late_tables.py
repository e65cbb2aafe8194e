"""Tables of which ranks exchange the rows that they touched: the training of one process, to the last digits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import splitc
from splitc.compiled import CompiledProgram
from splitc.cost_models.clusters.named import load_cluster
from splitc.cost_models.simulation.batches import Batch
from splitc.cost_models.simulation.operations import Begin, Compute, Wait
from splitc.cost_models.simulation.prices import Prices
from splitc.cost_models.simulation.step_operations import Step
from splitc.errors import PlacementError
from splitc.ir.wire import wire
from splitc.ir.wire_op import What
from splitc.runtime.worker import Worker
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
        self.fc = nn.Linear(7 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS)
        if tied:
            self.head.weight = self.one.weight

    def forward(self, bags: Tensor, weights: Tensor) -> Tensor:
        whole, half = self.sum(bags, per_sample_weights=weights), self.sum(bags.flip(1), per_sample_weights=weights)
        read = [self.mean(bags), whole, half, self.again(bags + 1), self.one(bags[:, 0]), self.one(bags).sum(1)]
        read.append(torch.mean(self.one(bags.flip(1)), -2))
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


class Both(torch.optim.Optimizer):
    """SparseAdam of tables, and Adam of all else, as one optimizer."""

    def __init__(self, params: Iterable[tuple[str, nn.Parameter]]) -> None:
        own = list(params)
        is_table = {name: name.split(".")[0] in ("mean", "sum", "one", "again") for name, _ in own}
        self.parts = (
            torch.optim.SparseAdam([p for name, p in own if is_table[name]], lr=0.01),
            torch.optim.Adam([p for name, p in own if not is_table[name]], lr=0.01),
        )
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()  # type: ignore[no-untyped-call]


OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "SparseAdam": Both,
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
    ("optimizer", "kind", "sizes", "options"),
    [
        ("Adam", {}, SIZES, {}),
        ("SGD", {"tied": True}, SIZES, {"clip_norm": 0.1}),
        ("SGD", {}, UNEVEN, {"accumulate": 2}),
        ("Adam", {"tied": True}, UNEVEN, {"clip_norm": 0.1, "accumulate": 2}),
        ("momentum", {"sparse": True}, SIZES, {}),
        ("momentum", {"sparse": True, "tied": True}, UNEVEN, {"accumulate": 2}),
        ("SparseAdam", {"sparse": True}, UNEVEN, {}),
        ("SparseAdam", {"sparse": True}, SIZES, {"accumulate": 2}),
    ],
    ids=str,
)
def test_tables_train_as_in_one_process(
    optimizer: str, kind: dict[str, bool], sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    found = program(**kind)
    late = {name for name, place in found.plan.placements.items() if place.sync == "late_multiply"}
    assert late >= {"mean", "sum", "one", "again", *["head"] * bool(kind.get("tied"))}
    assert_trains(found, recommender(**kind), OPTIMIZERS[optimizer], sizes, **options)


@pytest.mark.slow
def test_sparse_gradients_are_clipped_averaged_and_compared_as_dense_ones(tmp_path: Path) -> None:
    """Torch clips no sparse gradients: what they are to be equal to has dense ones.  A run goes on in between."""
    batches = [batch(WORLD * BATCH, seed) for seed in range(4)]

    def run(worker: Worker) -> Any:
        train(worker, batches[:2])
        worker.save(tmp_path)
        return train(worker, [batches[0]])

    def resumed(worker: Worker) -> Any:
        assert worker.resume(tmp_path) == 2
        found = train(worker, batches[2:])
        assert worker.gradients()["sum.weight"].is_coalesced()
        return found

    options = {"optimizer": OPTIMIZERS["momentum"], "clip_norm": 0.1, "check_replicas": 1, "check_finite": True}
    on_workers(program(sparse=True), run, **options)
    got = on_workers(program(sparse=True), resumed, **options)
    _, state = one_process(recommender(), batches, OPTIMIZERS["momentum"], clip_norm=0.1)
    assert_same(got[0][1], state, 1e-8)


@pytest.mark.slow
def test_a_sparse_table_is_late_multiplied_on_one_rank_or_refused() -> None:
    for tied in (False, True):
        verified = program("auto", sparse=True, tied=tied).verify(steps=2)
        assert verified.holds, verified
    for strategy in ("data_parallel", "local_sgd(period=2)", "hybrid_single", "parameter_server"):
        with pytest.raises(
            PlacementError, match=r"the gradients of again, mean, one, sum are sparse, .* late_multiply"
        ):
            program(strategy, sparse=True)


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
    verified = splitc.compile(recommender(), plan=plan, **given).verify(steps=2)
    assert verified.holds, verified


@pytest.mark.slow
def test_what_travels_are_indices_of_32_bits_and_errors_of_bags_and_of_sums_of_rows() -> None:
    found = program()
    packs = [(op.dtype, op.sent) for op in wire(found.program, 0) if op.payload.what is What.LATE]
    early, late, errors = 3 * BAG + 1, 3 * BAG, 2 * BAG + WIDTH * (7 + 7 + 1 + 1) + ROWS
    numbers = ((torch.int32, early), (torch.float64, errors), (torch.int32, late))
    assert packs == [(dtype, (WORLD - 1) * BATCH * each * dtype.itemsize) for dtype, each in numbers]
    operations = Step(Prices(found.program, load_cluster(CLUSTER)), 0, Batch()).operations()
    begun = [isinstance(op, Begin) and "indices" in op.transfer.name for op in operations].index(True)
    assert not any(isinstance(op, Compute | Wait) for op in operations[:begun])
    assert_defined(found, batch(WORLD * BATCH))
