"""The costs of independent subnet training against subnets that are really drawn, and the curves of figure 2."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from benchmarks.papers.ist import FIGURE_2, Symbols, data_parallel_flops, data_parallel_nbytes, ist_flops, ist_nbytes
from examples.mlp import MLP
from splitc.errors import CostError
from splitc.ir.pass_manager import run_pass
from splitc.ir.program import Program
from splitc.passes.count_costs import CountCosts
from tests.support.capturing import capture
from tests.support.op_sums import flops_of

SITES = [1, 2, 4, 8, 16, 40]


@cache
def network() -> Program:
    """The network of figure 2."""
    inputs, *hidden, labels = FIGURE_2.N
    given = torch.randn(4, inputs), torch.randint(labels, (4,))
    with torch.device("meta"):
        model = MLP(inputs, hidden, labels)
    program = capture(model.to_empty(device="cpu"), (given[0],), given[1], F.cross_entropy)
    return run_pass(CountCosts(), program)


def subnets(N: tuple[int, ...], n: int, seed: int) -> list[list[int]]:
    """For each of n sites, the weights of its matrices: hidden neurons are dealt out, the ends are everybody's."""
    draw = random.Random(seed)
    sizes = [[N[0]] * n]
    for neurons in N[1:-1]:
        owner = [k % n for k in range(neurons)]
        draw.shuffle(owner)
        sizes.append([owner.count(site) for site in range(n)])
    sizes.append([N[-1]] * n)
    return [[a * b for a, b in pairwise([size[site] for size in sizes])] for site in range(n)]


def test_ist_sends_and_computes_what_drawn_subnets_hold() -> None:
    for N in (FIGURE_2.N, (30, 80, 10), (7, 80, 160, 3), (5, 40, 80, 120, 240, 9)):
        for n in SITES:
            s = Symbols(N, B=32, J=5)
            drawn = sum(map(sum, subnets(N, n, seed=n)))
            assert ist_nbytes(s, n) == pytest.approx(4 * drawn / 5)
            assert ist_flops(s, n) == pytest.approx(4 * 32 * drawn)


def test_data_parallelism_sends_all_weights_of_the_network_of_figure_2_to_every_site() -> None:
    weights = sum(h.numel for name, h in network().tensors.items() if name.endswith("weight"))
    for n in SITES:
        assert data_parallel_nbytes(FIGURE_2, n) == 4 * n * weights


def test_its_flops_are_twice_those_of_forward() -> None:
    forward = sum(flops_of(cost.at(FIGURE_2.B).forward_ops) for cost in network().costs.values())
    assert data_parallel_flops(FIGURE_2) == pytest.approx(2 * forward)


def test_on_one_site_ist_is_local_training() -> None:
    assert ist_flops(FIGURE_2, 1) == data_parallel_flops(FIGURE_2)
    assert ist_nbytes(replace(FIGURE_2, J=1), 1) == data_parallel_nbytes(FIGURE_2, 1)


def test_a_network_without_hidden_layers_has_no_subnets() -> None:
    with pytest.raises(CostError, match="divides hidden layers, and there are 0"):
        Symbols((10, 3), B=1, J=1)
