"""Errors of tensors: relative to the tensor, or to all of them where it is small; what is missing is infinite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from splitc.runtime.launch.trial import Trial
from splitc.runtime.spec import Shard
from splitc.verify.comparison import Comparison, tensor_errors, zero_gradients


def trial(
    *gradients: dict[str, Tensor], losses: tuple[float, ...] = (), states: tuple[dict[str, Tensor], ...] = ()
) -> Trial:
    return Trial(list(losses) or [1.0] * len(gradients), list(gradients), list(states))


def test_the_error_of_a_tensor_is_relative_to_its_norm() -> None:
    expected = {"w": torch.tensor([3.0, 4.0])}
    assert tensor_errors({"w": torch.tensor([3.0, 4.5])}, expected) == {"w": pytest.approx(0.5 / 5)}


def test_a_tensor_that_is_small_beside_the_others_is_measured_by_them() -> None:
    expected = {"large": torch.full((8,), 1.0), "small": torch.full((8,), 1e-9)}
    rms = math.sqrt(8 / 16)
    errors = tensor_errors({**expected, "small": torch.zeros(8)}, expected)
    assert errors["small"] == pytest.approx(1e-9 / (1e-3 * rms), rel=1e-3)


def test_infinities_must_be_equal_and_numbers_must_be_there() -> None:
    inf = float("inf")
    mask = {"mask": torch.tensor([0.0, inf])}
    assert tensor_errors(mask, mask) == {"mask": 0.0}
    assert tensor_errors({"mask": torch.tensor([0.0, float("nan")])}, mask) == {"mask": inf}
    assert tensor_errors({}, mask) == {"mask": inf}


def test_an_error_may_be_four_times_what_rounding_does_in_one_process() -> None:
    expected, exact = {"w": torch.tensor([1e-3, 0.0])}, {"w": torch.tensor([0.0, 0.0])}
    for tolerance in (1e-5, 2e-2):
        errors = tensor_errors({"w": torch.tensor([5e-3, 0.0])}, expected, exact, tolerance)
        assert errors["w"] == pytest.approx(tolerance, rel=1e-3)


def test_a_tensor_that_happens_to_be_exact_may_have_the_error_that_is_usual() -> None:
    names, exact = "abcd", torch.ones(100)
    expected = {name: exact + (1e-3 if name != "a" else 0) for name in names}
    got = {name: exact + (3e-3 if name == "a" else 1e-3) for name in names}
    assert tensor_errors(got, expected, dict.fromkeys(names, exact), 1e-5)["a"] < 1e-5


def test_a_gradient_that_no_rank_holds_is_infinitely_off() -> None:
    comparison = Comparison([trial({"a": torch.ones(2)})], trial({"a": torch.ones(2), "b": torch.ones(2)}))
    assert comparison.gradient_errors(0) == {"a": 0.0, "b": float("inf")}


def test_each_rank_is_compared_with_the_part_that_it_holds() -> None:
    whole = torch.arange(6.0).view(6, 1) + 1
    first, second = trial({"w": whole[:3]}), trial({"w": whole[3:] * 2})
    first.shards["w"], second.shards["w"] = Shard(0, 0, 3), Shard(0, 3, 6)
    comparison = Comparison([first, second], trial({"w": whole}))
    assert comparison.gradient_errors(0) == {"w": pytest.approx(1.0)}


def test_the_largest_error_of_a_loss_counts_and_not_a_number_is_infinite() -> None:
    grads = ({"w": torch.ones(1)},) * 2
    ranks = [trial(*grads, losses=(2.0, 1.0)), trial(*grads, losses=(1.0, float("nan")))]
    comparison = Comparison(ranks, trial(*grads, losses=(1.0, 1.0)))
    assert [comparison.loss_error(step) for step in comparison.steps] == [1.0, float("inf")]


def test_counters_must_be_equal() -> None:
    state = {"w": torch.ones(2), "steps": torch.tensor(3)}
    other = {**state, "steps": torch.tensor(4)}
    grads = {"w": torch.ones(2)}
    reference = trial(grads, states=(state,))
    assert Comparison([trial(grads, states=(state,))], reference).state_errors(0) == {"w": 0.0, "steps": 0.0}
    assert Comparison([trial(grads, states=(other,))], reference).state_errors(0)["steps"] == float("inf")


def test_a_constant_factor_between_gradients_is_found() -> None:
    w = torch.randn(8)
    comparison = Comparison([trial({"w": 0.5 * w})], trial({"w": w}))
    assert comparison.gradient_factor(["w"], 0) == pytest.approx(0.5, rel=1e-5)
    assert Comparison([trial({"w": torch.randn(8)})], trial({"w": w})).gradient_factor(["w"], 0) is None


def test_gradients_that_are_zero_but_for_rounding_are_so_in_every_step() -> None:
    exact = trial({"w": torch.ones(2), "bias": torch.full((2,), 1e-17)}, {"w": torch.ones(2), "bias": torch.zeros(2)})
    assert zero_gradients(exact) == {"bias"}
