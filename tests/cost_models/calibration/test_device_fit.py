"""Rates fitted to timed ops: those of a device that is known come back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from splitc.cost_models.calibration.device_fit import Sample, fit_rates, fitted, nnls
from splitc.cost_models.compute.roofline import ops_seconds
from splitc.ir.costs import OpCost
from splitc.ir.device import Device
from tests.support.sampling import in_tiers

CLASSES = ("matmul", "conv", "attention", "memory", "math", "max_pool")


def device(overlap: float = 0.0) -> Device:
    """Every class at a rate of its own; the fastest of each kind at its peak."""
    products = {"matmul": 0.7, "matmul_backward": 0.8, "conv": 1.0, "conv_backward": 0.6, "attention": 0.5}
    moving = {"memory": 1.0, "memory_backward": 0.6, "math": 0.3, "math_backward": 0.4, "max_pool": 0.05}
    own = {"matmul_moved": 0.3, "conv_moved": 0.2, "attention_moved": 0.15}
    others = {"attention_backward": 0.45, "max_pool_backward": 0.3}
    efficiency = products | moving | own | others
    return Device("a core", {"float32": 1e11}, 3e10, 1e9, efficiency, 1e-5, conv_launch=1e-4, overlap=overlap)


def samples_of(known: Device, noise: float = 0.0, seed: int = 0) -> list[Sample]:
    """Ops of all classes, small and large, alone and a few together."""
    drawn = random.Random(seed)

    def op() -> OpCost:
        kind, backward = drawn.choice(CLASSES), drawn.random() < 0.5
        flops = 10 ** drawn.uniform(4, 10) if kind in CLASSES[:3] else 0.0
        filling = drawn.choice((0.0, 0.5 * flops)) if kind == "conv" else 0.0
        return OpCost(kind, kind, backward, flops, 10 ** drawn.uniform(3, 8), drawn.randint(1, 3), filling)

    found = []
    for k in range(200):
        ops = tuple(op() for _ in range(drawn.randint(1, 3)))
        error = 1 + noise * drawn.gauss(0, 1)
        found.append(Sample(f"sample {k}", ops, ops_seconds(ops, known, "float32") * error))
    return found


def off(found: Device, known: Device) -> float:
    """The largest relative error of samples that the fit has not seen."""
    ratios = [fitted(each, found) / each.seconds for each in samples_of(known, seed=1)]
    return max(abs(ratio - 1) for ratio in ratios)


def fit(samples: Sequence[Sample]) -> Device:
    return fit_rates(samples).device("a core", 1e9, {})


@pytest.mark.slow
def test_a_known_device_comes_back() -> None:
    for overlap in [0.0, 0.5, 1.0]:
        known = device(overlap)
        found = fit(samples_of(known))
        assert found.overlap == overlap, overlap
        assert off(found, known) < 0.02, overlap
        for name, number in (("launch", 1e-5), ("conv_launch", 1e-4), ("memory_bandwidth", 3e10)):
            assert getattr(found, name) == pytest.approx(number, rel=0.02), overlap
        assert found.flop_rate["float32"] == pytest.approx(1e11, rel=0.02), overlap
        if overlap == 0:  # else what is always hidden cannot be seen
            assert found.efficiency == pytest.approx(known.efficiency, rel=0.02), overlap


@in_tiers("cases", range(3), one_in=3)
def test_noise_of_a_tenth_moves_the_prices_by_less(cases: list[Any]) -> None:
    for seed in cases:
        known = device()
        assert off(fit(samples_of(known, noise=0.1, seed=10 + seed)), known) < 0.15


def test_ops_that_the_model_knows_nothing_of_do_not_bend_the_others() -> None:
    known = device()
    samples = samples_of(known)
    odd = [replace(each, seconds=8 * each.seconds) for each in samples[:15]]
    assert off(fit([*odd, *samples[15:]]), known) < 0.12


@pytest.mark.slow
def test_the_same_samples_give_the_same_device() -> None:
    samples = samples_of(device(), noise=0.2)
    assert fit(samples) == fit(samples)


@pytest.mark.slow
def test_all_efficiencies_are_parts_of_the_peak() -> None:
    found = fit(samples_of(device(), noise=0.5))
    assert all(0 < part <= 1 for part in found.efficiency.values())
    assert {"matmul", "memory"} <= set(found.efficiency)
    assert max(found.efficiency_of(op, back) for op in CLASSES[:3] for back in (False, True)) == 1.0


@pytest.mark.slow
def test_other_dtypes_reach_what_was_measured_of_them() -> None:
    found = fit_rates(samples_of(device())).device("a core", 1e9, {"bfloat16": 5e10})
    assert found.flop_rate["bfloat16"] * found.efficiency_of("matmul") == pytest.approx(5e10)


@pytest.mark.slow
def test_convolutions_in_tf32_say_nothing_of_those_in_other_dtypes() -> None:
    """Of an A100 that was timed: bfloat16 has twice the rate of TF32, in convolutions as in products."""
    known = replace(device(), flop_rate={"float32": 2e10, "tf32": 16e10, "bfloat16": 32e10})
    measured = {"bfloat16": 32e10 * known.efficiency["matmul"]}
    found = fit_rates(samples_of(known)).device("a GPU", 1e9, measured, tf32=True)
    conv = OpCost("convolution", "conv", False, 1e12, 0.0)
    for dtype, rate in (("float32", 16e10), ("bfloat16", 32e10 * known.efficiency["matmul"])):
        assert ops_seconds([conv], found, dtype) == pytest.approx(1e12 / rate, rel=0.02), dtype
    assert off(found, known) < 0.02 and all(0 < part <= 1 for part in found.efficiency.values())


def test_no_other_non_negative_numbers_come_nearer() -> None:
    for seed in range(20):
        drawn = np.random.default_rng(seed)
        matrix, target = drawn.normal(size=(12, 6)), drawn.normal(size=12)
        found = nnls(matrix, target)
        slope = matrix.T @ (target - matrix @ found)
        assert (found >= 0).all() and (slope < 1e-9).all()
        assert abs(slope[found > 0]).max(initial=0.0) < 1e-9  # the conditions of Karush, Kuhn and Tucker
    matrix = np.array([[1.0, 0.0], [2.0, 0.0]])
    assert nnls(matrix, np.array([2.0, 4.0])).tolist() == pytest.approx([2.0, 0.0]), "a column of zeros gets nothing"
