"""Random plans of random small models are the training of one process; `benchmarks.random_plans` runs more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from splitc.runtime.collectives.layouts import State, Transition
from splitc.runtime.collectives.model_parallel import Group
from splitc.runtime.transport.base import Transport
from tests.support.random_plans import Outcome, outcome, random_case
from tests.support.sampling import sampled, thinned


def assert_right(got: Outcome) -> None:
    assert not got.wrong, f"{got.asked}\n{got.wrong}"
    assert not got.refused or got.names_a_layer, f"{got.asked}\n{got.refused}"


@sampled("seed", range(2), one_in=2)
def test_a_random_plan_is_the_training_of_one_process(seed: int) -> None:
    assert_right(outcome(seed, worlds=(2, 3, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", thinned([5103, 5153, 5215, 5234, 5372, 20102, 30018, 800061]))
def test_a_random_plan_that_found_a_bug_is_right(seed: int) -> None:
    assert_right(outcome(seed))


def test_a_seed_gives_the_same_model_loss_and_data() -> None:
    for seed in range(10):
        first, second = random_case(seed), random_case(seed)
        assert str(first.model) == str(second.model)
        assert all(map(torch.equal, first.model.state_dict().values(), second.model.state_dict().values()))
        (inputs, target), (others, goal) = first.batch(3, 1), second.batch(3, 1)
        assert all(map(torch.equal, (*inputs, target), (*others, goal)))


def moves_of(seed: int) -> tuple[Transition, ...]:
    return outcome(seed, (2, 3)).transitions


@pytest.mark.slow
def test_a_transition_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    scatter = Group._scatter_sum

    def halved(self: Group, by: Transport, x: torch.Tensor, *rest: Any) -> object:
        return scatter(self, by, x / 2, *rest)

    found = next(seed for seed in range(30) if any(each.target is State.DIVIDED for each in moves_of(seed)))
    assert not outcome(found, (2, 3)).wrong
    monkeypatch.setattr(Group, "_scatter_sum", halved)
    assert any(outcome(seed, (2, 3)).wrong for seed in range(found, found + 3))
