"""Timing the device at hand: what is run, what is counted of it, and that the numbers make a cluster."""

from __future__ import annotations

import statistics
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from splitc.cost_models.calibration import devices
from splitc.cost_models.calibration.device_fit import fitted
from splitc.cost_models.calibration.devices import measure_device, time_microbenchmarks
from splitc.cost_models.calibration.microbenchmarks import Microbenchmark, microbenchmarks
from splitc.ir.cluster import Cluster
from splitc.ir.cluster_file import parse_cluster, to_toml
from splitc.ir.device import Link

CPU = torch.device("cpu")
FAST = (
    "linear 16",
    "linear 256 x 256",
    "small",
    "conv 32 x 40",
    "attention 8 x 4 x 48",
    "relu of 65536",
    "gelu of 65536",
)


def quick() -> list[Microbenchmark]:
    """A few of the microbenchmarks, which take milliseconds."""
    return [each for each in microbenchmarks(CPU) if each.what.startswith(FAST)]


def no_progress(text: str) -> None:
    pass


@pytest.mark.slow
def test_every_microbenchmark_has_work_to_do_and_a_name_of_its_own_and_leaves_nothing_behind() -> None:
    spread, seen = microbenchmarks(CPU), set[tuple[str, bool]]()
    assert len({each.what for each in spread}) == len(spread)
    for each in spread:
        forward, backward = devices._counted(each)
        assert forward and not any(op.backward for op in forward)
        assert all(op.backward for op in backward)
        assert each.what.startswith("update") or backward
        assert each.given.grad is None and all(parameter.grad is None for parameter in each.parameters)
        seen |= {(op.op_class, op.backward) for op in (*forward, *backward)}
    both = ("matmul", "conv", "attention", "memory", "math", "batch_norm", "pool", "max_pool")
    assert seen == {(op, back) for op in both for back in (False, True)} | {("random", False)}, "both ways"


@pytest.mark.slow
def test_every_sample_is_a_direction_of_a_microbenchmark_that_took_time() -> None:
    spread, told = quick(), list[str]()
    samples = time_microbenchmarks(spread, CPU, 0.01, told.append)
    assert {each.what for each in samples} == {f"{e.what}{end}" for e in spread for end in ("", ", backward")}
    assert all(each.seconds > 0 for each in samples)
    assert any("round 3" in text for text in told)  # however small the budget


def test_a_backward_of_products_takes_longer_than_its_forward() -> None:
    layer = nn.Linear(512, 512)
    spread = [Microbenchmark("linear", layer, torch.randn(256, 512, requires_grad=True), tuple(layer.parameters()))]
    forward, backward = time_microbenchmarks(spread, CPU, 0.2, no_progress)
    assert backward.seconds > forward.seconds


@pytest.mark.slow
def test_a_measured_device_explains_its_samples_and_stands_in_a_cluster_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "microbenchmarks", lambda where: quick())
    before = torch.random.get_rng_state()
    fit = measure_device(CPU, 0.3, no_progress)
    assert torch.equal(torch.random.get_rng_state(), before)
    device = fit.device
    assert {"float32", "float64", "bfloat16"} <= set(device.flop_rate)
    assert all(1e8 < rate < 1e15 for rate in device.flop_rate.values())
    assert device.memory > 1e8 and device.launch < 1e-2 and device.name
    assert statistics.median(abs(each.fitted / each.measured - 1) for each in fit.residuals) < 0.5
    cluster = Cluster("here", device, Link(1e9, 1e-5))
    assert parse_cluster(to_toml(cluster), "text") == cluster


@pytest.mark.slow
def test_residuals_are_what_the_given_numbers_make_of_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = time_microbenchmarks(quick(), CPU, 0.01, no_progress)
    monkeypatch.setattr(devices, "time_microbenchmarks", lambda *_: samples)
    fit = measure_device(CPU, 0.1, no_progress)
    assert [(each.what, each.measured) for each in fit.residuals] == [(each.what, each.seconds) for each in samples]
    assert [each.fitted for each in fit.residuals] == [fitted(each, fit.device) for each in samples]


def test_convolutions_are_in_tf32_from_ampere_on_unless_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for capability, set_to, found in (((8, 0), "tf32", True), ((7, 5), "tf32", False), ((9, 0), "ieee", False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where, it=capability: it)
        monkeypatch.setattr(torch.backends.cudnn, "conv", SimpleNamespace(fp32_precision=set_to))
        assert devices.tf32(gpu) is found and not devices.tf32(CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_a_gpu_is_measured_in_its_own_time() -> None:
    fit = measure_device(torch.device("cuda", 0), 5.0, no_progress)
    assert fit.device.flop_rate["float32"] > 1e12 and fit.device.memory_bandwidth > 1e11
    assert statistics.median(abs(each.fitted / each.measured - 1) for each in fit.residuals) < 0.5
