"""Masks that depend on what is computed: the same where they must be, others everywhere else, and right on average."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from splitc.runtime.collectives.dropout import mask
from splitc.runtime.role_comm import RoleComm
from tests.support.ranks import on_comms, plan_of

SHAPE = (8, 1000)


PLAN = plan_of(conv=(0, 8, 16), fc=(0, 8, 16))


def dropped(comm: RoleComm, layer: str = "drop", p: float = 0.5) -> torch.Tensor:
    return comm.dropout(torch.ones(SHAPE), p, layer=layer) == 0


def agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    """The part of the elements in which two masks agree: a half when they have nothing to do with each other."""
    return float((a == b).double().mean())


def drawn(index: int = 0, seed: int = 0, step: int = 0, layer: str = "drop", sizes: Any = None) -> torch.Tensor:
    """What rank `index` drops."""
    return on_comms(PLAN, lambda comm: dropped(comm, layer), sizes, seed=seed, number=step)[index]


def test_ranks_that_compute_the_same_examples_draw_the_same_mask() -> None:
    assert torch.equal(drawn(), drawn())
    assert torch.equal(drawn(index=0), drawn(index=2))


@pytest.mark.parametrize("changes", [{"index": 1}, {"seed": 1}, {"step": 1}, {"index": 3}])
def test_other_examples_seeds_and_steps_draw_masks_that_have_nothing_to_do_with_it(changes: dict[str, Any]) -> None:
    assert abs(agreement(drawn(), drawn(**changes)) - 0.5) < 0.03


def test_other_layers_draw_other_masks() -> None:
    assert abs(agreement(drawn(), drawn(layer="other")) - 0.5) < 0.03


def test_a_smaller_batch_draws_another_mask_than_the_same_examples_in_a_larger_one() -> None:
    assert not torch.equal(drawn(sizes=(4, 4)), drawn())
    assert torch.equal(drawn(sizes=(8, 8)), drawn())


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_rate_is_p_and_the_mean_stays(p: float, dtype: torch.dtype) -> None:
    made = mask(torch.ones(200, 500, dtype=dtype), p, 0, ("key",))
    assert made.dtype == dtype
    deviation = 5 * math.sqrt(p * (1 - p) / made.numel())
    assert abs(float((made == 0).double().mean()) - p) < deviation
    kept = made[made != 0]
    assert torch.equal(kept, torch.ones_like(kept) / (1 - p))
    assert abs(float(made.double().mean()) - 1) < deviation / (1 - p) + 1e-2 * (dtype == torch.bfloat16)


def test_dropout2d_drops_whole_channels_of_single_examples() -> None:
    made = mask(torch.ones(40, 50, 3, 3), 0.5, 2, ("key",))
    assert made.shape == (40, 50, 1, 1)
    channels = made[:, :, 0, 0]
    assert abs(float((channels == 0).double().mean()) - 0.5) < 0.06
    assert len({tuple(row.tolist()) for row in channels}) == 40  # every example has its own


def test_one_drops_everything_and_zero_nothing() -> None:
    value = torch.full((3, 4), 2.0)
    assert torch.equal(value * mask(value, 1.0, 0, ()), torch.zeros(3, 4))
    assert torch.equal(value * mask(value, 0.0, 0, ()), value)


def test_the_gradient_passes_where_the_value_does() -> None:
    def run(comm: RoleComm) -> None:
        value = torch.rand(SHAPE).add(0.1).requires_grad_()
        out = comm.dropout(value, 0.5, layer="drop")
        out.sum().backward()
        assert value.grad is not None
        assert torch.equal(value.grad == 0, out == 0)
        assert torch.equal(value.grad[value.grad != 0], torch.full_like(value.grad[value.grad != 0], 2.0))

    on_comms(PLAN, run)


def test_outside_of_training_dropout_passes_its_input_through() -> None:
    def run(comm: RoleComm) -> None:
        value = torch.ones(4)
        assert comm.dropout(value, 0.5, layer="drop") is value

    on_comms(PLAN, run, training=False)


def test_masks_leave_the_global_random_generator_alone() -> None:
    before = torch.get_rng_state()
    drawn()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_seed_of_the_step_reaches_the_masks() -> None:
    alone = plan_of(all=(0, 8))
    assert torch.equal(on_comms(alone, dropped, seed=7)[0], on_comms(alone, dropped, seed=7)[0])
    assert not torch.equal(on_comms(alone, dropped, seed=7)[0], on_comms(alone, dropped)[0])
