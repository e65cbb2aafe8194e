"""Losses and models that couple the examples of a batch: they run where the whole batch is gathered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.checks.graph import every_layer_placed
from splitc.errors import PlacementError
from splitc.ir.placements import Grouping
from splitc.ir.plan import Plan
from splitc.ir.program import Program
from tests.support.compiled import analyse, compiled
from tests.support.sampling import sampled

STRATEGIES = {
    "single_device": 2,
    "data_parallel": 3,
    "layer_separation(n_c=3, n_f=1)": 4,
    "layer_separation(n_c=2, n_f=2)": 4,
    "hybrid_single": 3,
    "modulo_shard(mp=2)": 4,
    "late_multiply": 3,
    "parameter_server(servers=1)": 4,
}
"""Strategy -> ranks."""


class TwoTowers(nn.Module):
    """In-batch negatives, as CLIP has them."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 12))
        self.right = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 12))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = F.normalize(self.left(x), dim=1) @ F.normalize(self.right(y), dim=1).t() * self.scale.exp()
        target = torch.arange(x.size(0), device=x.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


class Towers(nn.Module):
    def __init__(self, hidden: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 24), nn.Linear(24, 16), nn.Linear(16, 4)
        self.hidden = hidden

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores: Tensor = self.third(self.hidden(self.second(self.first(x).relu())))
        return self.loss(scores, self.third(self.second(self.first(y.repeat(1, 2)[:, :8]).tanh())))

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        return (a - b).square().mean()


class Centred(Towers):
    """Statistics of the batch in the middle of the model."""

    def __init__(self) -> None:
        super().__init__(hidden=lambda h: (h - h.mean(0)) / (h.var(0) + 1e-3).sqrt())


class Clamped(Towers):
    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        return (a - b).square().mean().clamp(max=0.2) + (a.square().mean() - 0.1).abs()


class Pairs(Towers):
    """A loss over all pairs of examples, with a hardest negative."""

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        distances = torch.cdist(a, b)
        return (distances.diagonal() - distances.topk(2, dim=1, largest=False).values[:, 1] + 1).relu().mean()


class Offset(Towers):
    """A value that is gathered for its dtype alone."""

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        distances = (a - b).square().sum(1)
        return torch.addcdiv(a.new_zeros(()), distances.sum(), (distances > 1).sum() + 1.0)


class Redundant(Towers):
    """Barlow twins: the cross-correlation of features over the batch."""

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
        return (a.t() @ b / a.size(0) - torch.eye(4, dtype=a.dtype)).square().sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each for each in (TwoTowers, Centred, Clamped, Pairs, Offset, Redundant)
}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(6, width, generator=generator, dtype=torch.float64) for width in (8, 6))  # type: ignore[return-value]


@cache
def analysed(name: str) -> tuple[nn.Module, Program]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    return model, analyse(model, batch())


def program(name: str, strategy: str, **options: Any) -> Any:
    model, known = analysed(name)
    return compiled(model, batch(), None, None, STRATEGIES[strategy], strategy, analysed=known, **options)


@sampled(("name", "strategy"), [(name, strategy) for name in MODELS for strategy in STRATEGIES], one_in=5, ids=str)
def test_it_trains_as_one_process_does(name: str, strategy: str) -> None:
    try:
        made = program(name, strategy)
    except PlacementError as error:
        assert "in_batch" in str(error) or "no linear layer" in str(error) or "only one layer" in str(error)
        return
    for examples in (8, 5):
        result = made.verify(examples=examples)
        assert result.holds, result


def test_losses_apart_from_the_coupling_stay_where_they_were() -> None:
    plan = program("TwoTowers", "data_parallel").plan
    assert {name: place.role for name, place in plan.placements.items()} == {
        **dict.fromkeys(("left.0", "left.2", "right.0", "right.2"), "all"),
        "in_batch": "in_batch",
    }
    assert plan.groups == {"in_batch": Grouping(3, "BK")}
    assert plan.exact


def test_one_rank_that_has_the_whole_batch_needs_no_gathering() -> None:
    plan = program("TwoTowers", "layer_separation(n_c=3, n_f=1)").plan
    assert plan.placements["in_batch"].role == "head"
    assert not plan.groups


def test_a_plan_whose_ranks_see_parts_of_the_batch_is_refused() -> None:
    known = program("TwoTowers", "data_parallel").program
    parted = replace(known.plan, groups={})
    assert any("needs the whole batch" in line for line in every_layer_placed(replace(known, plan=parted)))


def test_the_price_holds_the_gathering_and_the_whole_batch_on_every_rank() -> None:
    _, known = analysed("TwoTowers")
    seconds = program("TwoTowers", "data_parallel").plan.prediction.layer_seconds
    assert seconds["in_batch"] > 0
    assert known.in_batch == "in_batch"


def test_the_report_says_what_needs_the_whole_batch_and_why() -> None:
    text = program("TwoTowers", "data_parallel").report()
    assert "in_batch" in text
    assert "test_in_batch.py" in text


def test_a_plan_from_a_file_gathers_too() -> None:
    first = program("TwoTowers", "data_parallel")
    again = Plan.from_json(first.plan.to_json())
    assert again == first.plan
    assert again.hash == first.plan.hash


def test_every_rank_reports_the_loss_of_the_whole_batch() -> None:
    result = program("TwoTowers", "data_parallel").verify(steps=1, examples=4)
    assert result.loss_error <= 1e-12
