"""Eager code under a SeededRandom: calls are counted, attention is taken apart, checkpoints draw once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from splitc.runtime.seeded.draws import Draws, Label, Layout
from splitc.runtime.seeded.mode import SeededRandom, running

DRAWS = Draws(0, 0, [(0, 8)])


def test_each_call_draws_other_numbers_and_a_new_run_the_same() -> None:
    mode = SeededRandom(DRAWS)
    runs = []
    for _ in range(2):
        with mode:
            runs.append([torch.rand(8, 50) for _ in range(2)])
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][0], runs[0][1])


def test_examples_are_in_dim_0_where_it_has_their_number_or_where_the_layout_says() -> None:
    half = Draws(0, 0, [(4, 8)])
    layouts: dict[Label, Layout] = {(1,): Layout(1), (2,): Layout(None)}
    drawn: list[list[Tensor]] = []
    for draws, n in ((DRAWS, 8), (half, 4)):
        with SeededRandom(draws, layouts):
            drawn.append(
                [torch.rand(n, 5), torch.rand(3, n), torch.rand(8, 2), torch.rand(7), F.dropout(torch.ones(n * 2, 9))]
            )
    (rows, columns, shared, few, merged), part = drawn
    assert all(map(torch.equal, (rows[4:], columns[:, 4:], shared, few, merged[8:]), part))


def test_a_number_without_dims_is_drawn_whatever_the_layout_says() -> None:
    with SeededRandom(DRAWS, {(0,): Layout(0), (1,): Layout(1)}):
        assert torch.rand([]).dim() == 0 and torch.rand(8).shape == (8,)


def test_a_region_takes_one_number_whatever_it_draws() -> None:
    def after(draws: int) -> Tensor:
        with SeededRandom(DRAWS) as mode:
            with mode.region():
                [torch.rand(8) for _ in range(draws)]
            return torch.rand(8)

    assert torch.equal(after(0), after(3))


def test_attention_is_that_of_torch_but_for_its_dropout() -> None:
    attention = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True)
    x = torch.randn(8, 5, 8)
    with SeededRandom(DRAWS, dropout=False):
        for need_weights in (False, True):
            got = attention(x, x, x, need_weights=need_weights)[0]
            attention.eval()
            torch.testing.assert_close(got, attention(x, x, x, need_weights=need_weights)[0])
            attention.train()
    with SeededRandom(DRAWS):
        q = x.view(8, 1, 5, 8)
        a, b = (F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, is_causal=True) for _ in range(2))
    assert not torch.equal(a, b)
    assert torch.equal(a[..., 0, :] == 0, (a[..., 0, :] == 0).all(-1, True).expand(8, 1, 8))  # sees one, or nothing


def test_recurrent_modules_are_those_of_torch_but_for_their_dropout() -> None:
    x = torch.randn(8, 5, 6)
    for kind, options in ((nn.LSTM, {}), (nn.GRU, {"bias": False}), (nn.RNN, {"nonlinearity": "relu"})):
        module = kind(6, 4, 3, dropout=0.5, batch_first=True, bidirectional=True, **options)
        with SeededRandom(DRAWS, dropout=False):
            got = tree_leaves(module(x))
        with SeededRandom(DRAWS) as mode:
            dropped, again = module(x)[0], module(x)[0]
            expected = tree_leaves(module.eval()(x))
        assert not mode.unseeded
        torch.testing.assert_close(got, expected)
        assert not torch.equal(dropped, again) and not torch.equal(dropped, expected[0])
        with SeededRandom(Draws(0, 0, [(4, 8)])):
            torch.testing.assert_close(module.train()(x[4:])[0], dropped[4:])


def test_checkpointed_functions_draw_once_and_others_stay_checkpointed() -> None:
    calls: list[bool] = []

    def function(x: Tensor) -> Tensor:
        calls.append(running() is not None)
        return F.dropout(x, 0.5) * x

    x = torch.ones(8, 100, requires_grad=True)
    for reentrant in (False, True):
        with SeededRandom(DRAWS):
            out = checkpoint(function, x, use_reentrant=reentrant)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(gradient, 2 * out) and calls == [True]
        calls.clear()
        checkpoint(function, x, use_reentrant=reentrant).sum().backward()
        assert calls == [False, False]
        calls.clear()


def test_other_threads_draw_from_torchs_generator() -> None:
    seen = []
    with SeededRandom(DRAWS):
        thread = threading.Thread(target=lambda: seen.append(running()))
        thread.start()
        thread.join()
    assert seen == [None] and running() is None


def test_in_a_region_what_no_example_defines_is_the_same_on_all_ranks() -> None:
    before = torch.get_rng_state()
    drawn = []
    for examples in ([(0, 8)], [(3, 5)]):
        with SeededRandom(Draws(0, 0, examples)) as mode, mode.region():
            drawn.append(torch.randperm(100))
    assert torch.equal(*drawn) and torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # which torch calls itself
def test_dropout_has_the_derivatives_that_its_product_with_a_mask_has() -> None:
    x, ones = torch.randn(8, 6), torch.ones(8, 6)
    with SeededRandom(DRAWS):
        mask = F.dropout(ones, 0.5)

    def run(function: Any) -> Any:
        with SeededRandom(DRAWS):
            return function(lambda value: F.dropout(value, 0.5))

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, ones)
        assert torch.equal(forward_ad.unpack_dual(run(lambda drop: drop(dual))).tangent, mask)
    assert torch.equal(run(lambda drop: torch.func.jvp(drop, (x,), (ones,)))[1], mask)
    assert torch.equal(run(lambda drop: torch.func.grad(lambda value: drop(value).sum())(x)), mask)
    assert torch.equal(run(lambda drop: torch.vmap(drop)(x.expand(2, 8, 6))), (x * mask).expand(2, 8, 6))
