"""For tests on a network testbed: whether there can be one, and ranks on the loopback device where there is none."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys

import pytest

from benchmarks.layout import PREFIX
from benchmarks.testbed import NetworkTestbed


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], text=True, capture_output=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines()]


def skip_without_a_testbed() -> None:
    if (reason := _no_bed()) is not None:
        pytest.skip(reason)


def _no_bed() -> str | None:
    """Why there can be no testbed here."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "there is no iproute2"
    probe = f"{PREFIX}-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], text=True, capture_output=True, check=False)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return None


class OnLoopback(NetworkTestbed):
    """Ranks that meet on the loopback device, without root: no rates, no quotas, no bytes counted."""

    def __enter__(self) -> NetworkTestbed:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        return self

    def close(self) -> None:
        for processes in self._processes:
            for process in processes:
                process.kill()
                process.wait()
                for pipe in filter(None, (process.stdin, process.stdout)):
                    pipe.close()

    def environment(self, rank: int) -> dict[str, str]:
        here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port), "GLOO_SOCKET_IFNAME": "lo"}
        return {**super().environment(rank), **here}

    def start(self, rank: int, argv: list[str], *_: object, **options: object) -> subprocess.Popen[bytes]:  # type: ignore[override]
        env = {**os.environ, **self.environment(rank)}
        process = subprocess.Popen(argv, bufsize=0, env=env, **options)  # type: ignore[call-overload]
        self._processes[rank].append(process)
        return process

    def _counter(self, rank: int, way: str) -> int:
        return 0
