"""Two network namespaces as two hosts, and torchrun on each of them, which is told nothing of their interfaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import ROOT

ADDRESSES = ("10.78.0.1", "10.78.0.2")
PORT = 29500  # of the first host, where the ranks meet
SECONDS = 100  # a launch that takes longer has hung


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """The names of two namespaces that are joined by a cable; a skip where none can be made."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux, root and iproute2")
    first, second = names = (f"splitc-hosts-{os.getpid()}-a", f"splitc-hosts-{os.getpid()}-b")
    try:
        for name in names:
            if _ip("netns", "add", name, check=False).returncode:
                pytest.skip("no network namespace can be made")
        _ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            _ip("netns", "delete", name, check=False)


def _ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


def environment(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    return {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def on_both(
    hosts: tuple[str, str], commands: Sequence[Sequence[object]], env: Mapping[str, str] | None = None
) -> list[tuple[int, str, float]]:
    """Run a command on each host; of each its exit status, its output and the seconds it took."""
    begin = time.monotonic()
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", hosts[host], *map(str, command)],
            cwd=ROOT,
            env=environment(**(env or {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for host, command in enumerate(commands)
    ]
    ended = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=SECONDS)
            ended.append((process.returncode, output, time.monotonic() - begin))
    finally:
        for process in processes:
            process.kill()
    return ended


def torchrun_on_both(
    hosts: tuple[str, str], builds: Sequence[Path], *options: object, **env: str
) -> list[tuple[int, str, float]]:
    """The lines of docs/hosts.md, with one rank on each host."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1]
    master = ["--master-addr", ADDRESSES[0], "--master-port", PORT]
    commands = [
        [*launcher, "--node-rank", host, *master, build / "launch.py", *options] for host, build in enumerate(builds)
    ]
    return on_both(hosts, commands, env)


def own_lines(output: str) -> list[str]:
    """What the ranks printed, without what torchrun says of them."""
    before = output.partition("torch/distributed/elastic/")[0]
    return [line for line in before.splitlines()[: None if before == output else -1] if "[c10d]" not in line]


def stand_in_for_ssh(folder: Path, hosts: tuple[str, str]) -> None:
    """An `ssh` that runs the command in a namespace: the hosts are called by their addresses."""
    cases = "\n".join(f"{a}) host={name} ;;" for a, name in zip(ADDRESSES, hosts, strict=True))
    script = f"""#!/bin/bash
while :; do case "$1" in -o) shift 2 ;; -tt) shift ;; *) break ;; esac; done
case "$1" in
{cases}
*) echo "ssh: Could not resolve hostname $1: Name or service not known" >&2; exit 255 ;;
esac
shift
cd "$HOME" && exec ip netns exec "$host" sh -c "$*"
"""
    (folder / "ssh").write_text(script)
    (folder / "ssh").chmod(0o755)
