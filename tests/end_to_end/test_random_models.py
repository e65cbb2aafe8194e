"""Random models with random losses train on ranks as a plain loop trains them; `benchmarks.random_models` runs more."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.support.random_models import random_case
from tests.support.random_training import outcome
from tests.support.sampling import sampled

SEEDS = (19, 5, 15, 8, 28, 44, 52, 41)
"""Random models of all kinds that are not refused."""


@sampled("seed", SEEDS, one_in=8)
def test_a_random_model_trains_as_in_a_plain_loop(seed: int) -> None:
    got = outcome(seed)
    assert got.is_right, got


def test_a_seed_gives_the_same_model_loss_and_data() -> None:
    for seed in range(3):
        first, second = random_case(seed), random_case(seed)
        assert str(first.model) == str(second.model)
        assert first.loss_name == second.loss_name
        assert all(map(torch.equal, first.model.state_dict().values(), second.model.state_dict().values()))
        values, others = (
            [leaf for leaf in pytree.tree_leaves(case.batch(3, 1)) if leaf is not None] for case in (first, second)
        )
        assert all(map(torch.equal, values, others))


@pytest.mark.slow
def test_training_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitc.runtime.updates.clip", lambda *arguments: None)
    clipped = next(seed for seed in range(100) if (run := outcome(seed).run) is not None and run.clip_norm is not None)
    assert any(line.startswith("gradient of ") for line in outcome(clipped).wrong)
