"""`splitc doctor`: every pair is measured once, beside others and alone, and what is wrong is said in plain lines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import combinations
from typing import Any

import pytest

from splitc.cli.doctor import problems, report
from splitc.cost_models.calibration.pairs import Pair, measure_pairs, rounds
from splitc.ir.cluster import Cluster
from splitc.ir.device import Device, Link
from splitc.runtime.transport.simulated import run_ranks
from tests import ROOT
from tests.support.command import splitc

DEVICE = Device("a core", {"float32": 1e11}, 2e10, 16e9, {"matmul": 0.9, "memory": 1.0}, 3e-6)
CLUSTER = Cluster("bed", DEVICE, Link(12.5e6, 2e-4), world=4)
Capture = pytest.CaptureFixture[str]


def hosts(world: int = 4, **of_the_last: Any) -> list[dict[str, Any]]:
    alike = {"python": "3.11.7", "torch": "2.13.0", "splitc": "0.1", "gpus": [], "memory": 8e9, "disk": 5e10}
    own = [{"host": f"node{k}", "interface": "eth0", "backend": "gloo", **alike} for k in range(world)]
    return [*own[:-1], {**own[-1], **of_the_last}]


def pairs(world: int = 4, **slow: float) -> list[Pair]:
    """Of 100 Mbit/s; "a_b": in place of that between these (bytes/s)."""
    return [Pair((a, b), slow.get(f"x{a}_{b}", 12.4e6), 2e-4, 0.0) for a, b in combinations(range(world), 2)]


@pytest.mark.parametrize("world", range(1, 10))
def test_a_round_has_no_rank_twice_and_all_rounds_have_every_pair_once(world: int) -> None:
    turns = list(rounds(world))
    assert all(len({rank for pair in turn for rank in pair}) == 2 * len(turn) for turn in turns)
    assert sorted(pair for turn in turns for pair in turn) == list(combinations(range(world), 2))


def test_all_pairs_are_measured_alike_on_every_rank() -> None:
    found = run_ranks(4, lambda transport: measure_pairs(transport, 0.3))
    assert all(each == found[0] for each in found)
    assert [each.ranks for each in found[0]] == list(combinations(range(4), 2))
    assert all(each.bandwidth > 0 and each.latency > 0 and abs(each.ahead) < 0.1 for each in found[0])
    assert any(each.beside for each in found[0])  # the slowest once more, alone


def test_what_differs_from_the_cluster_file_or_from_most_pairs_is_said() -> None:
    assert list(problems(hosts(), pairs(), CLUSTER)) == list(problems(hosts(), pairs(), None)) == []
    slow = pairs(x2_3=7.6e6)
    assert list(problems(hosts(), slow, CLUSTER)) == ["node2 <-> node3: 60.8 Mbit/s; the cluster file says 100 Mbit/s"]
    assert list(problems(hosts(), slow, None)) == ["node2 <-> node3: 60.8 Mbit/s; most pairs have 99.2 Mbit/s"]
    late = [Pair((0, 1), 12.4e6, 5e-3, 2.0)]
    assert list(problems(hosts(2), late, CLUSTER)) == [
        "the clock of node1 is +2.0 s from that of node0",
        "node0 <-> node1: 5 ms a message; the cluster file says 200 us",
    ]


def test_hosts_that_differ_or_are_full_are_named() -> None:
    found = list(problems(hosts(5, torch="2.11.0", gpus=["T4"], disk=2e8), pairs(5), CLUSTER))
    assert found == [
        "the cluster file has 4 devices, here are 5 ranks",
        "node4 has torch 2.11.0, node0 2.13.0",
        "node4 has gpus ['T4'], node0 none",
        "node4 has 200 MB of disk free",
    ]


def test_pairs_that_share_a_line_are_noted_and_not_wrong() -> None:
    shared = [Pair((0, 1), 12.4e6, 2e-4, 0.0, beside=6.2e6)]
    assert list(problems(hosts(2), shared, CLUSTER)) == []
    text = "\n".join(report(hosts(2), shared, []))
    assert "node0 <-> node1: 99.2 Mbit/s (49.6 Mbit/s beside other pairs: they share a line), 200 us" in text
    assert text.endswith("nothing is wrong")


def test_what_is_wrong_with_the_options_is_said_before_a_process_starts(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    wrong = {"--cluster none.toml": "there is no such file", "--hosts a,b --ranks 2": "give one of them"}
    wrong |= {"--hosts a,,b": "is no host"}
    for line, text in wrong.items():
        done = splitc(capsys, f"doctor {line}")
        assert done.code == 2 and text in done.err


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_are_examined_and_a_cluster_file_that_is_wrong_is_exit_code_1() -> None:
    command = [sys.executable, "-m", "splitc.cli", "doctor", "--budget", "1", "--ranks", "2"]

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    done = run()
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith("nothing is wrong\n")
    done = run("--cluster", "h100-400gbe", "--json")
    data = json.loads(done.stdout)
    assert done.returncode == 1 and re.search(r"rank 0 <-> .*; the cluster file says 400 Gbit/s", data["problems"][0])
    assert len(data["hosts"]) == 2 and len(data["pairs"]) == 1
