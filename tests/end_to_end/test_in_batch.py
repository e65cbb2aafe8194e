"""Losses and models that couple the examples of a batch: they run where the whole batch is gathered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.checks.graph import every_layer_placed
from splitc.errors import PlacementError
from splitc.ir.placements import Grouping, LayerPlacement, Placement
from splitc.ir.program import Program
from splitc.passes.planner.whole_batch import with_whole_batch
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
    "parameter_server(beside=True)": 3,
    "modulo_shard(mp=4,scheme=BK)": 4,
    "layer_separation(ranks=2+1+1)": 4,
    "auto": 4,
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


class Views(nn.Module):
    """SimCLR: a trunk with BatchNorm and dropout over the concatenated views, all pairs but those with themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.b, self.c = nn.Linear(16, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.norm(self.a(torch.cat([x[:, :6], y])))
        z = F.normalize(self.c(self.b(self.drop(z).relu()).tanh()), dim=1)
        n = z.size(0) // 2
        similar = (z @ z.t() / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
        return F.cross_entropy(similar, torch.cat([torch.arange(n) + n, torch.arange(n)]))


class Interleaved(Towers):
    """SupCon: stacked views, labels and masks of the batch size; a term of shares of the batch beside."""

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        n = a.size(0)
        z = torch.cat(torch.unbind(F.normalize(torch.stack([a, b], 1), dim=2), dim=1))
        same = torch.eye(n, dtype=z.dtype).repeat(2, 2) - torch.eye(2 * n)
        logits = z @ z.t() / 0.3 - 1e4 * torch.eye(2 * n)
        return (a.square() / n).sum(1).sum() - (same * logits.log_softmax(1)).sum(1).mean()


class Numbered(Towers):
    """Labels and weights by position in the batch."""

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        n = a.size(0)
        label = (a.argmax(1) > 1).long() + 2 * torch.arange(n)
        weight = 1 + (torch.arange(n).to(a) / n + a.sum(1) * 0).detach()
        same = label[:, None] // 2 == label[None] // 2
        return -((a @ b.t()).log_softmax(1) * same).sum(1).mul(weight).mean()


class Evaluated(Towers):
    """Another model in evaluation."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) if self.training else super().forward(x * 2, y)

    def loss(self, a: Tensor, b: Tensor) -> Tensor:
        return (a.t() @ a - b.t() @ b).square().mean() / a.size(0)


MODELS: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each
    for each in (
        TwoTowers, Centred, Clamped, Pairs, Offset, Redundant, Views, Interleaved, Numbered, Evaluated
    )
}  # fmt: skip


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


CELLS = [(name, strategy) for k, name in enumerate(MODELS) for strategy in [*STRATEGIES][k % 6 :: 6]]
"""Every model under two strategies, every strategy with a model or two."""


@sampled(("name", "strategy"), CELLS, one_in=len(CELLS))
def test_it_trains_as_one_process_does(name: str, strategy: str) -> None:
    try:
        made = program(name, strategy)
    except PlacementError as error:
        assert "in_batch" in str(error) or "no linear layer" in str(error) or "only one layer" in str(error)
        return
    for examples in (8, 5):
        result = made.verify(steps=2, examples=examples)
        assert result.holds, result


@pytest.mark.slow
def test_losses_apart_from_the_coupling_stay_where_they_were_and_what_is_gathered_has_a_price_and_a_reason() -> None:
    made = program("TwoTowers", "data_parallel")
    assert {name: place.role for name, place in made.plan.placements.items()} == {
        **dict.fromkeys(("left.0", "left.2", "right.0", "right.2"), "all"),
        "in_batch": "in_batch",
    }
    assert made.plan.groups == {"in_batch": Grouping(3, "BK")} and made.plan.exact
    assert made.plan.prediction.layer_seconds["in_batch"] > 0
    assert "in_batch" in made.report() and "test_in_batch.py" in made.report()
    assert made.verify(steps=1, examples=4).loss_error <= 1e-12
    alone = program("TwoTowers", "layer_separation(n_c=3, n_f=1)").plan
    assert alone.placements["in_batch"].role == "head" and not alone.groups


def test_a_plan_whose_ranks_see_parts_of_the_batch_is_refused() -> None:
    known = program("TwoTowers", "data_parallel").program
    parted = replace(known.plan, groups={})
    assert any("needs the whole batch" in line for line in every_layer_placed(replace(known, plan=parted)))


@pytest.mark.slow
def test_microbatches_of_a_loss_over_the_batch_are_refused_by_name() -> None:
    model, known = analysed("Views")
    for strategy in ("data_parallel(microbatches=2)", "hybrid_single(microbatches=3)", "late_multiply(microbatches=2)"):
        with pytest.raises(
            PlacementError, match=r"microbatches is \d, but in_batch needs the whole batch at once: take"
        ):
            compiled(model, batch(), None, None, 2, strategy, analysed=known)


@pytest.mark.slow
def test_microbatches_of_its_own_choice_are_one() -> None:
    """auto never takes what the layer cannot have, on clusters where it takes most for other models."""
    model, known = analysed("TwoTowers")
    for cluster in ("v100-nvlink-25gbe", "h100-nvlink-400ib"):
        made = compiled(model, batch(), None, None, 4, "auto", analysed=known, cluster=cluster)
        assert made.plan.microbatches == 1 and made.verify(steps=1).holds


class TimeFirst(nn.Module):
    """Sequences flattened time first between layers, and in one state of a group unflattened."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = nn.Linear(6, 12), nn.Linear(12, 10), nn.Linear(10, 6), nn.Linear(6, 5)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x[:, :6]
        values = torch.stack([x, y, x * y])
        time, examples, features = values.shape
        z = self.a(values.reshape(time * examples, features)).relu()
        z = self.c(self.drop(self.b(z).relu())).view(time, examples, -1).tanh().cumsum(0)
        scores: Tensor = self.head(z.reshape(time * examples, -1))
        return F.cross_entropy(scores, y.argmax(1).remainder(5).repeat(time))


def columns(group: int, *layers: str) -> dict[str, Placement]:
    return dict.fromkeys(layers, Placement(holding="sharded", group=group, split="columns"))


ROWS_APART: list[tuple[str, dict[str, Any]]] = [
    ("layer_separation(n_c=2, n_f=2)", {}),
    ("modulo_shard(mp=2,scheme=B)", columns(2, "b")),
    ("modulo_shard(mp=4,scheme=BK)", columns(4, "b", "c")),
    ("modulo_shard(mp=2)", {**columns(2, "b"), "c": Placement(holding="sharded", group=2, split="rows")}),
    ("layer_separation(n_c=2, n_f=2, microbatches=2)", {}),
    ("modulo_shard(mp=2,microbatches=3)", {}),
]


@pytest.mark.slow
@sampled(("strategy", "pins"), ROWS_APART, one_in=6)
def test_rows_that_lie_apart_travel_by_example(strategy: str, pins: dict[str, Any]) -> None:
    torch.manual_seed(0)
    made = compiled(TimeFirst().double(), batch(), None, None, 4, strategy, pins=pins)
    result = made.verify(steps=2, examples=29)
    assert result.holds, result


class Counting(Towers):
    """A value of each example that depends on how many there are, between layers."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        share = (hidden.square() / x.size(0)).sum(1)
        return (share + self.third(self.second(hidden).tanh()).square().sum(1) / x.size(0)).sum()


@pytest.mark.slow
def test_a_value_that_depends_on_how_many_examples_a_rank_has_is_not_cut() -> None:
    torch.manual_seed(0)
    model = Counting().double()
    with pytest.raises(PlacementError, match="depends on which examples a rank has"):
        compiled(model, batch(), None, None, 3, "layer_separation(n_c=2, n_f=1)")
    assert compiled(model, batch(), None, None, 3, "data_parallel").verify(examples=7).holds


def test_the_layer_has_no_state_of_the_role_that_it_leaves() -> None:
    _, known = analysed("TwoTowers")
    plan = program("TwoTowers", "data_parallel").plan
    whole = {**plan.placements, "in_batch": LayerPlacement("all", "replicated", "none", state="batch")}
    parted = replace(
        plan,
        roles={"all": plan.roles["all"]},
        batch_offsets={"all": plan.batch_offsets["all"]},
        groups={"all": Grouping(3, "BK")},
        placements=whole,
    )
    assert with_whole_batch(known, parted).sees_whole_batch("in_batch")
