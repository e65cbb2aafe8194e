"""This machine, measured."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from splitc.cost_models.calibration.calibrate import cores
from splitc.cost_models.clusters import this_machine as local
from splitc.cost_models.clusters.named import load_cluster
from splitc.cost_models.clusters.this_machine import measure_this_machine
from splitc.ir.cluster import Cluster
from tests.support.small_programs import small_cluster

SHORT = 0.05
"""Seconds to measure for: enough to get numbers, not to trust them."""

Measured = tuple[Cluster, float, tuple[int, int]]
"""A cluster, the seconds that measuring it took, and the threads of torch before and after."""

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks on GPUs have one each")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """This machine, really measured; how long it took, and with how many threads before and after."""
    threads, begin = torch.get_num_threads(), time.perf_counter()
    cluster = measure_this_machine(SHORT, tmp_path_factory.mktemp("cache"))
    return cluster, time.perf_counter() - begin, (threads, torch.get_num_threads())


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows with every measurement, each of which is another small cluster."""
    counted: list[str] = []

    def measure(budget: float, key: str) -> Cluster:
        counted.append(key)
        return small_cluster(float(len(counted)), source=key)

    monkeypatch.setattr(local, "_measure", measure)
    return counted


@pytest.mark.slow
def test_this_machine_has_numbers_of_the_right_order(here: Measured) -> None:
    cluster = here[0]
    assert cluster.name == "this-machine"
    assert {"float32", "float64", "bfloat16"} <= set(cluster.device.flop_rate)
    assert 1e8 < cluster.device.flop_rate["float32"] < 1e16
    assert 1e8 < cluster.device.memory_bandwidth < 1e14
    assert 1e8 < cluster.device.memory < 1e14
    assert 1e-8 < cluster.device.launch < 1e-2
    assert 1e6 < cluster.link.bandwidth < 1e13
    assert 0 <= cluster.link.latency < 1
    assert set(cluster.link.collectives) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}


@pytest.mark.slow
@on_cpu
def test_the_device_of_a_cpu_is_a_core_and_as_many_ranks_as_cores_have_one_each(here: Measured) -> None:
    assert here[0].ranks_share_device and here[0].cores == cores()
    assert here[0].world is None
    cluster = replace(here[0], cores=2)
    one, two, four = (cluster.device_for(ranks) for ranks in (1, 2, 4))
    assert two.flop_rate == one.flop_rate and two.memory_bandwidth == one.memory_bandwidth
    assert four.flop_rate["float32"] == pytest.approx(one.flop_rate["float32"] / 2)
    assert two.memory == one.memory / 2


@pytest.mark.slow
def test_measuring_takes_seconds_and_keeps_the_number_of_threads(here: Measured) -> None:
    _, seconds, (before, after) = here
    assert seconds < 60  # about two, on a machine that does nothing else
    assert after == before


def test_a_second_call_reads_the_cache(tmp_path: Path, measurements: list[str]) -> None:
    first = measure_this_machine(SHORT, tmp_path)
    assert measure_this_machine(SHORT, tmp_path) == first
    assert len(measurements) == 1


@pytest.mark.parametrize("name", ["_FORMAT", "torch.__version__"])
def test_another_format_or_version_of_torch_measures_again(
    tmp_path: Path, measurements: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    measure_this_machine(SHORT, tmp_path)
    monkeypatch.setattr(f"splitc.cost_models.clusters.this_machine.{name}", "99")
    measure_this_machine(SHORT, tmp_path)
    assert len(set(measurements)) == 2


@pytest.mark.parametrize("rubbish", [b"", b"name = ", b"\xff\xfe", b'name = "this-machine"'])
def test_a_cache_that_cannot_be_read_is_measured_again(tmp_path: Path, measurements: list[str], rubbish: bytes) -> None:
    measure_this_machine(SHORT, tmp_path)
    (cache,) = tmp_path.iterdir()
    cache.write_bytes(rubbish)
    second = measure_this_machine(SHORT, tmp_path)
    assert len(measurements) == 2
    assert measure_this_machine(SHORT, tmp_path) == second
    assert len(measurements) == 2


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path: Path, measurements: list[str]) -> None:
    (tmp_path / "file").touch()
    assert measure_this_machine(SHORT, tmp_path / "file" / "below").name == "toy"
    assert measurements


def test_no_cluster_means_this_machine_in_the_users_cache(
    tmp_path: Path, measurements: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stored = measure_this_machine(SHORT)
    assert [path.parent.name for path in tmp_path.glob("*/*.toml")] == ["splitc"]
    assert load_cluster() == load_cluster("this-machine") == stored
