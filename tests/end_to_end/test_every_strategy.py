"""The ranks of every exact strategy, and of mixtures, train exactly as one process does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.ir.placements import Placement
from splitc.verify.verify import Verification
from tests.support.compiled import compiled
from tests.support.every_strategy import Asked, everywhere, group_size, planned
from tests.support.models import CASES
from tests.support.norm_kernels import kernels_on_the_cpu
from tests.support.sampling import along, sampled


def assert_exact(result: Verification, dtype: torch.dtype = torch.float64) -> None:
    assert result.holds and result.tolerance == (1e-9 if dtype == torch.float64 else 1e-5), str(result)


# -- the matrix --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "asked"), everywhere(3, one_in=8)[::2] + everywhere(slow=(4,))[1::2])
def test_every_strategy_and_mixture_is_one_process(world: int, asked: Asked) -> None:
    assert_exact(planned(world, asked, torch.float64).verify(steps=2))


@pytest.mark.parametrize(("world", "asked"), everywhere(slow=(2,))[::2])
def test_so_it_is_in_float32_on_two_ranks(world: int, asked: Asked) -> None:
    assert_exact(planned(world, asked).verify(steps=2), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_updates_in_every_turn_are_another_training_and_say_so(world: int) -> None:
    """SplitBrain 3.1 updates the fc layers K times a step; the batches of these updates are smaller."""
    program = planned(world, f"modulo_shard(mp={world},updates=every)", torch.float64)
    assert not program.plan.exact
    result = program.verify(steps=2)
    assert not result.holds and result.parameter_error < 0.1, str(result)


# -- models in several roles -------------------------------------------------------------------------------------------


@cache
def case(name: str) -> tuple[nn.Module, Any, Any, Any]:
    """A model that tests share, in float64."""
    torch.manual_seed(1)
    return CASES[name].make(torch.float64)


@pytest.mark.slow
@along(1, sizes=["1+1+1", "2+1+1"], cut=["layer2.conv2", "layer1.conv2"])
def test_a_cut_through_a_skip_connection_sends_both_branches(sizes: str, cut: str) -> None:
    before = ["conv1", "layer1.conv1", "layer1.bn1", "layer1.conv2", "layer1.bn2", "layer2.*"]
    pins = dict.fromkeys(before[: before.index("layer2.*" if cut.startswith("layer2") else cut)], "conv") | {cut: "fc"}
    if cut.startswith("layer2"):
        pins = {"layer1.*": "conv", "layer2.conv1": "conv", "layer2.bn1": "conv", cut: "fc"}
    world = sum(map(int, sizes.split("+")))
    program = compiled(*case("resnet"), world, f"layer_separation(ranks={sizes})", pins={**pins, "fc": "fc2"})
    crossing = [c.name for c in program.program.stage("stage0").sends if c.consumer == "stage1" and c.gradient]
    assert len(crossing) == 2, "what the block computed and what goes around it"
    assert_exact(program.verify(steps=2))


@pytest.mark.slow
@along(
    1,
    name=["branches", "recurrent", "encoder", "functional", "frozen_trunk"],
    strategy=["layer_separation(ranks=1+1+1)", "hybrid_single", "modulo_shard(mp=3,scheme=BK)"],
)
def test_models_of_many_kinds_run_in_several_roles(name: str, strategy: str) -> None:
    """Several inputs, layers that run twice, parameters used by functions, frozen trunks."""
    assert_exact(compiled(*case(name), 3, strategy).verify(steps=2))


# -- BatchNorm over the whole batch ------------------------------------------------------------------------------------

NORMED: list[tuple[int, str, dict[str, Any]]] = [
    (3, "data_parallel(sync_batchnorm=True)", {}),
    (3, "layer_separation(n_c=2,n_f=1,sync_batchnorm=True)", {"conv": "conv", "norm": "conv", "fc8": "fc"}),
    (2, "hybrid_single(sync_batchnorm=True)", {"conv": "conv", "norm": "conv", "fc8": "fc"}),
    (4, "modulo_shard(mp=2,scheme=B/K,sync_batchnorm=True)", {"fc6": Placement(holding="sharded", group=2)}),
    (3, "late_multiply(sync_batchnorm=True)", {}),
]


@sampled(("world", "strategy", "pins"), NORMED, NORMED[1:2])
def test_synchronised_norms_are_those_of_one_process_over_the_whole_batch(
    world: int, strategy: str, pins: dict[str, Any]
) -> None:
    program = planned(world, strategy, torch.float64, norm=True, pins=pins, global_batch=3 * world + 1)
    assert program.plan.synchronised and "comm.batch_norm(" in "".join(program.files.values())
    result = program.verify(steps=2)
    assert_exact(result)
    assert not any("BatchNorm normalises" in note for note in result.notes)
    with kernels_on_the_cpu():
        assert_exact(program.verify(steps=2))


# -- numbers that do not divide ----------------------------------------------------------------------------------------


@pytest.mark.slow
@along(2, at=[(4, 9), (2, 5), (3, 7), (4, 11)], scheme=["B/K", "B", "BK"])
def test_batches_and_features_that_groups_do_not_divide_are_one_process(at: tuple[int, int], scheme: str) -> None:
    world, batch = at
    size = group_size(world)
    pins = {"fc*": Placement(holding="sharded", group=size, split="columns")}
    program = planned(world, f"modulo_shard(mp={size},scheme={scheme})", torch.float64, pins=pins, global_batch=batch)
    assert len(set(program.plan.local_batches)) == 2
    assert_exact(program.verify(steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hybrid_single", "late_multiply", "layer_separation(ranks=2+1+1)"])
def test_uneven_global_batches_are_one_process(strategy: str) -> None:
    assert_exact(planned(4, strategy, torch.float64, global_batch=7).verify(steps=2))


ALL_OF_4 = {"*": Placement(holding="sharded", group=4, split="columns")}


class Two(nn.Module):
    """Two linear layers, and nothing before them."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.b(F.relu(self.a(x)))
        return scores


