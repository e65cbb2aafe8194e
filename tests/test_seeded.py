"""Masks that depend on what is computed: the same where they must be, others everywhere else, and right on average."""

from __future__ import annotations

import math

import pytest
import torch

from splitc.runtime.rank import Rank
from splitc.runtime.seeded import mask
from splitc.runtime.transport import Transport
from tests.ranks import on_ranks, plan_of, rank_of

SHAPE = (8, 1000)


def dropped(rank: Rank, layer: str = "drop", p: float = 0.5) -> torch.Tensor:
    return rank.dropout(torch.ones(SHAPE), p, layer=layer) == 0


def agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    """The part of the elements in which two masks agree: a half when they have nothing to do with each other."""
    return float((a == b).double().mean())


def rank(**changes: int) -> Rank:
    made = rank_of(plan_of(conv=(0, 8, 16), fc=(0, 8, 16)), changes.get("index", 0))
    made.seed, made.step_number = changes.get("seed", 0), changes.get("step", 0)
    return made


def test_ranks_that_compute_the_same_examples_draw_the_same_mask() -> None:
    assert torch.equal(dropped(rank()), dropped(rank()))
    assert torch.equal(dropped(rank(index=0)), dropped(rank(index=2)))


@pytest.mark.parametrize("changes", [{"index": 1}, {"seed": 1}, {"step": 1}, {"index": 3}])
def test_other_examples_seeds_and_steps_draw_masks_that_have_nothing_to_do_with_it(changes: dict[str, int]) -> None:
    assert abs(agreement(dropped(rank()), dropped(rank(**changes))) - 0.5) < 0.03


def test_other_layers_draw_other_masks() -> None:
    assert abs(agreement(dropped(rank()), dropped(rank(), "other")) - 0.5) < 0.03


def test_a_smaller_batch_draws_another_mask_than_the_same_examples_in_a_larger_one() -> None:
    small = rank()
    small.begin((4, 4))
    assert small.examples == (0, 4)
    assert not torch.equal(dropped(small), dropped(rank()))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_rate_is_p_and_the_mean_stays(p: float, dtype: torch.dtype) -> None:
    drawn = mask(torch.ones(200, 500, dtype=dtype), p, 0, ("key",))
    assert drawn.dtype == dtype
    deviation = 5 * math.sqrt(p * (1 - p) / drawn.numel())
    assert abs(float((drawn == 0).double().mean()) - p) < deviation
    kept = drawn[drawn != 0]
    assert torch.equal(kept, torch.ones_like(kept) / (1 - p))
    assert abs(float(drawn.double().mean()) - 1) < deviation / (1 - p) + 1e-2 * (dtype == torch.bfloat16)


def test_dropout2d_drops_whole_channels_of_single_examples() -> None:
    drawn = mask(torch.ones(40, 50, 3, 3), 0.5, 2, ("key",))
    assert drawn.shape == (40, 50, 1, 1)
    channels = drawn[:, :, 0, 0]
    assert abs(float((channels == 0).double().mean()) - 0.5) < 0.06
    assert len({tuple(row.tolist()) for row in channels}) == 40  # every example has its own


def test_one_drops_everything_and_zero_nothing() -> None:
    value = torch.full((3, 4), 2.0)
    assert torch.equal(value * mask(value, 1.0, 0, ()), torch.zeros(3, 4))
    assert torch.equal(value * mask(value, 0.0, 0, ()), value)


def test_the_gradient_passes_where_the_value_does() -> None:
    value = torch.randn(SHAPE, requires_grad=True)
    out = rank().dropout(value, 0.5, layer="drop")
    out.sum().backward()
    assert value.grad is not None
    assert torch.equal(value.grad == 0, out == 0)
    assert torch.equal(value.grad[value.grad != 0], torch.full_like(value.grad[value.grad != 0], 2.0))


def test_outside_of_training_dropout_passes_its_input_through() -> None:
    made, value = rank(), torch.randn(4)
    made.training = False
    assert made.dropout(value, 0.5, layer="drop") is value


def test_masks_leave_the_global_random_generator_alone() -> None:
    before = torch.get_rng_state()
    dropped(rank())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_seed_of_the_worker_reaches_the_masks() -> None:
    def run(transport: Transport) -> torch.Tensor:
        made = rank_of(plan_of(all=(0, 8)), 0)
        made.connect(transport, seed=7)
        return dropped(made)

    (drawn,) = on_ranks(1, run)
    other = rank_of(plan_of(all=(0, 8)), 0)
    other.seed = 7
    assert torch.equal(drawn, dropped(other))
