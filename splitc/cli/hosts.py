"""`splitc run BUILD --hosts a,b:2`: copy a build to hosts over ssh, and run it there under torchrun.

Each torchrun ends with its ssh: on the host a watcher reads ssh's input, which ends when this process does, however
that happens, and then ends torchrun.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from splitc.cli.files import filled
from splitc.codegen.build_folder import WEIGHTS
from splitc.errors import LaunchError
from splitc.ir.shares import share_out
from splitc.runtime.errors import RESTART
from splitc.runtime.launch.torchrun import SAVING, Ends, Lines, forward, of_ranks, stopped_like_ctrl_c
from splitc.runtime.transport.sealed import TOKEN

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")  # 15 s to lose a host
_GRACE = 15.0  # seconds for the other hosts to end by themselves once one has failed, and then when they are told to
_LOOK = 30.0  # seconds, after which a run without some of its hosts looks whether one is back
GROWS = -1  # in place of an exit code: all ranks have stopped, since there are hosts for more of them
_PASSED_ON = ("SPLITC_", "GLOO_", "NCCL_", "OMP_", "CUDA_", "TORCH_", "PYTORCH_", "FI_", "UCX_", "PYTHONPATH")
"""How environment variables of the ranks begin."""


@dataclass(frozen=True)
class Host:
    """name: as ssh takes it.  ranks: that run there."""

    name: str
    ranks: int


def parse_hosts(text: str, world: int) -> list[Host]:
    """`a,b:2` -> hosts with their ranks; those without a number share what is left.

    Raises LaunchError when the ranks are not `world`.
    """
    given = [name.strip().rpartition(":") if ":" in name else ("", "", name.strip()) for name in text.split(",")]
    named = [(name, ranks) if colon else (ranks, "") for name, colon, ranks in given]
    if wrong := [f"{name}:{ranks}" for name, ranks in named if not name or (ranks and not ranks.isdecimal())]:
        raise LaunchError(f"--hosts {text}: {wrong[0]!r} is no host; write names or addresses, with ranks: a,b:2")
    open_hosts = [name for name, ranks in named if not ranks]
    left = world - sum(int(ranks) for _, ranks in named if ranks)
    if left < len(open_hosts) or (left and not open_hosts) or (open_hosts and left % len(open_hosts)):
        shares = [b - a for a, b in pairwise(share_out(world, len(named)))]
        known = ",".join(f"{name}:{ranks}" for (name, _), ranks in zip(named, shares, strict=True) if ranks)
        raise LaunchError(
            f"--hosts {text}: the build has {world} ranks, which these hosts do not share; give the ranks of each, as "
            f"in {known}, or compile for as many as there are"
        )
    return [Host(name, int(ranks) if ranks else left // len(open_hosts)) for name, ranks in named]


def run_on_hosts(
    folder: Path,
    mark: str,
    hosts: Sequence[Host],
    arguments: Sequence[str],
    to: Lines | None = None,
    smaller: Mapping[int, tuple[Path, str]] = MappingProxyType({}),
) -> int:
    """Copy a folder, run its launch.py, and end it everywhere when a host fails; returns the exit code of launch.py.

    mark: in the name of the copies.  to: takes the ranks' stdout.  smaller: number of ranks -> a folder and its
    mark, to run in its place where hosts refuse it; then GROWS is returned when hosts for more ranks are back.
    Raises LaunchError when a host cannot be reached, or cannot run the build, and nothing else may run.
    """
    refusals, to = _copied(folder, mark, hosts), to or sys.stdout
    if not refusals:
        return _together(hosts, _runs(folder, mark, hosts, arguments), to)
    worlds = {sum(host.ranks for host in hosts): (folder, mark), **smaller}
    left, world = fitting([host for host in hosts if host not in refusals], worlds)

    def back() -> bool:
        still = _copied(folder, mark, list(refusals))
        return fitting([host for host in hosts if host not in still], worlds)[1] > world

    refused_again = _copied(*worlds[world], left) if world else refusals
    for error in refused_again.values():
        raise error
    lines = [*map(str, refusals.values()), f"goes on with {world} ranks, on {', '.join(host.name for host in left)}"]
    print(*(f"splitc: {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)
    return _together(left, _runs(*worlds[world], left, arguments), to, back)


def fitting(hosts: Sequence[Host], worlds: Iterable[int]) -> tuple[list[Host], int]:
    """The largest world that hosts have ranks for, and what each runs of it, the first ones all; 0 where there is none.

    >>> fitting([Host("a", 2), Host("c", 2)], [6, 3])
    ([Host(name='a', ranks=2), Host(name='c', ranks=1)], 3)
    """
    world = max((each for each in worlds if each <= sum(host.ranks for host in hosts)), default=0)
    found, left = [], world
    for host in hosts:
        if ranks := min(left, host.ranks):
            found.append(Host(host.name, ranks))
            left -= ranks
    return found, world


def _scripts(template: str, folder: Path, mark: str, hosts: Sequence[Host], **values: object) -> list[str]:
    """What each host runs, with its copy of a folder."""
    copy = f'"$HOME"/.splitc/{shlex.quote(folder.resolve().name)}-{mark}'
    master = shlex.quote(os.environ.get("MASTER_ADDR") or hosts[0].name.rpartition("@")[2])
    values |= {"python": shlex.quote(sys.executable), "master": master, "hosts": len(hosts)}
    each = ({"number": k, "ranks": host.ranks, "folder": f"{copy}-{k}"} for k, host in enumerate(hosts))
    return [filled(template, **values, **own) for own in each]


def _copied(folder: Path, mark: str, hosts: Sequence[Host]) -> dict[Host, LaunchError]:
    """Copy a folder to hosts; returns why those that cannot be reached, or cannot run it, do not have it."""
    scripts = _scripts("prepare.sh", folder, mark, hosts)
    with ThreadPoolExecutor(len(hosts)) as pool:
        found = zip(hosts, pool.map(lambda *each: _copy(folder, *each), hosts, scripts), strict=True)
        return {host: error for host, error in found if error is not None}


def _runs(folder: Path, mark: str, hosts: Sequence[Host], arguments: Sequence[str]) -> list[str]:
    """What each host runs once it has a copy."""
    paths = [os.environ.get("PYTHONPATH"), str(Path(__file__).parents[2])]  # this splitc, where hosts share a disk
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # a torchrun that ends later than the master warns with a page of frames
    passed = {**quiet, **SAVING, TOKEN: secrets.token_hex(16)}
    passed |= {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    passed["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in passed.items())
    here, port = shlex.quote(os.getcwd()), shlex.quote(os.environ.get("MASTER_PORT", "29500"))
    run = {"here": here, "variables": variables, "port": port, "arguments": shlex.join(arguments)}
    return _scripts("run.sh", folder, mark, hosts, **run)


def _copy(folder: Path, host: Host, script: str) -> LaunchError | None:
    process = _ssh(host, script)
    assert process.stdin is not None and process.stderr is not None and process.stdout is not None
    kind: Any = {"mode": "w|", "dereference": (folder / WEIGHTS).is_symlink()}
    with suppress(BrokenPipeError), tarfile.open(fileobj=process.stdin, **kind) as files:  # it has ended, and says why
        files.add(folder, arcname=".", filter=lambda each: None if "__pycache__" in each.name else each)
    with suppress(BrokenPipeError):
        process.stdin.close()
    said = process.stderr.read().decode(errors="replace").strip().splitlines()
    process.stderr.close()
    process.stdout.close()
    if not process.wait():
        return None
    return LaunchError(f"--hosts: {host.name}: {said[-1] if said else f'ssh ended with {process.returncode}'}")


def _together(hosts: Sequence[Host], scripts: Sequence[str], to: Lines, back: Callable[[], bool] | None = None) -> int:
    """Run a script on each host until all have ended, or one has failed; its lines are shown once.

    At the first signal each torchrun is told to end, which lets ranks save; all ends at once at the second.
    back: whether more ranks may run now; then they are told to end likewise, and GROWS is returned.
    """
    processes: list[subprocess.Popen[bytes]] = []
    threads, deadline, ends = [], float("inf"), Ends()
    shown: dict[str, object] = {}

    def keep(lines: Iterable[str]) -> Iterator[str]:
        return (line for line in of_ranks(lines, ends) if shown.setdefault(line, lines) is lines)

    asked: list[str] = []
    over = threading.Event()

    def ask(why: str = "signal") -> None:
        asked.append(why)
        for process in processes:
            assert process.stdin is not None
            with suppress(OSError):
                os.write(process.stdin.fileno(), b"stop\n")

    def look() -> None:
        while back is not None and not over.wait(_LOOK):
            if back():
                print("splitc: hosts are back: all ranks stop, and more go on", file=sys.stderr, flush=True)
                return ask("back")

    looking = threading.Thread(target=look, daemon=True)
    with stopped_like_ctrl_c(ask, ends):
        try:
            for host, script in zip(hosts, scripts, strict=True):
                processes.append(process := _ssh(host, script))
                threads.append(forward(process.stdout, to, iter))
                threads.append(forward(process.stderr, sys.stderr, keep))
            looking.start()
            while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
                if any(codes):  # of a host that is lost the others hear nothing
                    deadline = min(deadline, time.monotonic() + _GRACE * (not _is_lost(codes)))
                time.sleep(0.05)
        finally:
            over.set()
            _end(processes)
            for thread in threads:
                thread.join(1.0)
            if looking.ident:
                looking.join(_GRACE)
    ends.stopped &= bool(asked) or not _is_lost(codes)  # else watchers have asked ranks to stop, and nobody the run
    code = ends.code(any(process.returncode for process in processes))
    return GROWS if asked == ["back"] and (ends.stopped or code == RESTART) else code


def _is_lost(codes: Iterable[int | None]) -> bool:
    """Whether an ssh has ended by itself: it has lost its host, or was killed."""
    return any(code is not None and (code == 255 or code < 0) for code in codes)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    deadline = time.monotonic() + _GRACE
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.wait()


def _ssh(host: Host, script: str) -> subprocess.Popen[bytes]:
    command = [*_SSH, host.name, f"sh -c {shlex.quote(script)}"]
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    except FileNotFoundError:
        raise LaunchError("--hosts needs ssh, which is not installed here") from None
