"""Steps in microbatches train exactly as one process does, in every order, world and strategy."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.errors import PlacementError
from splitc.ir.placements import SCHEDULES
from splitc.ir.plan import Plan
from splitc.passes.planner.strategy import parse_strategy
from splitc.passes.planner.syncs import sync_misfits
from splitc.strategies.modulo_shard import ModuloShard
from tests.support.compiled import compiled
from tests.support.delays import delays
from tests.support.every_strategy import Asked, every_strategy, planned
from tests.support.ranks import assert_same, batch_of, batches_for, compile_net, on_workers, one_process, plain, train
from tests.support.sampling import along, in_pairs, sampled, thinned
from tests.support.strict import queued_transports, strict_transports


def in_pieces(world: int, asked: Asked, number: int, schedule: str, **options: Any) -> CompiledProgram:
    strategy = parse_strategy(asked.strategy)
    whole = replace(strategy, scheme="BK") if number > 1 and isinstance(strategy, ModuloShard) else strategy
    asked = replace(asked, strategy=replace(whole, microbatches=number, schedule=schedule))  # type: ignore[arg-type]
    batch = world * 5 + 1  # which neither the ranks nor the microbatches divide
    return planned(world, asked, torch.float64, global_batch=batch, **options)


MATRIX = [
    pytest.param(
        world, asked, 2 + k % 3, SCHEDULES[(k + world) % len(SCHEDULES)], bool(k % 2),
        id=f"{world} {asked} m={2 + k % 3} {SCHEDULES[(k + world) % len(SCHEDULES)]}",
        marks=[] if k % 8 == 0 and world == 3 else [pytest.mark.slow],
    )
    for world in (3, 4)
    for k, asked in enumerate(every_strategy(world))
    if (k // 2 + world) % 2
]  # fmt: skip
"""Every plan in each number of microbatches or another, and in both schedules.  One is `test_every_strategy`.

Every second one on the strictest transport, on which what ranks issue must end.
"""


@pytest.mark.slow
@pytest.mark.parametrize(("world", "asked", "number", "schedule", "strict"), thinned(MATRIX))
def test_every_strategy_in_microbatches_is_one_process(
    world: int, asked: Asked, number: int, schedule: str, strict: bool
) -> None:
    program = in_pieces(world, asked, number, schedule)
    strictest = strict_transports if last_together(program.plan) else queued_transports
    with strictest() if strict else nullcontext(), delays(seed=number):
        result = program.verify(steps=2, examples=5)
    assert result.holds and result.tolerance == 1e-9, str(result)


def last_together(plan: Plan) -> bool:
    """Whether all ranks of a role have examples in its last microbatch.

    One that has not begins to sum gradients in its own last one, before it sends the gradients of that to ranks for
    which the others of its role wait in turn: this ends where a sum does not hold up messages, as on NCCL, which has
    them in queues side by side.
    """
    return all(
        len({max(k for k in range(plan.microbatches) if any(plan.sizes_at(role, rank, k))) for rank in ranks}) == 1
        for role, ranks in plan.roles.items()
    )


@pytest.mark.slow
@sampled("strategy", ["single_device(microbatches=3)", "data_parallel(microbatches=2)"], one_in=2)
def test_one_rank_in_microbatches_returns_the_loss_of_the_whole_batch(strategy: str) -> None:
    program = compile_net(plain()[0], strategy, 1, batch=7)
    batches = batches_for(program)
    ((found, state),) = on_workers(program, lambda worker: train(worker, batches))
    losses, expected = one_process(deepcopy(plain()[0]), batches)
    assert found == pytest.approx(losses, rel=1e-5)
    assert_same(state, expected)
    assert program.verify(dtype=torch.float64).holds


@along(0, schedule=SCHEDULES, sizes=["1+1+1", "2+1+1"])
def test_norms_dropout_and_skip_connections_hold_in_three_roles(schedule: str, sizes: str) -> None:
    """BatchNorm normalises over each rank's piece; masks are those of one process."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b, self.c = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 5)
            self.drop = nn.Dropout(0.4)

        def forward(self, x: Tensor) -> Tensor:
            first = self.drop(torch.tanh(self.norm(self.a(x))))
            scores: Tensor = self.c(self.drop(torch.tanh(self.b(first))) + first)
            return scores

    world = sum(map(int, sizes.split("+")))
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randint(5, (8,))
    strategy = f"layer_separation(ranks={sizes}, microbatches=3, schedule={schedule})"
    pins = {"a": "conv", "norm": "conv", "b": "fc", "c": "fc2"}
    program = compiled(Net().double(), (x,), y, F.cross_entropy, world, strategy, pins=pins)
    with delays(seed=1):
        result = program.verify(steps=2)
    assert result.holds, str(result)
    assert any("BatchNorm normalises" in note for note in result.notes)


def weighted(scores: Tensor, target: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, 5, dtype=scores.dtype)
    return F.cross_entropy(scores, target, weight, ignore_index=2, label_smoothing=0.1)


