"""State that a forward changes without gradient: momentum encoders, queues, centres; alike on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.errors import PlacementError
from splitc.ir.placements import Placement
from splitc.runtime.worker import Worker
from tests.support.capturing import validated
from tests.support.compiled import compiled
from tests.support.ranks import assert_same, on_workers, one_process, part_of, train
from tests.support.sampling import along, sampled

M = 0.9


def in_place(pk: Any, pq: Any) -> None:
    pk.mul_(M).add_(pq, alpha=1 - M)


def sliced(pk: Any, pq: Any) -> None:
    pk[1:].mul_(M).add_(pq[1:], alpha=1 - M)


class Momentum(nn.Module):
    """A momentum encoder, updated before or after it is used; with a queue or a centre where asked."""

    def __init__(self, mix: Any = in_place, after: bool = False, keep: Any = None, norm: bool = False) -> None:
        super().__init__()
        self.q, self.k = (
            nn.Sequential(
                nn.Linear(6, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.ReLU(), nn.Linear(8, 5)
            ).requires_grad_(each)
            for each in (True, False)
        )
        self.head = nn.Linear(5, 5)
        self.mix, self.after, self.keep = mix, after, keep
        self.queue = nn.Buffer(torch.randn(5, 48))
        self.at = nn.Buffer(torch.zeros(1, dtype=torch.long))
        self.centre = nn.Buffer(torch.zeros(1, 5))

    @torch.no_grad()
    def update(self) -> None:
        keys: list[Tensor] = list(self.k.parameters())
        queries: list[Tensor] = list(self.q.parameters())
        if self.mix is None:
            torch._foreach_mul_(keys, M)
            torch._foreach_add_(keys, queries, alpha=1 - M)
            return
        for pk, pq in zip(keys, queries, strict=True):
            self.mix(pk, pq)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training and not self.after:
            self.update()
        z = self.head(self.q(x))
        with torch.no_grad():
            t = self.k(y)
        if self.training and self.after:
            self.update()
        return 2 - 2 * F.cosine_similarity(z, t, dim=-1) if self.keep is None else self.keep(self, z, t)


def queue(m: Any, z: Tensor, t: Tensor) -> Tensor:
    scores = torch.cat([(z * t).sum(1, keepdim=True), z @ m.queue.clone().detach()], 1)
    if m.training:
        with torch.no_grad():
            m.queue[:, (m.at + torch.arange(len(t))) % 48] = t.T
            m.at[0] = (m.at[0] + t.shape[0]) % 48
    return scores.logsumexp(1) - scores[:, 0]


def shifted(m: Any, z: Tensor, t: Tensor) -> Tensor:
    before = m.queue
    with torch.no_grad():
        m.queue = torch.cat([m.queue[:, len(t) :], t.T], 1)
    return (z @ before).logsumexp(1) - (z @ m.queue).mean(1)


def centre(m: Any, z: Tensor, t: Tensor) -> Tensor:
    wanted = ((t - m.centre) / 0.04).softmax(-1)
    with torch.no_grad():
        m.centre.mul_(M).add_(t.mean(0, keepdim=True), alpha=1 - M)
    return -(wanted * z.log_softmax(-1)).sum(-1)


def weight_zero(out: Tensor, target: Tensor) -> Tensor:
    return (out + 0 * target).mean()


def program_of(model: nn.Module, strategy: str = "data_parallel", world: int = 2, **options: Any) -> CompiledProgram:
    example = torch.randn(8, 6), torch.randn(8, 6)
    return compiled(model, example, torch.randn(8), weight_zero, world, strategy, **options)


def batches_of(program: CompiledProgram, number: int = 4) -> list[tuple[Tensor, ...]]:
    size = program.plan.global_batch
    return [(torch.randn(size, 6), torch.randn(size, 6), torch.randn(size)) for _ in range(number)]


def assert_trains_alike(model: nn.Module, program: CompiledProgram, accumulate: int = 1) -> None:
    batches = batches_of(program)
    losses, state = on_workers(program, lambda worker: train(worker, batches), accumulate=accumulate)[0]
    expected, own = one_process(copy.deepcopy(model), batches, loss=weight_zero, accumulate=accumulate)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert_same(state, own, 1e-4)


PLANS: dict[str, dict[str, Any]] = {
    "data_parallel(microbatches=2)": {},
    "layer_separation(microbatches=2)": {"world": 3},
    "hybrid_single": {},
    "late_multiply": {},
    "modulo_shard": {"pins": {"head": Placement(group=2, split="rows")}},
    "parameter_server": {"world": 3},
}


@pytest.mark.slow
@sampled("strategy", PLANS, one_in=6)
def test_a_momentum_encoder_is_updated_once_a_step_on_every_rank(strategy: str) -> None:
    torch.manual_seed(0)
    model = Momentum()
    assert_trains_alike(model, program_of(model, strategy, **PLANS[strategy]), accumulate=2)


@pytest.mark.slow
@along(1, keep=[queue, shifted, centre], strategy=["hybrid_single", "data_parallel"])
def test_what_is_kept_of_a_batch_is_that_of_the_whole_batch_on_every_rank(keep: Any, strategy: str) -> None:
    torch.manual_seed(0)
    model = Momentum(keep=keep)
    program = program_of(model, strategy, world=3)
    assert program.plan.roles.keys() & {"in_batch", "head"}
    assert_trains_alike(model, program, accumulate=2)


@pytest.mark.slow
def test_evaluation_reads_what_training_keeps_and_keeps_nothing() -> None:
    torch.manual_seed(0)
    model = Momentum(keep=queue)
    program = program_of(model, "hybrid_single", world=3)
    batches = batches_of(program)

    def evaluated(worker: Worker) -> tuple[float, float, Any]:
        train(worker, batches)
        own = part_of(worker, batches[0], program.plan.local_batches)
        return float(worker.evaluate(*own)), float(worker.evaluate(*own)), worker.state_dict()

    first, second, state = on_workers(program, evaluated)[0]
    trained = copy.deepcopy(model)
    _, expected = one_process(trained, batches, loss=weight_zero)
    assert_same(state, expected, 1e-4)
    assert first == second
    with torch.no_grad():
        assert first == pytest.approx(float(weight_zero(trained.eval()(*batches[0][:2]), batches[0][2])), rel=1e-4)


def by_position(m: Any, z: Tensor, t: Tensor) -> Tensor:
    at = int(m.at)
    with torch.no_grad():
        m.queue[:, at : at + len(t)] = t.T
        m.at[0] = (at + len(t)) % 48
    return (z @ m.queue.clone()).logsumexp(1)


@pytest.mark.slow
def test_a_queue_at_a_plain_position_is_own_code_that_has_the_whole_batch() -> None:
    torch.manual_seed(0)
    model = Momentum(keep=by_position)
    assert_trains_alike(model, program_of(model))


@pytest.mark.slow
def test_rounds_are_refused_for_units_that_would_keep_unlike_values() -> None:
    with pytest.raises(PlacementError, match=r"in rounds units would keep unlike values in k.0.bias, k.0.weight"):
        program_of(Momentum(), "local_sgd(period=2)")


class Centred(nn.Module):
    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(5))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        value = (out - self.centre).square().mean()
        self.centre = self.centre * M + out.detach().mean(0) * (1 - M)
        return value


@pytest.mark.slow
def test_a_loss_may_keep_a_centre() -> None:
    example = torch.randn(8, 6), torch.randn(8, 6)
    program = compiled(Momentum(keep=lambda m, z, t: z), example, torch.randn(8), Centred(), 2, "data_parallel")
    assert program.verify(dtype=torch.float64).holds


@pytest.mark.slow
@along(mix=[None, sliced], after=[False, True])
def test_a_momentum_encoder_is_captured_however_it_is_written(mix: Callable[..., None] | None, after: bool) -> None:
    example = torch.randn(4, 6), torch.randn(4, 6)
    program = validated(Momentum(mix, after), example, torch.randn(4), weight_zero)
    assert not program.coupled
