"""Sessions: ranks that are launched once, on the loopback device and on a network testbed where there is root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import splitc
from benchmarks import accuracy
from benchmarks.campaign import cluster_file
from benchmarks.errors import BenchmarkError
from benchmarks.figures import Figures
from benchmarks.layout import parse_rate
from benchmarks.load import started
from benchmarks.session import Session
from benchmarks.testbed import NetworkTestbed
from splitc.cost_models.clusters.named import load_cluster
from splitc.ir.cluster_file import to_toml
from tests import ROOT
from tests.benchmarks.test_campaign import MODEL
from tests.benchmarks.testbeds import OnLoopback, namespaces, skip_without_a_testbed
from tests.support.compiled import CLUSTER

pytestmark = pytest.mark.processes


def build(folder: Path, strategy: str, world: int = 2, hidden: int = 300) -> Path:
    model = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    images, labels = torch.randn(16, 64), torch.randint(10, (16,))
    loss = nn.functional.cross_entropy
    compiled = splitc.compile(model, world, images, labels, loss, strategy=strategy, cluster=CLUSTER)
    return compiled.save(folder / strategy)


@pytest.fixture
def can_have_a_testbed() -> None:
    skip_without_a_testbed()


@pytest.fixture
def session() -> Iterator[Session]:
    with OnLoopback(2) as testbed, Session(testbed) as session:
        yield session


@pytest.mark.slow
def test_ranks_take_builds_in_and_out_and_run_them_in_any_order(session: Session, tmp_path: Path) -> None:
    session.load("dp", build(tmp_path, "data_parallel"))
    session.load("alone", build(tmp_path, "single_device"))  # rank 1 has no work
    first = session.run("dp", steps=3)
    alone = session.run("alone", steps=2, warm_up=0, apart=True)
    again = session.run("dp", steps=5)
    assert [len(each) for each in (*first.seconds, *alone.seconds, *again.seconds)] == [3, 3, 2, 2, 5, 5]
    assert first.sent == again.sent, "the bytes of a step"
    assert first.sent[0] >= 4 * (64 * 300 + 300 * 10), "the gradients at least"
    assert max(alone.sent) < 100, "the loss at most"
    for each in (first, alone, again):
        assert 0 < each.step_seconds < 60 and min(each.processor) > 0
        assert all(seconds > 0 for rank in each.seconds for seconds in rank)
    session.unload("dp")
    session.run("alone", steps=1)
    with pytest.raises(BenchmarkError, match="KeyError: 'dp'"):
        session.run("dp", steps=1)
    with pytest.raises(BenchmarkError, match="the session is over"):
        session.run("alone", steps=1)


@pytest.mark.slow
def test_an_error_of_a_rank_is_shown_and_ends_the_session(tmp_path: Path) -> None:
    words = r"(?s)rank \d ended with status 3 before 'load':.*weights.pt is missing"
    with OnLoopback(2) as testbed, pytest.raises(BenchmarkError, match=words), Session(testbed) as session:
        session.load("nothing", tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("can_have_a_testbed")
def test_on_a_bed_plans_and_rates_are_swapped_and_no_step_is_faster_than_its_link(tmp_path: Path) -> None:
    rate = parse_rate("40Mbit")
    with NetworkTestbed(2, cpus=1.0) as testbed, Session(testbed) as session:
        for strategy in ("data_parallel", "layer_separation"):
            session.load(strategy, build(tmp_path, strategy, hidden=2000))
        for _ in range(2):
            for name in ("data_parallel", "layer_separation"):
                for shaped in (False, True):
                    testbed.set_rate(rate if shaped else None)
                    run = session.run(name, steps=3)
                    assert all(1 < carried / sent < 2 for carried, sent in zip(run.carried, run.sent, strict=True))
                    if shaped:  # but for what a bucket lets through at once, once in a run
                        assert run.step_seconds > 0.8 * max(run.sent) / rate
        testbed.kill(1)
        with pytest.raises(BenchmarkError, match=r"rank [01] ended"):
            session.run("data_parallel", steps=1)


@pytest.mark.slow
@pytest.mark.usefixtures("can_have_a_testbed")
def test_a_small_campaign_measures_every_cell_and_writes_what_the_table_is_made_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, output = tmp_path / "tiny_perceptron.py", tmp_path / "accuracy"
    model.write_text(MODEL)
    for rate in ("40Mbit", "none"):
        cluster_file(tmp_path, 2, rate).write_text(to_toml(load_cluster(CLUSTER)))
    cells = ["--models", str(model), "--strategies", "data_parallel", "single_device", "--world", "2"]
    cells += ["--rates", "40Mbit", "none", "--repeats", "2", "--foreign", "1"]
    status = accuracy.main([*cells, "--clusters", str(tmp_path), "-o", str(output)])
    out = capsys.readouterr().out
    assert status == 1, "a machine of today is not the cluster of the plan"
    figures = Figures.from_json((output / "figures.json").read_text(), "figures.json")
    assert [len(result.runs) for result in figures.results] == [2] * 4
    assert figures.clusters.keys() == {"2 40Mbit", "2 none"}
    assert accuracy.main(["--from", str(output / "figures.json")]) == 1
    assert capsys.readouterr().out == out


@pytest.mark.slow
@pytest.mark.from_scratch
@pytest.mark.usefixtures("can_have_a_testbed")
def test_a_session_that_is_stopped_by_ctrl_c_leaves_no_process_no_network_and_no_file(tmp_path: Path) -> None:
    script = f"""
import signal
from pathlib import Path
from benchmarks.testbed import NetworkTestbed
from benchmarks.campaign import cluster_file
from benchmarks.session import Session
from splitc.cost_models.clusters.named import load_cluster
signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background it is ignored
with NetworkTestbed(2, rate=1e7, cpus=1.0) as testbed, Session(testbed) as session:
    session.load("dp", Path({str(build(tmp_path, "data_parallel"))!r}))
    print(testbed.layout.label, *(process.pid for process in session._processes), flush=True)
    session.run("dp", steps=1_000_000)
"""
    files = tmp_path / "files"
    files.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(files)},
    ) as parent:
        assert parent.stdout is not None
        label, *pids = parent.stdout.readline().split()
        assert any(name.startswith(label) for name in namespaces()) and any(files.iterdir())
        parent.send_signal(signal.SIGINT)
        assert parent.wait(30) != 0
    assert [started(int(pid)) for pid in pids] == [None, None]
    assert not any(name.startswith((label, "session-")) for name in (*namespaces(), *os.listdir(files)))
