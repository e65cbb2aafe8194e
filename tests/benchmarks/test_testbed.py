"""The network testbed: what can be read without root, and a run of `wire_bytes` where there is root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import testbed as testbed_module
from benchmarks import wire_bytes
from benchmarks.errors import BenchmarkError
from benchmarks.layout import Layout, for_each, leftovers, new_label, parse_rate, parse_rates
from benchmarks.load import TICKS, Load, busy_seconds, own_seconds, started
from benchmarks.lockstep import Lockstep
from benchmarks.quota import find_controller
from benchmarks.testbed import NetworkTestbed
from benchmarks.wire_bytes import Case, Sent
from tests import ROOT
from tests.benchmarks.testbeds import namespaces, skip_without_a_testbed


def layout(world: int = 3, rates: tuple[float | None, ...] | None = None) -> Layout:
    return Layout("testbed", world, rates or (None,) * world)


@pytest.fixture
def can_have_a_testbed() -> None:
    skip_without_a_testbed()


# -- rates and values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rate"), [("230Mbit", 28.75e6), ("1.5gbit/s", 187.5e6), ("800kbit", 1e5), ("8 bit", 1.0)]
)
def test_a_rate_is_read_as_bytes_per_second(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "230", "230MB", "-1Mbit", "0Mbit", "fast"])
def test_what_is_no_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BenchmarkError, match="is no rate; write 230Mbit"):
        parse_rate(text)


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


def test_ranks_have_different_addresses() -> None:
    testbed = layout(300)
    assert len({testbed.address(rank) for rank in range(300)}) == 300
    assert (testbed.address(0), testbed.address(299)) == ("10.77.0.1", "10.77.1.44")


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


@pytest.mark.parametrize(("missing", "rate"), [("ip", None), ("tc", 1e6)])
def test_a_missing_command_is_named(monkeypatch: pytest.MonkeyPatch, missing: str, rate: float | None) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == missing else f"/bin/{name}")
    monkeypatch.setattr(testbed_module, "_run", lambda command: pytest.fail(f"ran {command}"))
    with pytest.raises(BenchmarkError, match=f"the command {missing}: install iproute2"), NetworkTestbed(2, rate=rate):
        pass


def test_the_command_ends_with_status_2_and_one_line_where_there_can_be_no_bed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: NetworkTestbed) -> NetworkTestbed:
        raise BenchmarkError("the network testbed needs root: run it with sudo")

    monkeypatch.setattr(NetworkTestbed, "__enter__", refuse)
    arguments = ["--models", str(ROOT / "examples" / "mlp.py"), "--strategies", "data_parallel", "--world", "2"]
    assert wire_bytes.main(arguments) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: the network testbed needs root: run it with sudo"


def test_a_machine_without_a_cpu_controller_says_so(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="no control groups are mounted"):
        find_controller("proc /proc proc rw 0 0\n")
    (tmp_path / "cgroup.controllers").write_text("memory pids\n")
    with pytest.raises(BenchmarkError, match="has no cpu controller"):
        find_controller(f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")


def test_a_quota_is_written_in_the_form_of_its_version(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu\n")
    second = find_controller(f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    assert (second.make("two", 0.5) / "cpu.max").read_text() == "5000 10000"
    first = find_controller(f"cgroup /elsewhere cgroup rw,cpuset 0 0\ncgroup {tmp_path} cgroup rw,cpu,cpuacct 0 0\n")
    assert (first.make("one", 0.5) / "cpu.cfs_quota_us").read_text() == "5000"


# -- load --------------------------------------------------------------------------------------------------------------


def test_busy_time_leaves_out_waiting_and_interrupts() -> None:
    assert busy_seconds("cpu  100 20 3 9999 888 77 66 5 0 0\ncpu0 1 1 1 1\n") == 128 / TICKS


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_descendant_counts_as_ones_own_while_it_runs_and_afterwards() -> None:
    def spent() -> float:
        return own_seconds(os.getpid()) - before - (sum(os.times()[:2]) - here)

    before, here = own_seconds(os.getpid()), sum(os.times()[:2])
    script = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert spent() >= 0.25
        child.communicate(b"\n")
    assert spent() >= 0.25


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_foreign_load_is_a_fraction_and_own_work_is_none_of_it() -> None:
    load = Load()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert 0 <= load.foreign() <= 1
    assert started(os.getpid()) is not None
    assert started(2**22 + 1) is None  # above the highest process id there can be


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


def test_a_command_to_a_rank_that_has_ended_shows_its_error(lockstep: Callable[..., Lockstep]) -> None:
    ranks = lockstep("Marks().tell('ready'); raise SystemExit('no memory')")
    ranks.hear("ready")
    ranks._processes[0].wait(10)
    with pytest.raises(BenchmarkError, match=r"rank 0 ended with status 1 while it was waited for:\n  no memory"):
        ranks.order(do="work")
    leave(ranks)


def test_the_error_of_a_rank_that_fails_is_shown(lockstep: Callable[..., Lockstep]) -> None:
    ranks = lockstep("Marks().reach('warm')", "raise SystemExit('no data')")
    with pytest.raises(BenchmarkError, match=r"rank 1 ended with status 1 before 'warm':\n  no data"):
        ranks.hear("warm")
    assert leave(ranks)[0] == 1, "a rank whose parent is gone does not go on"


def test_a_rank_that_does_not_come_is_named(lockstep: Callable[..., Lockstep]) -> None:
    ranks = lockstep("input()")
    with pytest.raises(BenchmarkError, match=r"rank 0 did not come to 'warm' within 0\.1 s"):
        ranks.hear("warm", timeout=0.1)
    leave(ranks)


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("defined", "measured", "within"),
    [
        (0.0, 65536.0, True),
        (0.0, 65537.0, False),
        (10e6, 10.5e6 + 65536, True),
        (10e6, 10.5e6 + 65537, False),
        (10e6, 9.4e6, False),  # too few are wrong as well
    ],
)
def test_within_means_5_percent_and_64_kib(defined: float, measured: float, within: bool) -> None:
    assert Sent(Case("m.py", "auto", 2), 0, ("all",), defined, defined, measured).within is within


def test_the_table_marks_a_rank_that_is_out_of_bounds_and_a_rank_without_role() -> None:
    case = Case("models/m.py", "single_device", 2)
    text = wire_bytes.table([Sent(case, 0, ("a", "b"), 1e6, 1e6, 2e6), Sent(case, 1, (), 0.0, 0.0, 100.0)])
    assert [line.split()[-1] for line in text.splitlines()[2:]] == ["NO", "yes"]
    assert "a, b" in text and "2.0000" in text


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


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.usefixtures("can_have_a_testbed")
def test_a_bed_that_is_told_to_stop_leaves_no_process_and_no_namespace(number: signal.Signals) -> None:
    script = """
