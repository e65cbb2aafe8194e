"""Every neuron is dealt to one rank in each round, with the same chance for each, and alike on all ranks."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from splitc.runtime.spec import Neurons
from splitc.runtime.subnets.deal import deal, indices
from tests.support.sampling import in_one


def test_every_neuron_is_on_one_rank_and_ranks_have_alike_many() -> None:
    for k in range(60):
        neurons, ranks, seed, number = random.Random(k).randint(1, 40), 1 + k % 6, k, k // 7
        dealt = deal(seed, number, "fc1", neurons, ranks)
        assert sorted(neuron for own in dealt for neuron in own) == list(range(neurons))
        sizes = list(map(len, dealt))
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
        assert all(list(own) == sorted(own) for own in dealt)


def test_the_deal_of_a_run_that_is_resumed_is_the_same() -> None:
    assert deal(3, 5, "fc1", 11, 3) == ((3, 5, 8, 9), (2, 4, 7, 10), (0, 1, 6))


@pytest.mark.slow
@in_one
@pytest.mark.parametrize(("neurons", "ranks"), [(8, 2), (9, 4), (12, 3)])
def test_a_neuron_is_on_each_rank_as_often_and_independently_of_another_layer(neurons: int, ranks: int) -> None:
    rounds = 3000
    pairs: Counter[tuple[int, int]] = Counter()
    on_first: Counter[int] = Counter()
    for number in range(rounds):
        first, second = (deal(0, number, layer, neurons, ranks) for layer in ("fc1", "fc2"))
        on_first.update(first[0])
        pairs.update((i, j) for own in zip(first, second, strict=True) for i in own[0] for j in own[1])
    chance = len(deal(0, 0, "fc1", neurons, ranks)[0]) / neurons
    assert all(abs(on_first[i] / rounds - chance) < 0.05 for i in range(neurons))
    together = sum(len(own) ** 2 for own in deal(0, 0, "fc1", neurons, ranks)) / neurons**2
    assert all(abs(pairs[i, j] / rounds - together) < 0.05 for i in range(neurons) for j in range(neurons))


def test_indices_go_through_the_layers_along_a_dim() -> None:
    runs = (Neurons("a", 5), Neurons("", 2), Neurons("b", 4), Neurons("a", 5))
    for rank in range(3):
        a, b = deal(1, 2, "a", 5, 3)[rank], deal(1, 2, "b", 4, 3)[rank]
        assert indices(1, 2, runs, rank, 3) == [*a, 5, 6, *(7 + i for i in b), *(11 + i for i in a)]
