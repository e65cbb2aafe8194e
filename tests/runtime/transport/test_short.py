"""Numbers that travel in short formats: what they lose, how much of them travels, and that all ranks get the same."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from splitc.runtime.transport.base import Transport, Work
from splitc.runtime.transport.collective import PIECE, sum_parts
from splitc.runtime.transport.formats import FORMATS, TINY, Wire
from splitc.runtime.transport.short import Short, decoded, encoded
from splitc.runtime.transport.simulated import run_ranks
from tests.support.ranks import on_ranks

ERRORS = {"bf16": 3e-3, "fp16": 4e-4, "int8": 3e-2, "fp8": 4e-2}
"""Of one message of normal numbers, at most."""


def numbers(seed: int, numel: int = 1000, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def test_a_message_has_the_bytes_that_its_format_says_and_about_its_numbers() -> None:
    for name, form in FORMATS.items():
        for numel in (0, 1, 127, 128, 129, 1000):
            for dtype in (torch.float32, torch.float64):
                x = numbers(numel, numel, dtype)
                data = encoded(form, x)
                assert (data.dtype, data.numel()) == (torch.uint8, form.nbytes(numel)), (name, numel)
                back = decoded(form, data, x)
                assert (back.dtype, back.shape) == (dtype, x.shape)
                assert not numel or error(back, x) < ERRORS[name], (name, numel)


def test_a_block_has_the_senders_scale_and_what_is_no_number_stays_none() -> None:
    for name, form in FORMATS.items():
        x = torch.cat([1e-20 * numbers(1, 128), 1e10 * numbers(2, 128), torch.zeros(128)])
        back = decoded(form, encoded(form, x), x)
        if name != "fp16":  # which has no numbers of that size
            assert all(error(a, b) < ERRORS[name] for a, b in zip(back[:256].split(128), x.split(128), strict=False))
        assert not back[256:].any()
        x[3], x[200] = float("nan"), float("inf")
        back = decoded(form, encoded(form, x), x)
        assert not back[3].isfinite() and not back[200].isfinite() and not back[256:].any(), name


@pytest.mark.ranks
def test_every_operation_gives_what_it_gives_as_computed_up_to_the_format_and_the_same_on_all_ranks() -> None:
    world, every = 3, (0, 1, 2)
    sizes = (400, 300, 301)

    def run(name: str, t: Transport) -> tuple[dict[str, Tensor], int]:
        t.connect([every])
        by = Short(t, name) if name else t
        total = numbers(t.rank, dtype=torch.float32)
        by.all_reduce(total, every).wait()
        gathered = [torch.empty(size) for size in sizes]
        by.all_gather(gathered, numbers(10 + t.rank, sizes[t.rank]), every).wait()
        piece = torch.empty(sizes[t.rank])
        by.reduce_scatter(piece, numbers(20 + t.rank, sum(sizes)).split(sizes), every).wait()
        after, before = (t.rank + 1) % world, (t.rank - 1) % world
        came, exchanged = torch.empty(20, 25).t(), torch.empty(500)
        sent = by.isend(numbers(30 + t.rank, 500).view(25, 20), after)
        by.irecv(came, before).wait()
        sent.wait()
        by.exchange([(numbers(40 + t.rank, 500), after)], [(exchanged, before)], every).wait()
        largest = numbers(50 + t.rank)
        by.all_reduce(largest, every, maximum=True).wait()
        found = {"sum": total, "gather": torch.cat(gathered), "scatter": piece, "came": came, "exchanged": exchanged}
        return {**found, "largest": largest}, t.sent_bytes

    exact = on_ranks(world, partial(run, ""))
    for name, form in FORMATS.items():
        got = on_ranks(world, partial(run, name))
        for (values, sent), (expected, whole) in zip(got, exact, strict=True):
            for what, value in values.items():
                assert error(value, expected[what]) < (1e-9 if what == "largest" else 1.5 * ERRORS[name]), (name, what)
            largest = 2 * 2 / 3 * 4000
            assert (sent - largest) / (whole - largest) < form.nbytes(128) / 512 + 0.01, name
        for what in ("sum", "gather"):
            assert all(torch.equal(values[what], got[0][0][what]) for values, _ in got), (name, what)


@pytest.mark.ranks
def test_what_gains_nothing_and_whole_numbers_travel_as_they_are() -> None:
    def run(name: str, t: Transport) -> tuple[list[Tensor], int]:
        by = Short(t, name) if name else t
        values = [numbers(t.rank, TINY // 4 - 1), torch.arange(9999) + t.rank, numbers(t.rank, 9999).to(torch.bfloat16)]
        for value in values[: 3 if name in ("", "bf16") else 2]:
            by.all_reduce(value, (0, 1)).wait()
        return values[:2], t.sent_bytes

    exact = on_ranks(2, partial(run, ""))
    assert on_ranks(2, partial(run, "bf16"))[0][1] == exact[0][1]
    for name in FORMATS:
        for (values, _), (expected, _) in zip(on_ranks(2, partial(run, name)), exact, strict=True):
            assert all(map(torch.equal, values, expected)), name


@pytest.mark.ranks
@pytest.mark.slow
def test_the_error_of_a_sum_in_float32_does_not_grow_with_the_ranks_as_that_of_a_ring_does() -> None:
    def summed(t: Transport) -> Tensor:
        total = numbers(t.rank, 2048)
        Short(t, "bf16").all_reduce(total, tuple(range(t.world))).wait()
        return total

    errors, rings = [], []
    for world in (2, 64):
        each = [numbers(rank, 2048) for rank in range(world)]
        exact = torch.stack(each).double().sum(0)
        errors.append(error(run_ranks(world, summed)[-1], exact))
        rings.append(error(reduce(torch.add, (x.to(torch.bfloat16) for x in each)), exact))
    assert errors[1] < 1.2 * errors[0] and errors[0] < 3e-3
    assert rings[1] > 1.2 * rings[0]
    assert rings[1] > 2 * errors[1]


@pytest.mark.ranks
def test_a_sum_in_unequal_shares_is_that_in_rank_order_to_the_bit_and_sends_what_they_say() -> None:
    def run(name: str, shares: tuple[int, ...], ranks: tuple[int, ...], t: Transport) -> tuple[Tensor, int]:
        t.connect([ranks])
        total = numbers(t.rank, numel)
        if t.rank in ranks:
            Short(t, name, shares).all_reduce(total, ranks).wait()
        return total, t.sent_bytes

    every, whole = (0, 1, 2, 3), PIECE // 4
    for shares, ranks, numel in (
        ((100, 100, 100, 0), every, 2 * whole + 301),
        ((5, 0, 1, 2), every, 1000),
        ((100, 33, 100, 100), (0, 1, 3), whole),
        ((0, 0, 0, 7), every, whole + 1),
    ):
        expected = reduce(torch.add, (numbers(rank, numel) for rank in ranks))
        for name in ("exact", *FORMATS):
            got = [each for rank, each in enumerate(on_ranks(4, partial(run, name, shares, ranks))) if rank in ranks]
            assert all(torch.equal(total, got[0][0]) for total, _ in got), (name, shares)
            assert error(got[0][0], expected) <= (1.5 * ERRORS[name] if name != "exact" else 0.0), (name, shares)
            if name != "exact":
                continue
            for k, (_, sent) in enumerate(got):
                own = sum(part[k] for part in sum_parts(numel, ranks, shares))
                assert sent == 4 * (numel + (len(ranks) - 2) * own), (shares, k)
                assert abs(own - numel * shares[ranks[k]] / sum(shares[rank] for rank in ranks)) <= numel // whole + 1


@pytest.mark.ranks
def test_all_pieces_of_a_sum_are_under_way_and_awaited_at_once_and_sums_go_out_as_they_are_made() -> None:
    def run(t: Transport) -> tuple[int, list[tuple[int, int]]]:
        order, total, start = list[tuple[int, int]](), torch.ones(PIECE), t._exchange

        def noted(sends: Any, receives: Any, *others: Any) -> Work:
            order.append((len(sends), len(receives)))
            return start(sends, receives, *others)

        t._exchange = noted  # type: ignore[assignment, method-assign]
        work = Short(t, "exact", (1, 1, 0)).all_reduce(total, (0, 1, 2))
        begun = len(order)
        work.wait()
        assert torch.equal(total, torch.full_like(total, 3.0))
        return begun, order

    for rank, (begun, order) in enumerate(on_ranks(3, run)):
        sums = [] if rank == 2 else [(2, 0)] * 4  # of nothing, which is not sent
        assert begun == 8 and order == [(0, 2 if rank == 2 else 1), (2, 0) if rank == 2 else (1, 2)] * 4 + sums, order


@pytest.mark.ranks
def test_equal_shares_and_what_has_no_float32_are_the_backends() -> None:
    def run(shares: tuple[int, ...], dtype: torch.dtype, t: Transport) -> tuple[Tensor, list[str]]:
        seen, inner = list[str](), t._all_reduce
        t._all_reduce = lambda *given: seen.append("ring") or inner(*given)  # type: ignore[method-assign, func-returns-value]
        total = numbers(t.rank, 3000).to(dtype)
        Short(t, "exact", shares).all_reduce(total, (0, 1, 2)).wait()
        return total, seen

    for shares, dtype, ring in (
        ((1, 1, 0), torch.float32, False),
        ((7, 7, 7), torch.float32, True),
        ((0, 0, 0), torch.float32, True),
        ((1, 1, 0), torch.bfloat16, True),
        ((1, 1, 0), torch.float64, True),
    ):
        assert all(seen == ["ring"] * ring for _, seen in on_ranks(3, partial(run, shares, dtype))), (shares, dtype)


@pytest.mark.ranks
def test_what_a_sum_loses_comes_with_the_next_ones() -> None:
    steps = 20

    def drift(name: str, t: Transport) -> float:
        by, got, expected = Short(t, "int8"), torch.zeros(1000), torch.zeros(1000)
        for _ in range(steps):
            total = numbers(t.rank).pow(3)
            by.summed(total, (0, 1, 2), name).wait()
            got, expected = got + total, expected + sum(numbers(rank).pow(3) for rank in range(3))
        return error(got, expected)

    with_feedback, without = (max(run_ranks(3, partial(drift, name))) for name in ("bucket", ""))
    assert with_feedback < 3 / steps * without


@pytest.mark.ranks
def test_a_step_that_overflows_leaves_nothing_behind() -> None:
    def run(t: Transport) -> tuple[Tensor, Tensor]:
        by, bad, good = Short(t, "int8"), numbers(t.rank), numbers(t.rank)
        bad[::100] = float("inf")
        by.summed(bad, (0, 1), "bucket").wait()
        by.summed(good, (0, 1), "bucket").wait()
        return bad, good

    for bad, good in run_ranks(2, run):
        assert not bad.isfinite().all()
        assert error(good, numbers(0) + numbers(1)) < 0.2


def test_factors_travel_in_the_format_that_keeps_more_of_a_number() -> None:
    for activations, errors, expected in (
        ("int8", "bf16", "bf16"),
        ("fp16", "bf16", "fp16"),
        ("fp8", "exact", "exact"),
    ):
        assert Wire(activations, errors).factors == Wire(errors, activations).factors == expected
