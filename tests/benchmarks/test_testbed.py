"""The network testbed: what can be read without root, and a run of `wire_bytes` where there is root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import testbed as testbed_module
from benchmarks.errors import BenchmarkError
from benchmarks.layout import Layout, for_each, leftovers, new_label, parse_rate, parse_rates
from benchmarks.lockstep import Lockstep
from benchmarks.testbed import NetworkTestbed
from tests import ROOT
from tests.benchmarks.testbeds import skip_without_a_testbed
from tests.support.sampling import in_one


def layout(world: int = 3, rates: tuple[float | None, ...] | None = None) -> Layout:
    return Layout("testbed", world, rates or (None,) * world)


@pytest.fixture
def can_have_a_testbed() -> None:
    skip_without_a_testbed()


# -- rates and values --------------------------------------------------------------------------------------------------


@in_one
@pytest.mark.parametrize(
    ("text", "rate"), [("230Mbit", 28.75e6), ("1.5gbit/s", 187.5e6), ("800kbit", 1e5), ("8 bit", 1.0)]
)
def test_a_rate_is_read_as_bytes_per_second(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


def test_one_rate_is_for_all_ranks_and_several_are_for_one_each() -> None:
    assert for_each(parse_rates("8Mbit"), 2, "rate") == (1e6, 1e6)
    assert for_each(parse_rates("8Mbit,16Mbit"), 2, "rate") == (1e6, 2e6)
    assert for_each(None, 2, "rate") == (None, None)
    with pytest.raises(BenchmarkError, match="rate: 2 values for 3 ranks"):
        for_each(parse_rates("8Mbit,16Mbit"), 3, "rate")
    with pytest.raises(BenchmarkError, match="cpus: 0 is not above 0"):
        for_each(0, 2, "cpus")


# -- the network as data -----------------------------------------------------------------------------------------------


def test_all_that_is_made_lies_in_namespaces_that_are_removed() -> None:
    """So removing the namespaces leaves nothing: every command makes one of them, or works inside one."""
    testbed = layout()
    for command in testbed.build():
        if command[:3] == ("ip", "netns", "add"):
            assert command[3] in testbed.namespaces
        else:
            inside = command[3] if command[:3] == ("ip", "netns", "exec") else command[2]
            assert inside in testbed.namespaces, command
            assert command[:2] in (("ip", "-n"), ("tc", "-n"), ("ip", "netns"))


def test_a_rate_shapes_both_ends_of_the_link_of_its_rank_only() -> None:
    shaped = [command for command in layout(2, (None, 1e6)).build() if command[0] == "tc"]
    assert [(command[2], command[command.index("dev") + 1]) for command in shaped] == [
        ("testbed-rank1", "eth0"),
        ("testbed-switch", "rank1"),
    ]
    assert all(command[command.index("rate") + 1] == "8000000bit" for command in shaped)


def test_a_new_rate_changes_what_differs_and_nothing_else() -> None:
    testbed = layout(4, (None, 1e6, 1e6, 2e6))
    changed = [
        (command[2], command[4], command[command.index("rate") + 1] if "rate" in command else None)
        for command in testbed.reshape((2e6, 1e6, None, 1e6))
    ]
    assert changed == [
        ("testbed-rank0", "replace", "16000000bit"),
        ("testbed-switch", "replace", "16000000bit"),
        ("testbed-rank2", "delete", None),
        ("testbed-switch", "delete", None),
        ("testbed-rank3", "replace", "8000000bit"),
        ("testbed-switch", "replace", "8000000bit"),
    ]


def test_leftovers_are_the_beds_of_processes_that_are_gone() -> None:
    alive, gone, reused = new_label(10, 500, 0), new_label(11, 501, 0), new_label(12, 502, 3)
    names = [f"{label}-{part}" for label in (alive, gone, reused) for part in ("switch", "rank0")]
    others = ["mine", "splitc-testbed", f"x{gone}-switch", f"{gone}-other"]
    found = leftovers([*names, *others], {10: 500, 12: 777}.get)
    assert found == [f"{gone}-switch", f"{gone}-rank0", f"{reused}-switch", f"{reused}-rank0"]


# -- what a machine cannot do ------------------------------------------------------------------------------------------


def test_without_root_the_bed_says_so_and_makes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(testbed_module, "_run", lambda command: pytest.fail(f"ran {command}"))
    with pytest.raises(BenchmarkError, match="needs root: run it with sudo"), NetworkTestbed(2):
        pass


# -- lockstep ----------------------------------------------------------------------------------------------------------


def in_lockstep(tmp_path: Path, *scripts: str) -> Lockstep:
    logs = [tmp_path / f"rank{rank}.log" for rank in range(len(scripts))]
    processes = []
    for script, log in zip(scripts, logs, strict=True):
        with log.open("wb") as errors:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", f"from benchmarks.lockstep import Marks\n{script}"],
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    cwd=ROOT,
                )
            )
    return Lockstep(processes, logs)


@pytest.fixture
def lockstep(tmp_path: Path) -> Callable[..., Lockstep]:
    return lambda *scripts: in_lockstep(tmp_path, *scripts)


def leave(lockstep: Lockstep) -> list[int]:
    """Close the pipes, which ends what still waits, and collect."""
    for process in lockstep._processes:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()
    return [process.wait(10) for process in lockstep._processes]


def test_ranks_wait_at_a_mark_and_tell_their_figures(lockstep: Callable[..., Lockstep]) -> None:
    script = "marks = Marks(); print('noise'); marks.reach('warm', sent={0}); marks.reach('done', sent={0} + 1)"
    ranks = lockstep(script.format(10), script.format(20))
    assert [said["sent"] for said in ranks.hear("warm")] == [10, 20]
    ranks.go_on()
    assert [said["sent"] for said in ranks.hear("done")] == [11, 21]
    ranks.go_on()
    assert leave(ranks) == [0, 0]


def test_ranks_carry_out_commands_and_tell_what_they_are_at(lockstep: Callable[..., Lockstep]) -> None:
    script = """