import signal, time
from benchmarks.testbed import NetworkTestbed
signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background it is ignored
with NetworkTestbed(2, rate=1e7) as testbed:
    print(testbed.layout.label, testbed.start(1, ["sleep", "100"]).pid, flush=True)
    time.sleep(100)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        label, pid = parent.stdout.readline().split()
        assert any(name.startswith(label) for name in namespaces())
        parent.send_signal(number)
        assert parent.wait(30) != 0
    assert started(int(pid)) is None
    assert not any(name.startswith(label) for name in namespaces())


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("can_have_a_testbed")
def test_links_get_another_rate_while_processes_run() -> None:
    def shapes() -> list[str]:
        places = [(testbed.layout.namespace(rank), "eth0") for rank in range(2)]
        places += [(testbed.layout.switch, f"rank{rank}") for rank in range(2)]
        shown = [
            subprocess.run(
                ["tc", "-n", name, "qdisc", "show", "dev", device], text=True, capture_output=True, check=True
            )
            for name, device in places
        ]
        words = [done.stdout.split() for done in shown]
        return [each[each.index("rate") + 1] if "rate" in each else each[1] for each in words]

    with NetworkTestbed(2) as testbed:
        process = testbed.start(1, ["sleep", "100"])
        assert shapes() == ["noqueue"] * 4
        testbed.set_rate(1e7)
        assert shapes() == ["80Mbit"] * 4
        testbed.set_rate([1e7, 2e7])
        assert shapes() == ["80Mbit", "160Mbit"] * 2
        testbed.set_rate([None, 2e7])
        assert shapes() == ["noqueue", "160Mbit"] * 2
        testbed.set_rate(None)
        assert shapes() == ["noqueue"] * 4
        assert process.poll() is None
        with pytest.raises(BenchmarkError, match="rate: 3 values for 2 ranks"):
            testbed.set_rate([1e6, 1e6, 1e6])
