"""Python processes that start at once, forked from one that has imported torch and started no thread.

A test that asks for the fixture `forked` finds in `sys.executable` a program that takes the arguments of `python`, and
so do the processes that it starts: torchrun, ranks, `splitc`.  A process has its own environment, folder, network,
files and streams, and ends as Python does; signals reach it through the program, with which it dies.  It has splitc
too, where it is this one that it would import.  It shares with the others the seed of hashes, is no child of its
program, and does not read what torch reads from the environment when it is loaded: what a test says of these needs
`python` itself, as does what it says of processes that are left behind.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SERVER = Path(__file__).with_name("server.py")
PROGRAM = Path(__file__).with_name("program.py")


@contextmanager
def program(folder: Path) -> Iterator[Path]:
    """The program, while its server runs; Python itself where there is no Linux."""
    if sys.platform != "linux":
        yield Path(sys.executable)
        return
    path, address = folder / "python", folder / "server"
    text = PROGRAM.read_text(encoding="utf-8").replace("PYTHON", sys.executable).replace("ADDRESS", str(address))
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as splitc sets it for the ranks of several hosts
    command = [sys.executable, str(SERVER), str(address), str(path)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as server:
        assert server.stdout is not None and server.stdin is not None
        assert server.stdout.readline() == b"ready\n", "the server of processes did not start"
        yield path
        server.stdin.close()  # which ends it


@contextmanager
def as_executable(path: Path) -> Iterator[None]:
    """Let what starts Python start this program."""
    before = sys.executable
    sys.executable = str(path)
    multiprocessing.set_executable(str(path))
    try:
        yield
    finally:
        sys.executable = before
        multiprocessing.set_executable(before)
