"""Each random function, seeded, has the shape, dtype and distribution of torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from splitc.runtime.seeded.draws import Draws
from splitc.runtime.seeded.mode import SeededRandom
from splitc.runtime.seeded.table import form_of

N, D = 200, 300
ONES = torch.ones(N, D)


def seeded(function: Callable[[], Tensor]) -> Tensor:
    with SeededRandom(Draws(0, 0, [(0, N)])) as mode:
        value = function()
    assert not mode.unseeded
    return value


FUNCTIONS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(N, D),
    "rand in a tuple and float64": lambda: torch.rand((N, D), dtype=torch.float64),
    "rand_like": lambda: torch.rand_like(ONES),
    "randn": lambda: torch.randn(N, D),
    "randn_like": lambda: torch.randn_like(ONES, dtype=torch.float64),
    "randint": lambda: torch.randint(7, (N, D)),
    "randint by name": lambda: torch.randint(low=2, high=9, size=(N, D), dtype=torch.int32),
    "randint of all": lambda: torch.randint(-3, 4, (N, D)),
    "randint_like": lambda: torch.randint_like(ONES, 5),
    "randint_like from": lambda: torch.randint_like(ONES, low=2, high=5),
    "random_": lambda: torch.empty(N, D).random_(2, 6),
    "random_ by name": lambda: torch.empty(N, D).random_(to=6),
    "bernoulli": lambda: torch.bernoulli(ONES * 0.3),
    "bernoulli of one": lambda: torch.bernoulli(ONES, 0.3),
    "bernoulli_": lambda: torch.empty(N, D).bernoulli_(0.3),
    "bernoulli_ of bools": lambda: torch.empty(N, D, dtype=torch.bool).bernoulli_(0.3),
    "bernoulli_ of tensors": lambda: torch.empty(N, D).bernoulli_(ONES * 0.3),
    "normal": lambda: torch.normal(ONES, 0.5),
    "normal of tensors": lambda: torch.normal(ONES, ONES * 2),
    "normal of a size": lambda: torch.normal(1.0, 2.0, (N, D)),
    "normal_": lambda: torch.empty(N, D).normal_(1, std=3),
    "log_normal_": lambda: torch.empty(N, D).log_normal_(0.1, 0.2),
    "uniform_": lambda: torch.empty(N, D).uniform_(-1, 3),
    "exponential_": lambda: torch.empty(N, D).exponential_(2),
    "cauchy_": lambda: torch.empty(N, D).cauchy_(1, 0.5).atan(),
    "geometric_": lambda: torch.empty(N, D).geometric_(0.3),
    "dropout": lambda: F.dropout(ONES, 0.3),
    "torch.dropout": lambda: torch.dropout(ONES, 0.3, True),
    "alpha_dropout": lambda: F.alpha_dropout(ONES * 2, 0.3, True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(ONES.view(N, D, 1) * 2, 0.3, True).view(N, D),
    "dropout2d": lambda: F.dropout2d(ONES.view(N, D, 1, 1), 0.3).view(N, D),
    "gumbel_softmax": lambda: F.gumbel_softmax(ONES),
    "gumbel_softmax hard": lambda: F.gumbel_softmax(ONES, hard=True),
    "rrelu": lambda: F.rrelu(-ONES, 0.1, 0.5, training=True),
    "trunc_normal_": lambda: torch.nn.init.trunc_normal_(torch.empty(N, D)),
}


@pytest.mark.slow
def test_each_is_distributed_as_torchs_own_and_is_the_same_again() -> None:
    for name, function in FUNCTIONS.items():
        torch.manual_seed(0)
        own, got = function(), seeded(function)
        assert torch.equal(got, seeded(function)) and not torch.equal(got, own), name
        assert (got.shape, got.dtype) == (own.shape, own.dtype), name
        a, b = got.double().flatten().sort().values, own.double().flatten().sort().values
        for p in (0.0, 1.0):  # for the discrete ones
            assert abs(float((a <= p).double().mean() - (b <= p).double().mean())) < 0.01, name
        spread = float(b.std())
        assert abs(float(a.mean() - b.mean())) < 5 * spread * math.sqrt(2 / (N * D)), name
        assert float((a - b).abs().mean()) <= 0.02 * spread + 1e-6, name


@pytest.mark.filterwarnings("ignore:dropout")
def test_whole_channels_are_dropped_where_torch_drops_them() -> None:
    taken = ((F.dropout1d, (2, 3)), (F.dropout2d, (2, 3, 4, 5)), (F.dropout3d, (2, 4, 5)))
    for kind, dims in ((kind, n) for kind, every in taken for n in every):
        value = torch.ones(N, *[4] * (dims - 1))
        own, got = kind(value, 0.5), seeded(lambda kind=kind, value=value: kind(value, 0.5))  # type: ignore[misc]
        for d in range(1, dims):  # equal along a dim, or not, for both
            assert [bool((x == x.narrow(d, 0, 1)).all()) for x in (own, got)].count(True) in (0, 2), (kind, d)


def test_in_place_forms_write_into_their_tensor() -> None:
    value, noise = torch.ones(N, D), torch.empty(N, D)
    assert seeded(lambda: F.dropout(value, 0.5, inplace=True)) is value and bool((value == 0).any())
    assert seeded(lambda: noise.normal_()) is noise


def test_what_draws_nothing_takes_no_number() -> None:
    with SeededRandom(Draws(0, 0, [(0, N)])):
        F.dropout(ONES, 0.0), F.dropout(ONES, 0.5, training=False), F.alpha_dropout(ONES, 0.5)
        F.scaled_dot_product_attention(ONES, ONES, ONES)
        got = torch.rand(N, D)
    assert torch.equal(got, seeded(lambda: torch.rand(N, D)))


def test_what_no_example_defines_is_noted() -> None:
    calls: dict[str, Callable[[], Tensor]] = {
        "randperm": lambda: torch.randperm(5),
        "multinomial": lambda: torch.multinomial(torch.ones(3), 2),
        "a generator": lambda: torch.rand(3, generator=torch.Generator()),
        "more than 2^32": lambda: torch.randint(2**40, (3,)),
    }
    for name, call in calls.items():
        with SeededRandom(Draws(0, 0, [(0, N)])) as mode:
            call()
        assert [name in each for each in mode.unseeded] == [True]


def test_a_name_that_is_no_function_of_torch_is_none_here() -> None:
    def normal(*args: float) -> float:
        return sum(args)

    assert form_of(normal, (1.0,), {}) is None and form_of(torch.normal, (1.0,), {}) is not None
