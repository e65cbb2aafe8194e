"""Calibration: lines fitted to messages of known links, ranks that differ, and `splitc calibrate` on real processes."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from splitc.cli import calibrating
from splitc.cli.files import write_file
from splitc.cost_models.calibration import calibrate as calibration
from splitc.cost_models.calibration import links, overlap, rank_timer
from splitc.cost_models.calibration.assemble import RankLayout, alike, assemble, mean_device, rounded
from splitc.cost_models.calibration.calibrate import Calibration, calibrate
from splitc.cost_models.calibration.devices import DeviceFit, Residual
from splitc.cost_models.calibration.link_fit import LinkFit, fit_factor, fit_line, fit_links
from splitc.cost_models.calibration.links import measure_links
from splitc.cost_models.calibration.loopback import gpu_link
from splitc.cost_models.calibration.rank_timer import RankTimer, midmean
from splitc.cost_models.calibration.samples import LinkSamples, Overlap, Sample, pairs_beside_one
from splitc.cost_models.clusters.named import load_cluster
from splitc.cost_models.network import alpha_beta
from splitc.errors import LaunchError
from splitc.ir.cluster import Cluster, Unlike
from splitc.ir.cluster_file import parse_cluster, to_toml
from splitc.ir.device import COLLECTIVES, Device, Link, Rate
from splitc.runtime.launch.torchrun import _alive, _descendants
from splitc.runtime.transport.base import Transport
from splitc.runtime.transport.simulated import run_ranks
from tests import ROOT
from tests.support.command import splitc
from tests.support.sampling import sampled

Capture = pytest.CaptureFixture[str]
CPU = torch.device("cpu")

SLOW = Link(28e6, 3e-4)
FAST = Link(
    1.2e9,
    2e-5,
    duplex=False,
    processor=4e-10,
    collectives={
        "all_reduce": Rate(8e8, 5e-5),
        "all_gather": Rate(5e8, 9e-5),
        "reduce_scatter": Rate(1e9, 4e-5),
        "all_to_all": Rate(7e8, 3e-5),
    },
)
DEVICE = Device("a core", {"float32": 1e11, "float64": 5e10}, 2e10, 16e9, {"matmul": 0.9, "memory": 1.0}, 3e-6)
TWO = RankLayout(world=2, per_host=2, slots=2, gpus=False)


# -- lines -------------------------------------------------------------------------------------------------------------


def test_a_line_through_exact_points_is_found() -> None:
    for latency, bandwidth in product((0.0, 1e-6, 3e-3), (1e6, 28e6, 1e10)):
        points = [(k, n, k * latency + n / bandwidth) for k, n in ((1, 64), (1, 1e6), (6, 3e6), (2, 8e6))]
        assert fit_line(points) == pytest.approx((latency, bandwidth), rel=1e-6, abs=1e-12)


def test_noise_moves_a_line_by_no_more_than_itself() -> None:
    for seed in range(5):
        noise = random.Random(seed)
        points = [
            (1.0, n, (1e-4 + n / 1e8) * noise.uniform(0.9, 1.1))
            for n in (64, 2048, 1e5, 1e6, 4e6, 8e6)
            for _ in range(3)
        ]
        latency, bandwidth = fit_line(points)
        assert latency == pytest.approx(1e-4, rel=0.1)
        assert bandwidth == pytest.approx(1e8, rel=0.1)


def test_a_line_has_no_negative_latency_and_no_more_bandwidth_than_was_seen_where_it_falls() -> None:
    latency, bandwidth = fit_line([(1, 1e6, 0.9), (1, 2e6, 2.0), (1, 4e6, 4.2)])
    assert latency == 0.0 and bandwidth == pytest.approx(1e6, rel=0.1)
    latency, bandwidth = fit_line([(1, 64, 1.1e-3), (1, 1e6, 0.9e-3)])
    assert bandwidth == pytest.approx(1e6 / 0.9e-3) and 0 <= latency < 1.1e-3
    assert fit_line([(1, 1e6, 2.0)]) == (0.0, 5e5)


def test_a_factor_is_what_the_rest_takes_of_the_unit() -> None:
    assert fit_factor([(1.0, 2.0, 7.0), (0.0, 1.0, 3.0)]) == pytest.approx(3.0)


# -- links from what they would show -----------------------------------------------------------------------------------


def shown(of: Callable[[int], Link], sample: Sample) -> float:
    """Seconds of what is timed, where each rank has a link of its own."""
    members = [of(rank) for rank in sample.ranks]
    slowest, n = min(members, key=lambda link: link.bandwidth), len(sample.ranks)
    if sample.kind in ("many_to_one", "one_to_many"):
        at_the_one = alpha_beta.many_to_one(sample.nbytes, n - 1, members[0])
        return max(at_the_one, alpha_beta.point_to_point(sample.nbytes, slowest))
    if sample.kind in COLLECTIVES:
        formula = {
            "all_reduce": alpha_beta.ring_all_reduce,
            "all_gather": alpha_beta.all_gather,
            "reduce_scatter": alpha_beta.reduce_scatter,
            "all_to_all": alpha_beta.all_to_all,
        }
        return formula[sample.kind](sample.nbytes, n, slowest)
    times = {"exchange": 1 if slowest.duplex else 2, "pairs": n // 2 if slowest.shared else 1}.get(sample.kind, 1)
    return alpha_beta.point_to_point(times * sample.nbytes, slowest)


def measured(
    monkeypatch: pytest.MonkeyPatch,
    world: int,
    truth: Callable[[Sample], float],
    processor: Callable[[int], float] = lambda rank: 0.0,
    ranks_per_host: int | None = None,
) -> LinkSamples:
    """What `measure_links` would find on `world` ranks if everything took the seconds of `truth`."""

    def growing(timer: RankTimer, kind: str, ranks: Any, sizes: Any, *_: Any, **__: Any) -> list[Sample]:
        return [Sample(kind, ranks, n, truth(Sample(kind, ranks, n, 0.0))) for n in sizes]

    def computing(timer: RankTimer, budget: float) -> tuple[Overlap, ...]:
        return tuple(Overlap(r, 1 << 20, 2e6, 0.1, 0.1 + 2e6 * processor(r)) for r in range(world))

    monkeypatch.setattr(links, "growing", growing)
    monkeypatch.setattr(links, "computing", computing)
    found = run_ranks(world, partial(measure_links, budget=1.0, ranks_per_host=ranks_per_host))
    assert all(each == found[0] for each in found)
    return found[0]


def same(found: Link, truth: Link) -> bool:
    numbers = [(found.bandwidth, truth.bandwidth), (found.latency, truth.latency), (found.processor, truth.processor)]
    for name, rate in truth.collectives.items():
        numbers += [
            (found.collectives[name].bandwidth, rate.bandwidth),
            (found.collectives[name].latency, rate.latency),
        ]
    close = all(a == pytest.approx(b, rel=1e-3) for a, b in numbers)
    return close and (found.duplex, found.shared) == (truth.duplex, truth.shared)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "link"), [(2, FAST), (3, SLOW), (8, replace(SLOW, duplex=False)), (4, replace(FAST, shared=True))]
)
def test_a_known_link_is_recovered_from_what_it_shows(world: int, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    if world < 4:
        link = replace(link, shared=False)  # a pair alone cannot tell
    truth = partial(shown, lambda rank: link)
    if link.shared:  # what many send to one is the same on a link that they share
        assert link.collectives
    fit = fit_links(measured(monkeypatch, world, truth, lambda rank: link.processor))
    assert all(same(found, link) for found in fit.links)
    assert fit.local is None
    assert all(each.fitted == pytest.approx(each.measured, rel=1e-3) for each in fit.residuals)
    kinds = {re.split(r" over|,", each.what)[0] for each in fit.residuals}
    expected = {"message", "exchange", "all reduce", "all gather", "reduce scatter"}
    assert expected <= kinds
    assert ("many to one" in kinds) == (world > 2) and ("pairs" in kinds) == (world > 3)


@pytest.mark.parametrize("seed", range(2))
def test_noise_of_a_tenth_leaves_all_ranks_alike_and_the_numbers_within_a_tenth(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def truth(sample: Sample) -> float:
        return shown(lambda rank: FAST, sample) * random.Random(f"{seed} {sample}").uniform(0.95, 1.05)

    found = measured(monkeypatch, 4, truth)
    fit = fit_links(found, alike=True)
    assert len(set(map(id, fit.links))) == 1
    assert fit.links[0].bandwidth == pytest.approx(FAST.bandwidth, rel=0.1)
    for name in COLLECTIVES:
        assert fit.links[0].collectives[name].bandwidth == pytest.approx(FAST.collectives[name].bandwidth, rel=0.1)
    assert all(abs(each.fitted / each.measured - 1) < 0.15 for each in fit.residuals)


@pytest.mark.parametrize("slow", [(0,), (1, 2, 4)])
def test_ranks_on_slower_links_are_told_from_the_others(slow: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def link_of(rank: int) -> Link:
        return SLOW if rank in slow else replace(SLOW, bandwidth=100e6)

    fit = fit_links(measured(monkeypatch, 5, partial(shown, link_of)))
    assert [same(found, link_of(rank)) for rank, found in enumerate(fit.links)] == [True] * 5
    assert all(each.fitted == pytest.approx(each.measured, rel=1e-3) for each in fit.residuals)
    assert any("with rank" in each.what for each in fit.residuals)


def test_a_rank_far_away_is_told_from_the_others_by_its_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    def truth(sample: Sample) -> float:
        return shown(lambda rank: FAST, sample) + (0.05 if 3 in sample.ranks else 0.0)

    fit = fit_links(measured(monkeypatch, 4, truth))
    assert [found == fit.links[0] for found in fit.links] == [True, True, True, False]
    assert fit.links[3].latency == pytest.approx(0.05, rel=0.1)


def test_one_disturbed_size_does_not_make_a_rank_unlike_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def truth(sample: Sample) -> float:
        disturbed = sample.kind == "message" and 3 in sample.ranks and sample.nbytes == max(links.MESSAGES)
        return shown(lambda rank: SLOW, sample) * (1.4 if disturbed else 1.0)

    fit = fit_links(measured(monkeypatch, 4, truth))
    assert all(found == fit.links[0] for found in fit.links)


def test_all_ranks_are_alike_where_they_have_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, 3, partial(shown, lambda rank: SLOW if rank == 1 else FAST))
    assert len(set(map(id, fit_links(found, alike=True).links))) == 1


def test_ranks_of_a_host_have_a_link_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def truth(sample: Sample) -> float:
        one_host = len({rank // 2 for rank in sample.ranks}) == 1
        return shown(lambda rank: FAST if one_host else SLOW, sample)

    fit = fit_links(measured(monkeypatch, 6, truth, ranks_per_host=2))
    assert fit.local is not None and same(replace(fit.local, processor=FAST.processor), FAST)
    assert all(same(found, SLOW) for found in fit.links)
    assert any("in a host" in each.what for each in fit.residuals)


@pytest.mark.parametrize("shared", [True, False])
def test_whether_ranks_of_a_host_share_a_line_is_found_whatever_the_noise(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 20 % more for each sample, a message that is disturbed at all sizes, and a bucket of 64 kB."""

    def truth(sample: Sample) -> float:
        link = FAST if len({rank // 2 for rank in sample.ranks}) == 1 else replace(SLOW, shared=shared)
        noise = random.Random(f"{seed} {sample}")
        disturbed = sample.kind == "message" and sample.ranks == (0, 3) and seed % 3 == 0
        settled = replace(sample, nbytes=max(0.0, sample.nbytes - (1 << 16)) if sample.nbytes >= 1 << 18 else 64.0)
        return shown(lambda rank: link, settled) * noise.uniform(1.0, 1.2) * (1.3 if disturbed else 1.0)

    wrong = []
    for seed in range(12):
        found = measured(monkeypatch, 4, truth, ranks_per_host=2)
        sizes = links.LARGE[: 1 + seed % 3]  # of pairs as many as the budget allowed
        kept = tuple(each for each in found.samples if each.kind != "pairs" or each.nbytes in sizes)
        wrong += [seed for link in fit_links(replace(found, samples=kept)).links[:1] if link.shared != shared]
    assert wrong == []


@pytest.mark.parametrize(("loaded", "shared"), [("message", True), ("pairs", False)])
def test_whether_ranks_share_a_line_does_not_depend_on_when_the_machine_is_busy(
    loaded: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def truth(sample: Sample) -> float:
        link = FAST if len({rank // 2 for rank in sample.ranks}) == 1 else replace(SLOW, shared=shared)
        return shown(lambda rank: link, sample) * (1.9 if sample.kind == loaded else 1.0)

    fit = fit_links(measured(monkeypatch, 4, truth, ranks_per_host=2))
    assert [link.shared for link in fit.links] == [shared] * 4


def test_pairs_take_further_turns_until_these_agree_or_most_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    timer: Any = SimpleNamespace(transport=SimpleNamespace(connect=list), progress=lambda text: None)
    for times, turns in (([2.0], 3), ([1.0], 3), ([1.9, 1.1, 2.0], 9), ([1.0, 1.2, 1.3], 3)):

        def growing(timer: Any, kind: str, ranks: Any, sizes: Any, *_: Any, **__: Any) -> list[Sample]:
            several = len(ranks) > 2
            return [Sample(kind, ranks, 1e6, next(taken) if several else 1.0)]  # noqa: B023  # used in this turn

        taken = cycle(times)
        monkeypatch.setattr(links, "growing", growing)
        monkeypatch.setattr(links, "_operation", lambda *_: None)
        found = links._pairs(timer, (0, 1, 2, 3), 1.0)
        assert [each.ranks for each in found] == turns * [(0, 2), (0, 1, 2, 3)], times
        assert pairs_beside_one(found) == {1e6: list(islice(cycle(times), turns))}


def test_pairs_at_once_all_send_in_one_direction() -> None:
    def run(transport: Transport) -> int:
        before = transport.sent_bytes
        links._operation(RankTimer(transport), "pairs", (0, 1, 2, 3))(torch.ones(256))
        return transport.sent_bytes - before

    assert run_ranks(4, run) == [1024, 1024, 0, 0]


def test_the_link_in_a_host_has_the_bandwidth_of_a_rank_while_all_send(monkeypatch: pytest.MonkeyPatch) -> None:
    def truth(sample: Sample) -> float:
        return shown(lambda rank: replace(FAST, shared=len({rank // 4 for rank in sample.ranks}) == 1), sample)

    fit = fit_links(measured(monkeypatch, 8, truth, ranks_per_host=4))
    assert fit.local is not None and not fit.local.shared
    assert fit.local.bandwidth == pytest.approx(FAST.bandwidth / 2, rel=1e-3)
    assert not fit.links[0].shared
    layout = RankLayout(world=8, per_host=4, slots=4, gpus=True)
    reads_back(rounded(assemble("two", "", fits(*[DEVICE] * 8), fit, layout)))


def test_what_a_token_bucket_lets_through_at_once_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = 57_000

    def truth(sample: Sample) -> float:
        unhindered = min(sample.nbytes, bucket) if sample.kind == "message" else 0
        return shown(lambda rank: SLOW, replace(sample, nbytes=sample.nbytes - unhindered)) + unhindered / 5e9

    (link, _) = fit_links(measured(monkeypatch, 2, truth)).links
    assert link.bandwidth == pytest.approx(SLOW.bandwidth, rel=0.05)
    assert link.latency == pytest.approx(SLOW.latency, rel=0.05)


def test_nor_does_what_it_lets_through_of_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    def truth(sample: Sample) -> float:
        quick = sample.kind == "all_gather" and sample.nbytes == 1 << 18
        return shown(lambda rank: SLOW, sample) * (0.5 if quick else 1.0)

    (link, _) = fit_links(measured(monkeypatch, 2, truth)).links
    assert link.collectives["all_gather"].bandwidth == pytest.approx(SLOW.bandwidth, rel=0.01)


def test_transfers_that_take_nothing_from_computing_are_no_gain() -> None:
    samples = tuple(Sample("message", (0, 1), n, alpha_beta.point_to_point(n, FAST)) for n in links.MESSAGES)
    for together, processor in ((0.09, 0.0), (0.1, 0.0), (0.101, 5e-10), (9.0, 2 / FAST.bandwidth)):
        overlaps = tuple(Overlap(rank, 1 << 20, 2e6, 0.1, together) for rank in (0, 1))
        assert fit_links(LinkSamples(2, samples, overlaps)).links[0].processor == pytest.approx(processor, rel=1e-3)


def test_what_a_message_takes_of_computing_is_told_from_what_its_bytes_take() -> None:
    samples = tuple(Sample("message", (0, 1), n, alpha_beta.point_to_point(n, SLOW)) for n in links.MESSAGES)
    large, small = (Overlap(0, size, 2.0 * size, 0.1, 0.1 + 2e-8 * size, 0.0) for size in (1 << 20, 1 << 16))
    for seconds, found in ((2e-4, 2e-4), (1.0, SLOW.latency)):  # no more than a message takes in all
        beside = replace(small, together=small.together + 20 * seconds, messages=20.0)
        link = fit_links(LinkSamples(2, samples, (large, beside)), alike=True).links[0]
        assert (link.processor, link.message_processor) == pytest.approx((1e-8, found), rel=1e-3)


def test_a_collective_of_which_only_small_sizes_are_known_is_no_faster_than_the_link() -> None:
    """Both took about as long for their messages: a line through them had 18 MB/s on a link of 10."""
    points = [(20, 7.4e3, 99.6e-3), (20, 477e3, 108.7e-3)]
    assert fit_line(points)[1] > 2e7
    latency, bandwidth = fit_line(points, most=1e7)
    assert bandwidth == pytest.approx(1e7) and latency == pytest.approx(3.9e-3, rel=0.1)
    assert fit_line([(1, 64, 1e-5), (1, 1e6, 0.05)], most=1e7)[1] == pytest.approx(2e7, rel=0.01)  # which was reached


def test_one_slow_small_message_is_no_other_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    def truth(sample: Sample) -> float:
        paused = sample.kind == "message" and 2 in sample.ranks and sample.nbytes == min(links.MESSAGES)
        return shown(lambda rank: SLOW, sample) + (0.05 if paused else 0.0)

    fit = fit_links(measured(monkeypatch, 4, truth))
    assert all(found == fit.links[0] for found in fit.links)


def test_the_spread_of_computing_is_the_variance_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(jitter: float) -> float:
        drawn = random.Random(0)

        def products(timer: RankTimer, times: int) -> float:
            return times * 1e-4 + drawn.gauss(0.0, 1.0) * (jitter * times * 1e-4) ** 0.5

        monkeypatch.setattr(overlap, "_products", products)
        return run_ranks(1, lambda transport: overlap.measure_jitter(RankTimer(transport), 2.0))[0]

    assert found(1e-3) == pytest.approx(1e-3, rel=0.5)
    assert found(1e-6) == 0.0  # too steady to matter


# -- timing ------------------------------------------------------------------------------------------------------------


def test_the_middle_half_leaves_out_what_is_slowed_down_and_what_was_buffered() -> None:
    assert midmean([5.0]) == 5.0
    assert midmean([1, 1, 1, 90]) == 1.0
    assert midmean([0, 2] * 8) == 1.0


def test_a_bench_times_what_some_ranks_do_and_tells_all(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = dict.fromkeys(range(3), 0)

    def run(transport: Transport) -> tuple[float, float]:
        timer = RankTimer(transport)

        def work() -> None:
            calls[transport.rank] += 1
            time.sleep(0.002 if transport.rank == 1 else 0.0)

        return timer.seconds((1, 2), work, 0.05), timer.spent

    found = run_ranks(3, run)
    assert len(set(found)) == 1
    seconds, spent = found[0]
    assert 0.002 <= seconds < spent
    assert calls[0] == 0 and calls[1] == calls[2] >= 4


@pytest.mark.slow
@sampled(("world", "per_host"), [(2, None), (3, None), (4, None), (4, 2)], everyday=[(4, 2)])
def test_every_kind_is_timed_on_every_world(world: int, per_host: int | None) -> None:
    found = run_ranks(world, partial(measure_links, budget=0.2, ranks_per_host=per_host))
    assert all(each == found[0] for each in found)
    kinds = {each.kind for each in found[0].samples}
    assert {"message", "exchange", *COLLECTIVES} <= kinds
    assert ("many_to_one" in kinds) == ("one_to_many" in kinds) == (world > 2)
    assert all(each.seconds > 0 for each in found[0].samples)
    assert {each.rank for each in found[0].overlaps} == set(range(world))
    if per_host is None:
        assert {each.ranks for each in found[0].samples if each.kind == "message"} >= {(0, r) for r in range(1, world)}


def test_a_slow_link_is_timed_with_smaller_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def largest(bandwidth: float) -> float:
        def run(transport: Transport) -> list[Sample]:
            timer = RankTimer(transport)
            monkeypatch.setattr(timer, "seconds", lambda ranks, run, allowed: 1e-4 + 1e6 / bandwidth)
            return links.growing(timer, "message", (0, 1), links.MESSAGES, lambda _: None, 1.0)

        return max(each.nbytes for each in run_ranks(2, run)[0])

    assert largest(1e6) == links.ALWAYS
    assert largest(1e9) == max(links.MESSAGES)


class NVLink:
    """A link of 3 us and 370 GB/s on a clock of its own; to wait for the GPU takes 15 us, to issue an operation 2."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.busy = 0.0
        monkeypatch.setattr(rank_timer, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(RankTimer, "settle", self.settle)
        monkeypatch.setattr(torch, "ones", lambda n, device=None: torch.empty(n, device="meta"))

    def settle(self, timer: object = None) -> None:
        self.now = max(self.now, self.busy) + 15e-6

    def move(self, tensor: torch.Tensor) -> None:
        self.now += 2e-6
        self.busy = max(self.now, self.busy) + 3e-6 + tensor.nbytes / 370e9

    def samples(self, device: torch.device | None = None) -> list[Sample]:
        def run(transport: Transport) -> list[Sample]:
            return links.growing(RankTimer(transport, device=device), "message", (0,), links.MESSAGES, self.move, 1.0)

        return run_ranks(1, run)[0]


def test_the_bandwidth_of_nvlink_is_found_and_no_latency_of_waiting_for_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = NVLink(monkeypatch).samples(torch.device("cpu"))
    assert max(each.nbytes for each in samples) == links.MOST
    latency, bandwidth = fit_line([(1, each.nbytes, each.seconds) for each in samples])
    assert latency == pytest.approx(3e-6, rel=0.1) and bandwidth == pytest.approx(370e9, rel=0.01)


def test_where_a_wait_is_the_programs_no_message_is_issued_ahead_or_larger_than_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = NVLink(monkeypatch).samples()
    assert [each.nbytes for each in samples] == list(links.MESSAGES)
    assert samples[0].seconds == pytest.approx(2e-6 + 3e-6 + 15e-6, rel=0.01)


def test_the_link_of_two_gpus_is_that_of_their_copies() -> None:
    found = gpu_link(0.05, CPU, CPU)
    assert links.ALWAYS <= found.largest <= links.MOST and found.links[0].bandwidth > 1e6
    assert len(found.residuals) >= len([size for size in links.MESSAGES if size <= links.ALWAYS])


# -- the cluster -------------------------------------------------------------------------------------------------------


def fits(*devices: Device | None) -> list[DeviceFit | None]:
    return [None if device is None else DeviceFit(device, ()) for device in devices]


def linked(*of: Link, local: Link | None = None) -> LinkFit:
    return LinkFit(of, local, ())


def reads_back(cluster: Cluster) -> Cluster:
    assert parse_cluster(to_toml(cluster), "it") == cluster
    return cluster


def test_ranks_on_the_cores_of_one_machine_share_them() -> None:
    cluster = reads_back(assemble("here", "", fits(DEVICE, DEVICE), linked(FAST, FAST), TWO))
    assert cluster.ranks_share_device and cluster.cores == 2 and cluster.unlike == ()
    assert cluster.world is None
    two, four = cluster.device_for(2), cluster.device_for(4)
    assert two.flop_rate["float32"] == pytest.approx(1e11) and two.memory == pytest.approx(8e9)
    assert four.flop_rate["float32"] == pytest.approx(5e10)


def test_a_machine_is_measured_in_float32_whatever_the_process_computes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers are kept for the models of others, and a model's file may set what is of the process."""

    def measured(*_: object) -> None:
        raise LaunchError(f"{torch.ones(1).dtype} {torch.ones(1).device} {torch.is_grad_enabled()}")

    monkeypatch.setattr(calibration, "measure_device", measured)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.no_grad(), pytest.raises(LaunchError, match=r"^torch.float32 cpu True$"):
            calibrate(None, 1.0, name="here")
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_of_more_ranks_than_cores_only_as_many_are_measured() -> None:
    ranks = RankLayout(world=4, per_host=4, slots=2, gpus=False)
    assert [ranks.measures(rank) for rank in range(4)] == [True, True, False, False]
    cluster = reads_back(assemble("here", "", fits(DEVICE, DEVICE, None, None), linked(*[FAST] * 4), ranks))
    assert cluster.cores == 2 and cluster.device_for(4).flop_rate["float32"] == pytest.approx(5e10)
    assert cluster.link.processor == pytest.approx(FAST.processor / 2)  # of a whole core


def test_separate_ranks_share_nothing_and_a_slow_one_is_unlike() -> None:
    ranks = RankLayout(world=4, per_host=4, slots=2, gpus=False, separate=True)
    assert all(ranks.measures(rank) for rank in range(4))
    devices = fits(DEVICE, DEVICE.scaled(1.1), DEVICE.scaled(0.5), DEVICE)
    cluster = reads_back(assemble("bed", "", devices, linked(SLOW, SLOW, SLOW, replace(SLOW, bandwidth=1e7)), ranks))
    assert not cluster.ranks_share_device and cluster.world == 4 and cluster.ranks_per_host is None
    assert [each.ranks for each in cluster.unlike] == [(2,), (3,)]
    assert cluster.device_of(2).flop_rate["float32"] == pytest.approx(5e10)
    assert cluster.link_of(3).bandwidth == 1e7 and cluster.link_of(2) == SLOW
    assert 1e11 < cluster.device_of(0).flop_rate["float32"] < 1.1e11  # the mean of those that are alike


def test_hosts_have_a_link_within_and_one_between_them() -> None:
    ranks = RankLayout(world=4, per_host=2, slots=1, gpus=False)
    assert [ranks.measures(rank) for rank in range(4)] == [True, False, True, False]
    cluster = reads_back(assemble("two", "", fits(DEVICE, None, DEVICE, None), linked(*[SLOW] * 4, local=FAST), ranks))
    assert cluster.ranks_per_host == 2 and cluster.link_over((1, 2)) == SLOW
    assert cluster.link_over((0, 1)) == replace(FAST, processor=FAST.processor / 2)  # of a whole core
    assert cluster.ranks_share_device and cluster.world == 4
    assert cluster.device_for(4).flop_rate["float32"] == pytest.approx(5e10)  # two ranks on the core of each host
    assert cluster.device_for(4).memory == pytest.approx(8e9)


def test_hosts_of_one_rank_share_nothing() -> None:
    ranks = RankLayout(world=3, per_host=1, slots=4, gpus=False)
    cluster = reads_back(assemble("three", "", fits(DEVICE, DEVICE, DEVICE), linked(SLOW, SLOW, SLOW), ranks))
    assert not cluster.ranks_share_device and cluster.ranks_per_host is None
    assert cluster.device_for(3) == cluster.device


def test_gpus_of_one_host_are_shared_only_where_they_are_fewer_than_ranks() -> None:
    assert not RankLayout(world=4, per_host=4, slots=4, gpus=True).shares_device
    assert RankLayout(world=4, per_host=4, slots=1, gpus=True).shares_device
    ranks = RankLayout(world=2, per_host=2, slots=2, gpus=True)
    cluster = reads_back(assemble("gpus", "", fits(DEVICE, DEVICE), linked(FAST, FAST), ranks))
    assert cluster.world == 2 and cluster.device.memory == pytest.approx(DEVICE.memory)


def test_devices_are_alike_within_a_margin_and_their_mean_lies_between() -> None:
    assert alike(DEVICE, DEVICE.scaled(1.2)) and not alike(DEVICE, DEVICE.scaled(1.4))
    assert not alike(DEVICE, replace(DEVICE, memory_bandwidth=1e10))
    mean = mean_device([DEVICE, DEVICE.slowed(1 / 4.0)])
    assert mean.flop_rate["float32"] == pytest.approx(2e11) and mean.efficiency["matmul"] == pytest.approx(0.9)
    assert mean.launch == pytest.approx(1.5e-6)


def test_a_quota_on_the_processor_slows_a_separate_device_down(monkeypatch: pytest.MonkeyPatch) -> None:
    for part, share in ((0.4, 0.4), (0.97, 1.0)):
        monkeypatch.setattr(time, "process_time", lambda part=part: part * time.perf_counter())
        assert calibration._share(0.05) == pytest.approx(share, rel=1e-3)


def test_the_numbers_of_a_file_have_four_digits() -> None:
    odd = DEVICE.scaled(1 / 3)
    unlike = (Unlike((1,), odd, FAST.with_bandwidth(1e9 / 3)),)
    cluster = Cluster("odd", odd, FAST.with_bandwidth(2e9 / 3), local_link=FAST, ranks_per_host=2, unlike=unlike)
    text = to_toml(rounded(cluster))
    numbers = re.findall(r" = ([\d.e+-]+)", text)
    assert numbers and all(float(f"{float(n):.4g}") == float(n) for n in numbers)
    assert rounded(cluster).link.collectives["all_reduce"].bandwidth == pytest.approx(
        cluster.link.collectives["all_reduce"].bandwidth, rel=1e-3
    )


@pytest.mark.slow
def test_all_ranks_get_the_same_calibration_and_it_is_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_device(where: torch.device, budget: float, progress: Callable[[str], None]) -> DeviceFit:
        progress("products")
        return DeviceFit(DEVICE, (Residual("products", 1.0, 1.1),))

    monkeypatch.setattr(calibration, "measure_device", measure_device)
    said: list[list[str]] = [[], []]
    found = run_ranks(2, lambda t: calibrate(t, 1.0, said[t.rank].append, name="mine"))
    assert found[0] == found[1]
    cluster = reads_back(found[0].cluster)
    assert cluster.name == "mine" and "2 ranks" in cluster.source and "MB at once, torch" in cluster.source
    assert set(cluster.link.collectives) == set(COLLECTIVES)
    assert "device, products" in said[0] and any("messages" in text for text in said[0])
    assert [each.what for each in found[0].residuals].count("products") == 1


def test_hosts_with_unequal_numbers_of_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(transport: Transport) -> None:
        monkeypatch.setattr(Transport, "all_gather_objects", lambda self, value: [(2, 1), (2, 1), (1, 1)])
        calibrate(transport, 1.0)

    with pytest.raises(LaunchError, match=r"unequal numbers of ranks.*2, 2, 1.*--separate"):
        run_ranks(3, run)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def none_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Starting a process is an error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))


@pytest.mark.usefixtures("none_started")
@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("-o cluster.txt", "cluster.txt is no name for a cluster file; it must end in .toml"),
        ("-o no/such/cluster.toml", "there is no folder"),
        ("-o mine.toml", "mine.toml is there and is no cluster file, so it is not overwritten"),
        ("--ranks 1", "a link has two ends"),
        ("--ranks 2 --backend nccl", "--backend nccl needs a GPU for each rank"),
        ("--budget 0", "'0' is not a number of seconds from 1 to 86400"),
        ("--budget soon", "'soon' is not a number of seconds"),
        ("--backend mpi", "unknown --backend 'mpi'"),
    ],
)
def test_what_is_wrong_is_said_before_any_process_starts(line: str, text: str, capsys: Capture) -> None:
    if torch.cuda.is_available() and ("nccl" in line or "--ranks 1" in line):
        pytest.skip("right where there are GPUs")
    Path("mine.toml").write_text('name = "something else"\n')
    done = splitc(capsys, f"calibrate {line}")
    assert done.code == 2 and text in done.err and done.out == ""
    assert Path("mine.toml").read_text() == 'name = "something else"\n'
    assert [path.name for path in Path().iterdir()] == ["mine.toml"]


def test_a_cluster_file_is_overwritten_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    calibrating.check_output(path)
    cluster = assemble("mine", "", fits(DEVICE, DEVICE), linked(FAST, FAST), TWO)
    write_file("-o", path, to_toml(cluster))
    calibrating.check_output(path)
    write_file("-o", path, to_toml(replace(cluster, name="again")))
    assert load_cluster(path).name == "again"
    assert [each.name for each in tmp_path.iterdir()] == ["mine.toml"]
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(LaunchError, match="not overwritten"):
        calibrating.check_output(path)


def test_without_gpus_as_many_ranks_start_as_there_are_cores_two_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for cores, ranks in ((1, 2), (2, 2), (6, 6), (96, calibrating.MOST)):
        monkeypatch.setattr("splitc.cli.calibrating.cores", lambda cores=cores: cores)
        assert calibrating.ranks_to_start(None, None) == ranks
    assert calibrating.ranks_to_start(3, "gloo") == 3


def test_the_report_has_the_numbers_how_to_use_them_and_every_residual_where_it_is_asked_to() -> None:
    ranks = RankLayout(world=3, per_host=3, slots=2, gpus=False, separate=True)
    cluster = assemble("bed", "measured", fits(DEVICE, DEVICE, DEVICE.scaled(0.5)), linked(FAST, FAST, SLOW), ranks)
    residuals = (Residual("message, 64 B", 2e-4, 3e-4), Residual("matmul", 0.5, 0.45))
    found = Calibration(cluster, residuals)
    assert "-10 %" not in calibrating.report(found, Path("bed.toml"))
    text = calibrating.report(found, Path("bed.toml"), everything=True)
    assert "warning   prices of what is like these miss by 30% and more: message, 64 B (+50 %)\n" in text
    assert re.search(r"^message, 64 B +200 us +300 us +\+50 %$", text, re.MULTILINE)
    assert re.search(r"^matmul +500 ms +450 ms +-10 %$", text, re.MULTILINE)
    assert "errors: half within 50%, all within 50%" in text
    assert "rank 2" in text and "9.60 Gbit/s" in text and "all-gather 4.00 Gbit/s" in text
    assert text.endswith("wrote bed.toml\nuse   splitc inspect MODEL --world N --cluster bed.toml")
    data = json.loads(calibrating.as_json(found, Path("bed.toml")))
    assert data["residuals"][0] == {
        "what": "message, 64 B", "measured": 2e-4, "fitted": 3e-4, "error": pytest.approx(0.5)
    }  # fmt: skip
    assert data["cluster"]["unlike"][0]["ranks"] == [2] and data["written"] == "bed.toml"


# -- real processes ----------------------------------------------------------------------------------------------------


def started(*arguments: object, folder: Path, launcher: list[str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, *(launcher or []), "-m", "splitc.cli", "calibrate", *map(str, arguments)]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's children ignore it else
    )


@pytest.mark.slow
@pytest.mark.processes
def test_the_command_measures_this_machine_on_real_ranks_and_writes_a_cluster(tmp_path: Path) -> None:
    process = started("-o", "mine.toml", "--budget", 1, "--ranks", 2, "--all", folder=tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    cluster = load_cluster(tmp_path / "mine.toml")
    assert cluster.name == "mine" and set(cluster.link.collectives) == set(COLLECTIVES)
    assert re.search(r"^message, 64 B +\S+ \w+ +\S+ \w+ +[+-]\d+ %$", out, re.MULTILINE)
    assert out.endswith("--cluster mine.toml\n") and "wrote mine.toml" in out
    assert "splitc: measuring 2 ranks for about 1 s" in err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


@pytest.mark.slow
@pytest.mark.processes
def test_under_torchrun_separate_ranks_are_measured_and_only_rank_0_prints(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    options = ["-o", "bed.toml", "--budget", 1, "--separate", "--json", "-q"]
    process = started(*options, folder=tmp_path, launcher=launcher)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "splitc:" not in err
    data: Mapping[str, Any] = json.loads(out)  # once
    cluster = load_cluster(tmp_path / "bed.toml")
    assert data["cluster"]["world"] == cluster.world == 3
    assert not cluster.ranks_share_device and cluster.ranks_per_host is None


@pytest.mark.processes
@pytest.mark.from_scratch
@pytest.mark.slow
def test_an_interrupt_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    process = started("-o", "mine.toml", "--budget", 100, "--ranks", 2, folder=tmp_path)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "round" in line:  # Python drops an interrupt in the callback of a weak reference, of which counting has many
            break
    ranks = _descendants(process.pid)
    assert len(ranks) >= 3  # torchrun and two ranks
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, "".join(lines) + err
    assert err.splitlines()[-1] == "splitc: stopped" and out == ""
    assert _alive(ranks) == []
    assert list(tmp_path.iterdir()) == []
