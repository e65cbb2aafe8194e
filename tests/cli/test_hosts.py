"""`splitc run --hosts`, over a stand-in for ssh that runs commands in network namespaces."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from splitc.cli import hosts as hosts_module
from splitc.cli import launching
from splitc.cli.hosts import Host, parse_hosts
from splitc.cli.plan_file import read_plan_file
from splitc.errors import LaunchError
from splitc.runtime.errors import RESTART
from tests import ROOT
from tests.support.command import splitc
from tests.support.hosts import ADDRESSES, environment, stand_in_for_ssh, two_hosts
from tests.support.launched import program


def test_hosts_share_the_ranks_that_have_no_number() -> None:
    assert parse_hosts("a,b", 4) == [Host("a", 2), Host("b", 2)]
    assert parse_hosts("me@a:1, b", 4) == [Host("me@a", 1), Host("b", 3)]
    assert parse_hosts("a:1,b:3", 4) == [Host("a", 1), Host("b", 3)]


def test_hosts_that_are_none_or_do_not_share_the_ranks_are_refused() -> None:
    for text, instead in (
        *(("a,b,c", "a:2,b:1,c:1"), ("a:1,b:1", "a:2,b:2"), ("a:4,b", "a:2,b:2"), ("a:5", "a:4")),
        *(("me@a:9,b", "me@a:2,b:2"), ("a,b,c,d,e", "a:1,b:1,c:1,d:1")),
    ):
        with pytest.raises(LaunchError, match=rf"--hosts {text}: the build has 4 ranks, .* as in {instead}, or"):
            parse_hosts(text, 4)
        assert sum(host.ranks for host in parse_hosts(instead, 4)) == 4
    for text in ("", "a,,b", "a:x", ":2"):
        with pytest.raises(LaunchError, match="is no host; write names or addresses, with ranks: a,b:2"):
            parse_hosts(text, 4)


def test_what_gpus_and_networks_are_told_is_told_on_the_hosts_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {
        "CUDA_VISIBLE_DEVICES": "1", "TORCH_NCCL_BLOCKING_WAIT": "0", "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "FI_PROVIDER": "efa", "UCX_TLS": "tcp", "TORCHELASTIC_RUN_ID": "here", "RANK": "0",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen: list[str] = []
    monkeypatch.setattr(hosts_module, "_copy", lambda folder, host, script: None)
    monkeypatch.setattr(hosts_module, "_together", lambda hosts, scripts, to: seen.append(*scripts))
    hosts_module.run_on_hosts(tmp_path, "abc", [Host("a", 1)], [])
    (exported,) = re.findall(r"^export (.*TORCH.*)$", seen[0], re.MULTILINE)
    passed = {name for name in given if f"{name}={given[name]}" in exported.split()}
    assert passed == given.keys() - {"TORCHELASTIC_RUN_ID", "RANK"}


def test_a_run_on_hosts_is_started_again_also_when_one_is_lost_until_another_start_does_no_better(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "launch.py").write_text("launch.main(train, 2)")
    outcomes: Iterator[int | LaunchError] = iter([1, LaunchError("--hosts: b: No route to host"), 3])
    given: list[list[str]] = []

    def run(folder: Path, mark: str, hosts: list[Host], arguments: list[str], smaller: object) -> int:
        assert smaller == {}
        given.append(arguments)
        if isinstance(outcome := next(outcomes), LaunchError):
            raise outcome
        return outcome

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPLITC_COMMAND", "")  # which is set
    monkeypatch.setattr(launching, "check_build", lambda folder: SimpleNamespace(world=2, hash="abc"))
    monkeypatch.setattr(hosts_module, "run_on_hosts", run)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    options = ["--steps", "9", "--hosts", "a,b", "--restarts", "5"]
    assert launching.launch(tmp_path, options) == 3
    there = str(tmp_path / "checkpoints")  # not in a copy of the build, which is made anew for each start
    assert given == [["--steps", "9", "--resume", "--checkpoints", there]] * 3
    assert capsys.readouterr().err.splitlines() == [
        "restart 1 of 5", "splitc: --hosts: b: No route to host", "restart 2 of 5",
    ]  # fmt: skip
    assert os.environ["SPLITC_COMMAND"] == f"splitc run {tmp_path} --steps 9 --hosts a,b --restarts 5"
    outcomes = iter([LaunchError("--hosts: nowhere")])  # at the first start it is the user who is wrong
    with pytest.raises(LaunchError, match="nowhere"):
        launching.launch(tmp_path, options)


@pytest.mark.parametrize("lost", ["exit 255", "kill -KILL $$"])
def test_a_host_that_is_lost_ends_the_others_at_once_and_their_stop_is_no_end_of_the_run(
    monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    def ssh(host: Host, script: str) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(["sh", "-c", script], stdin=pipe, stdout=pipe, stderr=pipe)

    monkeypatch.setattr(hosts_module, "_ssh", ssh)
    stops = "read -r line; echo stopped by SIGTERM after step 3 >&2; exit 1"
    begun = time.monotonic()
    assert hosts_module._together([Host("a", 1), Host("b", 1)], [stops, lost], io.StringIO()) == RESTART
    assert time.monotonic() - begun < hosts_module._GRACE / 2


# -- with processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program().save(tmp_path_factory.mktemp("built") / "build")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the stand-in, which is the home of both hosts."""
    with two_hosts() as names:
        folder = tmp_path_factory.mktemp("home")
        stand_in_for_ssh(folder, names)
        yield folder