@pytest.mark.slow
@pytest.mark.parametrize("classes", [1, 3])
def test_a_layer_with_fewer_features_than_ranks_leaves_some_with_none_of_them(classes: int) -> None:
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, classes, dtype=torch.float64)
    strategy = "modulo_shard(mp=4,scheme=BK)"
    assert_exact(compiled(Two(classes).double(), (x,), y, F.mse_loss, 4, strategy, pins=ALL_OF_4).verify(steps=2))


# -- values with a time dimension, and losses --------------------------------------------------------------------------


class Timed(nn.Module):
    """Linear layers on (batch, time, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 7)
        self.head = nn.Linear(7, 5, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        scores: Tensor = self.head(F.gelu(self.down(F.gelu(self.up(x)))))
        return scores


def weighted(scores: Tensor, target: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, 5, dtype=scores.dtype)
    return F.cross_entropy(scores.flatten(0, 1), target.flatten(), weight, ignore_index=2)


def summed(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="sum")


def squared(scores: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(scores.sum(-1), target.to(scores.dtype))


def masked(scores: Tensor, target: Tensor) -> Tensor:
    """A quotient of two sums."""
    each = F.cross_entropy(scores.transpose(1, 2), target, reduction="none")
    mask = (target > 0).to(scores.dtype)
    return (each * mask).sum() / mask.sum()


TIMED = ["late_multiply", "hybrid_single", *(f"modulo_shard(mp=2,scheme={s})" for s in ("BK", "B", "B/K"))]


@pytest.mark.slow
@along(1, strategy=TIMED[::-1], loss=[masked, weighted, summed, squared])
def test_every_loss_of_values_with_a_time_dimension_is_one_process(strategy: str, loss: Callable[..., Tensor]) -> None:
    """In turns too: each turn's part of a mean, of a weighted mean, of a sum, and of a quotient."""
    torch.manual_seed(2)
    x, y = torch.randint(11, (4, 5)), torch.randint(5, (4, 5))
    program = compiled(Timed().double(), (x,), y, loss, 4, strategy, global_batch=14)
    assert_exact(program.verify(steps=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["modulo_shard(mp=2,scheme=B)", "modulo_shard(mp=4)", "modulo_shard(mp=4,scheme=BK)"]
)
def test_a_norm_of_a_head_that_works_in_turns_counts_and_normalises_each_turn(strategy: str) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5)).double()
    x, y = torch.randn(8, 4, 4, dtype=torch.float64), torch.randint(5, (8,))
    assert_exact(compiled(model, (x,), y, F.cross_entropy, 4, strategy).verify(steps=2))