marks = Marks()
while (command := marks.ask())["do"] != "stop":
    for n in range(command["times"]):
        marks.progress(f"time {n}")
    marks.tell(command["do"], text={0} * 40000)
"""
    ranks, heard = lockstep(script.replace("{0}", "'a'"), script.replace("{0}", "'b'")), []
    for times in (0, 2):
        ranks.order(do="work", times=times)
        said = ranks.hear("work", progress=lambda rank, text: heard.append((rank, text)))
        assert [each["text"] for each in said] == ["a" * 40000, "b" * 40000]
    assert sorted(heard) == [(0, "time 0"), (0, "time 1"), (1, "time 0"), (1, "time 1")]
    ranks.order(do="stop")
    assert leave(ranks) == [0, 0]


def test_the_error_of_a_rank_that_fails_is_shown(lockstep: Callable[..., Lockstep]) -> None:
    ranks = lockstep("Marks().reach('warm')", "raise SystemExit('no data')")
    with pytest.raises(BenchmarkError, match=r"rank 1 ended with status 1 before 'warm':\n  no data"):
        ranks.hear("warm")
    assert leave(ranks)[0] == 1, "a rank whose parent is gone does not go on"


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("can_have_a_testbed")
def test_on_the_wire_two_ranks_send_what_their_programs_are_defined_to_send() -> None:
    command = [sys.executable, "-m", "benchmarks.wire_bytes", "--strategies", "layer_separation", "--world", "2"]
    done = subprocess.run([*command, "--steps", "2"], text=True, capture_output=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("alexnet_quarter")]
    assert [row[-1] for row in rows] == ["yes", "yes"]
    assert all(1.0 < float(row[-2]) < 1.05 for row in rows), "more than the payload, by the headers"


# -- machines ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("can_have_a_testbed")
def test_a_machine_that_is_lost_ends_without_a_word_and_comes_back_without_its_processes() -> None:
    listens = "import socket; s = socket.create_server(('', 29500)); print(0); a, _ = s.accept(); s.accept()"
    with NetworkTestbed(2, rate=1e6) as testbed:
        connects = f"import socket; s = socket.create_connection(('{testbed.layout.address(0)}', 29500), 5); print(1)"

        def start(rank: int, script: str) -> subprocess.Popen[bytes]:
            return testbed.start(rank, [sys.executable, "-uc", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)

        def errors(process: subprocess.Popen[bytes]) -> bytes:
            return process.communicate(timeout=60)[1]

        server = start(0, listens)
        assert server.stdout is not None and server.stdout.readline() == b"0\n"
        client = start(1, f"{connects}; s.settimeout(1); s.recv(1)")
        assert client.stdout is not None and client.stdout.readline() == b"1\n"
        testbed.lose(0)
        assert server.wait(60) == -signal.SIGKILL
        assert b"TimeoutError" in errors(client)  # neither an end nor a reset has come
        testbed.bring_back(0)
        assert b"ConnectionRefusedError" in errors(start(1, connects))