def start(build: Path, home: Path, *options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "splitc.cli", "run", *map(str, (build, *options))],
        cwd=ROOT,
        env=environment(HOME=str(home), PATH=f"{home}{os.pathsep}{os.environ['PATH']}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's children ignore it else
    )


def run(build: Path, home: Path, *options: object) -> tuple[int, str, str]:
    process = start(build, home, *options)
    try:
        output, errors = process.communicate(timeout=100)
    finally:
        process.kill()
    assert len((output + errors).splitlines()) <= 15, errors
    return process.returncode, output, errors


def of_copies(home: Path) -> list[str]:
    """The command lines of processes that run a copied build."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if f"{home}/.splitc/" in words:
            found.append(words)
    return found


@pytest.mark.slow
@pytest.mark.processes
def test_a_build_is_copied_to_hosts_and_trained_there_until_an_interrupt(build: Path, hosts: Path) -> None:
    process, output = until_ended(build, hosts, signal.SIGINT)
    assert process.returncode == 0
    assert re.findall(r"^step (\d+)  loss ", output, re.MULTILINE)[:2] == ["1", "2"]
    assert len(list((hosts / ".splitc").iterdir())) == 2


def until_ended(build: Path, hosts: Path, number: int) -> tuple[subprocess.Popen[str], str]:
    """A run on hosts that is sent a signal after its first steps, and what it printed; nothing of it runs on."""
    process = start(build, hosts, "--hosts", ",".join(ADDRESSES), "--steps", 1000000)
    assert process.stdout is not None
    try:
        output = process.stdout.readline() + process.stdout.readline()
        process.send_signal(number)
        output += process.communicate(timeout=60)[0]
    finally:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 30
    while of_copies(hosts) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert of_copies(hosts) == []
    return process, output


@pytest.mark.slow
@pytest.mark.processes
def test_an_error_of_several_hosts_is_shown_once_and_ends_all(build: Path, hosts: Path) -> None:
    options = ["--hosts", ",".join(ADDRESSES), "--data", "tests.support.launched:failing", "--steps", 4]
    code, _, errors = run(build, hosts, *options)
    assert code == 1
    assert errors.count("ValueError: rank 1 has had enough") == 1
    assert of_copies(hosts) == []


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.from_scratch
def test_nothing_runs_on_when_splitc_is_killed(build: Path, hosts: Path) -> None:
    assert until_ended(build, hosts, signal.SIGKILL)[0].returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.processes
def test_a_host_that_cannot_be_reached_is_named(build: Path, hosts: Path) -> None:
    code, output, errors = run(build, hosts, "--hosts", f"{ADDRESSES[0]},nowhere")
    assert (code, output) == (2, "")
    assert errors.splitlines() == [
        "splitc: --hosts: nowhere: ssh: Could not resolve hostname nowhere: Name or service not known"
    ]


@pytest.mark.slow
def test_measuring_on_hosts_is_refused_with_what_to_do(build: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = splitc(capsys, f"run {build} --hosts a,b --measure")
    assert done.code == 2
    assert "on several start launch.py --measure FILE, then --measured FILE" in " ".join(done.err.split())


@pytest.mark.slow
@pytest.mark.processes
def test_finalists_are_run_on_hosts_and_what_they_reached_comes_back(hosts: Path, tmp_path: Path) -> None:
    """The folder is copied, and what rank 0 tells on the first host is heard here."""
    command = ["tune", "examples/mlp.py", "--input", "8", "--world", "2", "--cluster", "cpu16-10gbe", "--budget", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "splitc.cli", *command, "--hosts", ",".join(ADDRESSES), "-o", str(tmp_path / "build")],
        cwd=ROOT,
        env=environment(HOME=str(hosts), PATH=f"{hosts}{os.pathsep}{os.environ['PATH']}", SPLITC_CACHE="off"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    tried = read_plan_file(tmp_path / "build" / "plan.json").prediction.tried
    assert sum(each.measured > 0 for each in tried) > 1
    assert "measured here" in done.stdout
    assert of_copies(hosts) == []


@pytest.mark.slow
@pytest.mark.processes
def test_the_doctor_examines_hosts_and_compares_them_with_a_cluster_by_name(hosts: Path) -> None:
    options = ["doctor", "--hosts", ",".join(ADDRESSES), "--budget", "1", "--cluster", "h100-400gbe"]
    done = subprocess.run(
        [sys.executable, "-m", "splitc.cli", *options],
        cwd=ROOT,
        env=environment(HOME=str(hosts), PATH=f"{hosts}{os.pathsep}{os.environ['PATH']}"),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert re.search(r"^\S+ \(node 1\): gloo on eth0; Python 3", done.stdout, re.MULTILINE)
    assert re.search(r"^wrong: \S+ \(node 0\) <-> .*; the cluster file says 400 Gbit/s$", done.stdout, re.MULTILINE)
