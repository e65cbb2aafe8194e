"""This machine, measured."""

import time
from dataclasses import replace

import pytest
import torch

from cost_models import local
from cost_models.devices import load_cluster
from cost_models.local import measure_this_machine
from splitc.cluster import Link
from splitc.strategies import DataParallel, SingleDevice
from tests.small_programs import place, separable

SHORT = 0.05
"""Seconds to measure for: enough to get numbers, not to trust them."""


@pytest.fixture
def count_measurements(monkeypatch):
    """A list that grows with every real measurement."""
    counted, measure = [], local._measure
    monkeypatch.setattr(local, "_measure", lambda *args: counted.append(1) or measure(*args))
    return counted


def test_this_machine_has_numbers_of_the_right_order(tmp_path):
    cluster = measure_this_machine(SHORT, tmp_path)
    assert cluster.name == "this-machine"
    assert set(cluster.device.flop_rate) == {"float32", "float64", "bfloat16", "float16"}
    assert 1e8 < cluster.device.flop_rate["float32"] < 1e16
    assert 1e8 < cluster.device.memory_bandwidth < 1e14
    assert 1e8 < cluster.device.memory < 1e14
    assert 1e-8 < cluster.device.launch < 1e-2
    assert 1e6 < cluster.link.bandwidth < 1e13
    assert 1e-7 < cluster.link.latency < 1e-1

    assert set(cluster.link.collectives) == {"all_reduce", "all_gather", "reduce_scatter"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks on GPUs have one each")
def test_the_device_of_a_cpu_is_a_core_and_as_many_ranks_as_cores_have_one_each(tmp_path, monkeypatch):
    monkeypatch.setattr("cost_models.calibration.calibrate.cores", lambda: 2)
    cluster = measure_this_machine(SHORT, tmp_path)
    assert cluster.ranks_share_device and cluster.cores == 2
    assert cluster.world is None
    one, two, four = (cluster.device_for(ranks) for ranks in (1, 2, 4))
    assert two.flop_rate == one.flop_rate and two.memory_bandwidth == one.memory_bandwidth
    assert four.flop_rate["float32"] == pytest.approx(one.flop_rate["float32"] / 2)
    assert two.memory == one.memory / 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks on GPUs have one each")
def test_two_ranks_on_two_cores_take_half_as_long_to_compute_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr("cost_models.calibration.calibrate.cores", lambda: 2)
    here = measure_this_machine(SHORT, tmp_path)
    cluster = replace(here, device=replace(here.device, launch=0.0), link=Link(1e15, 0.0))
    one = place(separable(), 1, SingleDevice(), cluster, global_batch=32)
    two = place(separable(), 2, DataParallel(), cluster, global_batch=32)
    assert two.step_seconds == pytest.approx(one.step_seconds / 2, rel=1e-3)


def test_a_second_call_reads_the_cache(tmp_path, count_measurements):
    first = measure_this_machine(SHORT, tmp_path)
    assert measure_this_machine(SHORT, tmp_path) == first
    assert len(count_measurements) == 1


def test_another_version_of_torch_measures_again(tmp_path, count_measurements, monkeypatch):
    measure_this_machine(SHORT, tmp_path)
    monkeypatch.setattr(torch, "__version__", "99")
    measure_this_machine(SHORT, tmp_path)
    assert len(count_measurements) == 2


@pytest.mark.parametrize("rubbish", [b"", b"name = ", b"\xff\xfe", b'name = "this-machine"'])
def test_a_cache_that_cannot_be_read_is_measured_again(tmp_path, count_measurements, rubbish):
    first = measure_this_machine(SHORT, tmp_path)
    (cache,) = tmp_path.iterdir()
    cache.write_bytes(rubbish)
    second = measure_this_machine(SHORT, tmp_path)
    assert len(count_measurements) == 2
    assert second.name == first.name
    assert measure_this_machine(SHORT, tmp_path) == second


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path):
    (tmp_path / "file").touch()
    assert measure_this_machine(SHORT, tmp_path / "file" / "below").name == "this-machine"


def test_no_cluster_means_this_machine_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stored = measure_this_machine(SHORT)
    assert [path.parent.name for path in tmp_path.glob("*/*.toml")] == ["splitc"]
    assert load_cluster() == load_cluster("this-machine") == stored


def test_measuring_keeps_to_its_budget_and_to_the_number_of_threads(tmp_path):
    threads = torch.get_num_threads()
    begin = time.perf_counter()
    measure_this_machine(0.5, tmp_path)
    assert time.perf_counter() - begin < 5
    assert torch.get_num_threads() == threads
