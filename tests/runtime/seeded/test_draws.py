"""Random numbers that depend on what is computed alone, and that are random: means, bits, correlations, chi-square."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from splitc.runtime.seeded.draws import Draws, Layout
from tests.support.sampling import along, in_one

DRAWS = Draws(seed=0, step=0, examples=[(0, 400)])
CPU = torch.device("cpu")
ROWS = Layout()


def words(
    shape: tuple[int, ...] = (400, 500), draws: Draws = DRAWS, label: int = 0, layout: Layout = ROWS, stream: int = 0
) -> Tensor:
    return draws.words(torch.Size(shape), CPU, (label,), layout, stream)


def bits(found: Tensor) -> Tensor:
    """All bits as -1 and 1."""
    return torch.stack([found.bitwise_right_shift(k).bitwise_and_(1) for k in range(32)]).double() * 2 - 1


# -- the same numbers --------------------------------------------------------------------------------------------------


def test_the_numbers_of_some_examples_are_those_that_all_examples_have_there() -> None:
    for intervals in ([(0, 400)], [(37, 90)], [(0, 3), (200, 210)], [(399, 400)]):
        rows = torch.cat([torch.arange(*each) for each in intervals])
        assert torch.equal(words((len(rows), 500), replace(DRAWS, examples=intervals)), words()[rows])


@in_one
@pytest.mark.parametrize(("start", "width"), [(0, 7), (7, 7), (9, 5)])
def test_the_numbers_of_a_shard_of_the_features_are_those_of_its_columns(start: int, width: int) -> None:
    shard = words((400, 3, width), layout=Layout(columns=(start, 14)))
    assert torch.equal(shard, words((400, 3, 14))[..., start : start + width])


def test_the_batch_may_be_in_another_dim_and_an_example_may_have_several_rows() -> None:
    rows = words((400 * 3, 5), layout=Layout(0, 3))
    assert torch.equal(rows, words((400, 15)).view(1200, 5))
    part = words((2 * 3, 5), replace(DRAWS, examples=[(7, 9)]), layout=Layout(0, 3))
    assert torch.equal(part, rows[21:27])
    whole = words((6, 400, 5), layout=Layout(1))
    assert torch.equal(words((6, 2, 5), replace(DRAWS, examples=[(7, 9)]), layout=Layout(1)), whole[:, 7:9])


def test_the_rows_of_an_example_may_lie_apart() -> None:
    whole = words((3 * 400 * 2, 5), layout=Layout(0, 6, 3)).view(3, 400, 2, 5)
    part = words((3 * 2 * 2, 5), replace(DRAWS, examples=[(7, 9)]), layout=Layout(0, 6, 3))
    assert torch.equal(part.view(3, 2, 2, 5), whole[:, 7:9])


def test_numbers_without_examples_are_the_same_whatever_the_examples_are() -> None:
    assert torch.equal(words((4, 5), layout=Layout(None)), words((4, 5), Draws(0, 0, [(3, 9)]), layout=Layout(None)))


def test_without_intervals_every_example_has_the_numbers_of_the_first() -> None:
    exchangeable = words(draws=replace(DRAWS, examples=None))
    assert torch.equal(exchangeable, words()[:1].expand(400, -1))


def test_numbers_for_more_examples_than_the_step_has_are_refused() -> None:
    with pytest.raises(ValueError, match="random numbers for 401 examples, where the step has 400 here"):
        words((401, 2))


def test_a_change_of_the_generator_is_noticed() -> None:
    """A run that goes on from a checkpoint draws what it drew before."""
    found = words((2, 2), replace(DRAWS, examples=[(0, 2)]))
    assert found.flatten().tolist() == [-2103217977, -1791475124, -1708926128, 1988543654]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_the_same_bits() -> None:
    on_gpu = DRAWS.words(torch.Size((400, 500)), torch.device("cuda"), (0,), ROWS)
    assert torch.equal(on_gpu.cpu(), words())


# -- random numbers ----------------------------------------------------------------------------------------------------

OTHERS = {
    "seed": words(draws=replace(DRAWS, seed=1)),
    "step": words(draws=replace(DRAWS, step=1)),
    "call": words(label=1),
    "stream": words(stream=1),
    "next example": words().roll(1, 0),
    "example before that": words().roll(2, 0),
    "next feature": words().roll(1, 1),
    "feature 64 further": words().roll(64, 1),
    "first examples of another batch": words(draws=replace(DRAWS, examples=[(400, 800)])),
}


@pytest.mark.slow
def test_no_bit_correlates_with_that_of_another() -> None:
    a = bits(words()).flatten(1)
    for name, other in OTHERS.items():
        correlation = a @ bits(other).flatten(1).T / a.shape[1]  # of each bit with each: deviation 1 / sqrt(200,000)
        assert float(correlation.abs().max()) < 5 / math.sqrt(a.shape[1]), name


def test_every_bit_is_set_half_of_the_time_in_every_example_and_feature() -> None:
    found = bits(words())
    for dims, count in (((1, 2), 200_000), ((1,), 400), ((2,), 500)):
        assert float(found.mean(dims).abs().max()) < 5.5 / math.sqrt(count)


@in_one
@pytest.mark.parametrize("shift", [0, 12, 24])
def test_bytes_are_equally_frequent_and_so_are_pairs_of_neighbours(shift: int) -> None:
    found = words().bitwise_right_shift(shift).bitwise_and_(255).long()
    for counted, bins in ((found.flatten(), 256), ((found[:, ::2] * 256 + found[:, 1::2]).flatten() // 16, 4096)):
        counts = torch.bincount(counted, minlength=bins).double()
        expected = counted.numel() / bins
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi_square - (bins - 1)) < 5 * math.sqrt(2 * (bins - 1))


# -- masks, uniform and normal numbers ---------------------------------------------------------------------------------


@in_one
@along(p=[0.001, 0.1, 0.5, 0.9], dtype=[torch.float32, torch.float64, torch.bfloat16])
def test_a_mask_has_the_rate_and_keeps_the_mean(p: float, dtype: torch.dtype) -> None:
    made = DRAWS.dropout(torch.ones(400, 500, dtype=dtype), p, (0,), ROWS)
    assert made.dtype == dtype
    deviation = 5 * math.sqrt(p * (1 - p) / made.numel())
    assert abs(float((made == 0).double().mean()) - p) < deviation
    kept = made[made != 0]
    assert torch.equal(kept, torch.ones_like(kept) / (1 - p))
    assert abs(float(made.double().mean()) - 1) < deviation / (1 - p) + 1e-2 * (dtype == torch.bfloat16)


def test_whole_channels_are_dropped_whatever_part_of_them_a_rank_has() -> None:
    made = DRAWS.dropout(torch.ones(400, 50, 3, 3), 0.5, (0,), ROWS, feature_dims=2)
    assert torch.equal(made, made[:, :, :1, :1].expand_as(made))
    assert len({tuple(row.tolist()) for row in made[:, :, 0, 0]}) == 400  # every example has its own
    half = DRAWS.dropout(torch.ones(400, 50, 2), 0.5, (0,), Layout(columns=(2, 4)), feature_dims=2)
    assert torch.equal(half, made[..., 0, :2])


@in_one
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_numbers_are_below_one_and_have_the_right_moments(dtype: torch.dtype) -> None:
    found = DRAWS.uniform(torch.empty(400, 500, dtype=dtype), (0,), ROWS)
    assert found.dtype == dtype and float(found.min()) >= 0 and float(found.max()) < 1
    coarse = torch.finfo(dtype).eps
    assert abs(float(found.double().mean()) - 0.5) < 5 / math.sqrt(12 * 200_000) + coarse / 2
    assert abs(float(found.double().var()) - 1 / 12) < 1e-3


def test_normal_numbers_have_the_right_moments_and_tails() -> None:
    found = DRAWS.normal(torch.empty(400, 500), (0,), ROWS).double()
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert abs(float((found**power).mean()) - moment) < 0.06
    assert abs(float((found.abs() > 1.959964).double().mean()) - 0.05) < 0.0025
    assert bool(found.isfinite().all())