def masked(scores: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(scores, target, reduction="none")
    mask = (target > 0).to(scores.dtype)
    return (each * mask).sum() / mask.sum() + scores.square().mean() + 0.1 * scores.sum()


@pytest.mark.slow
@along(
    1,
    strategy=["layer_separation(n_c=2,n_f=1)", "layer_separation(n_c=1,n_f=2)", "hybrid_single", "data_parallel"],
    loss=[weighted, masked],
)
def test_what_a_loss_divides_by_is_of_the_whole_batch(strategy: str, loss: Any) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5)).double()
    x, y = torch.randn(6, 6, dtype=torch.float64), torch.randint(5, (6,))
    asked = replace(parse_strategy(strategy), microbatches=3)
    pins = {} if strategy == "data_parallel" else {"0": "conv", "2": "fc"}
    result = compiled(model, (x,), y, loss, 3, asked, pins=pins).verify(steps=2)
    assert result.holds, str(result)


def test_evaluation_runs_whole_and_accumulation_adds_up() -> None:
    model, _ = plain()
    program = compile_net(model, "layer_separation(n_c=2, n_f=1, microbatches=2)")
    batches = batches_for(program, 4)
    found = on_workers(program, lambda worker: train(worker, batches), accumulate=2)
    losses, state = one_process(deepcopy(model), batches, accumulate=2)
    assert found[0][0] == pytest.approx(losses, rel=1e-5)
    assert_same(found[0][1], state)
    assert "microbatches" not in program.files["fc.py"].partition("def evaluate")[2]


@pytest.mark.slow
@in_pairs(
    3,
    strategy=["layer_separation(n_c=2, n_f=1, microbatches=3{})", "data_parallel(microbatches=4)"],
    schedule=SCHEDULES,
    sizes=[(4, 2), (1, 3), (1, 1)],
)
def test_a_batch_of_fewer_examples_than_microbatches_runs_in_fewer(
    strategy: str, schedule: str, sizes: tuple[int, ...]
) -> None:
    model, _ = plain()
    program = compile_net(model, strategy.format(f",schedule={schedule}"), 3 if "layer" in strategy else 2)
    batches = [batch_of(sum(sizes)) for _ in range(2)]
    losses, state = on_workers(program, lambda worker: train(worker, batches, sizes))[0]
    expected, trained = one_process(deepcopy(model), batches)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_same(state, trained)


REFUSED = {
    "data_parallel(microbatches=5)": "a rank of all reads 4 examples: take at most 4",
    "local_sgd(microbatches=2)": "units of a round run their batches whole",
    "data_parallel(microbatches=2,sync_batchnorm=True)": "normalises over the whole global batch at once",
    "modulo_shard(mp=2,scheme=B,microbatches=2)": "has microbatches of its own, by scheme 'B': take BK",
    "modulo_shard(mp=2,scheme=BK,updates=every,microbatches=2)": "updates in every microbatch",
    "data_parallel(microbatches=0)": "must be a whole number of at least 1",
    "data_parallel(schedule=gpipe)": "must be one of all_forward, 1f1b",
}


def test_what_cannot_run_in_microbatches_is_refused_by_name() -> None:
    for strategy, words in REFUSED.items():
        with pytest.raises(PlacementError, match=words):
            planned(2, strategy, norm="sync" in strategy)


def test_a_layer_multiplied_late_where_ranks_divide_what_one_reads_is_refused() -> None:
    program = planned(3, "layer_separation(n_c=1, n_f=2)", pins={"conv": "conv", "fc*": "fc"})
    late = {
        name: replace(place, sync="late_multiply") if name.startswith("fc") else place
        for name, place in program.plan.placements.items()
    }
    plan = replace(program.plan, placements=late, microbatches=2)
    found = list(sync_misfits(program.program, plan))
    assert len(found) == 3 and all("some have no examples in a microbatch" in problem for problem in found)


class WithoutGradients(nn.Module):
    """Several values without a gradient cross between the roles."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.a, self.b, self.aux = nn.Linear(8, 8), nn.Linear(8, 10), nn.Linear(10, 6), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x**2 * 0.1
        return self.b(F.relu(self.a(h * torch.where(self.g(h) > 0, 1.0, 0.5)))), self.aux(h)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        (2, "hybrid_single(microbatches=2)"),
        (2, "hybrid_single(microbatches=3,schedule=1f1b)"),
        pytest.param(3, "layer_separation(ranks=1+1+1,microbatches=2)", marks=pytest.mark.slow),
    ],
)
def test_values_without_a_gradient_wait_for_their_turn_to_be_sent(world: int, strategy: str) -> None:
    def loss(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(outputs[0], target) + F.cross_entropy(outputs[1], target % 4)

    x, y = torch.randn(6, 8, dtype=torch.float64), torch.randint(6, (6,))
    result = compiled(WithoutGradients().double(), (x,), y, loss, world, strategy).verify(steps=1)
    assert result.holds, str(result)
