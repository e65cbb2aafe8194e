"""The price and the memory of independent subnets, against the formulas of the paper's section 3.4."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch.nn.functional as F
from torch import nn

from benchmarks.papers.ist import Symbols, ist_flops, ist_nbytes
from splitc.cost_models.network.alpha_beta import all_to_all, ring_all_reduce
from splitc.errors import PlacementError
from splitc.ir.cluster import Cluster
from splitc.ir.device import Link
from splitc.ir.plan import Plan
from splitc.ir.program import Program
from splitc.passes.place import Place
from splitc.passes.planner.price_plan import memory_needed
from splitc.passes.planner.request import Request
from splitc.passes.planner.strategy import Strategy
from splitc.passes.rewriting import lower_unchecked
from splitc.specialise import Settings, specialise
from splitc.strategies.independent_subnets import IndependentSubnets
from tests.cost_models.simulation.test_timeline import toy
from tests.support.compiled import analyse, class_batch

N = (160, 320, 320, 32)
BATCH = 8


@cache
def network() -> Program:
    """A perceptron with normalised hidden layers."""
    modules: list[nn.Module] = []
    for a, b in pairwise(N):
        modules += [nn.Linear(a, b, bias=False), *([nn.BatchNorm1d(b, affine=False), nn.ReLU()] if b > N[-1] else [])]
    x, y = class_batch((BATCH, N[0]), classes=N[-1])
    return analyse(nn.Sequential(*modules), (x,), y, F.cross_entropy)


def plan(cluster: Cluster, world: int, strategy: Strategy, memory: float | None = None) -> Plan:
    return Place(cluster, world, strategy, memory=memory).run(network()).plan


@pytest.mark.slow
@pytest.mark.parametrize(("world", "J"), [(2, 10), (4, 1), (8, 10)])
def test_at_a_low_bandwidth_a_step_takes_what_3_4_says_is_sent(world: int, J: int) -> None:
    """Two all-to-alls of all slices with their momentum, and the loss, in J steps."""
    slow = toy(1e3, latency=1e-4)
    round_nbytes = J * ist_nbytes(Symbols(N, BATCH, J), world)
    exchanges = 2 * all_to_all(2 * round_nbytes, world, slow.link) + ring_all_reduce(8, world, slow.link)
    found = plan(slow, world, IndependentSubnets(local_steps=J))
    assert found.step_seconds == pytest.approx(exchanges / J, rel=1e-3)
    assert found.samples_per_second == pytest.approx(world * BATCH * J / exchanges, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_rank_computes_a_share_of_each_layer_by_the_shapes_of_its_slices(world: int) -> None:
    at_once = replace(toy(), link=Link(1e18, 0.0))
    request, found = Request(network(), at_once, world), plan(at_once, world, IndependentSubnets(local_steps=10))
    first, inner, last = (name for name in found.placements if request.gradient(name))
    of = {name: 1 / world**2 if name == inner else 1 / world for name in found.placements}
    for name, seconds in found.prediction.layer_seconds.items():
        assert seconds == pytest.approx(of[name] * request.seconds(name, BATCH, world), rel=0.05), name
    flops = ist_flops(Symbols(N, BATCH, 10), world) / world  # of one site
    shares = sum(of[name] * a * b for name, (a, b) in zip((first, inner, last), pairwise(N), strict=True))
    assert flops == pytest.approx(4 * BATCH * shares)


@pytest.mark.slow
def test_the_price_is_the_simulation_of_the_program_that_runs() -> None:
    for bandwidth in (1e4, 1e5, 1e6):
        program = specialise(network(), Settings(4, cluster=toy(bandwidth), strategy=IndependentSubnets(local_steps=4)))
        assert program.plan.step_seconds == pytest.approx(program.plan.prediction.simulated_seconds, rel=1e-9)


def needed(world: int) -> tuple[float, list[float]]:
    """Bytes that a rank needs, and those of the three matrices."""
    request, found = Request(network(), toy(), world), plan(toy(), world, IndependentSubnets(local_steps=4))
    total, layers = memory_needed(request, lower_unchecked(network().placed(found)))
    return total, [layers[name] for name in layers if request.gradient(name)]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_rank_needs_what_it_owns_and_its_slices(world: int) -> None:
    """Parameters with momentum: 1/n owned; 1/n or 1/n^2 of each matrix in a slice, with gradient and momentum."""
    total, layers = needed(world)
    for nbytes, (a, b), share in zip(layers, pairwise(N), (1 / world, 1 / world**2, 1 / world), strict=True):
        assert nbytes == pytest.approx(4 * a * b * (2 / world + 3 * share), rel=0.15), "and activations"
    assert total < sum(layers) * 2, "with two buffers of the slices"


@pytest.mark.slow
def test_a_model_that_does_not_fit_two_ranks_fits_four() -> None:
    limit = (needed(2)[0] + needed(4)[0]) / 2
    assert plan(toy(), 4, IndependentSubnets(local_steps=4), memory=limit).world == 4
    with pytest.raises(PlacementError, match="of memory and has"):
        plan(toy(), 2, IndependentSubnets(local_steps=4), memory=limit)
