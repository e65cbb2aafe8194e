"""Run torchrun on this machine, and terminate it with all its ranks when this process is interrupted.

torchrun starts every rank in a new session, which a terminal's Ctrl-C does not reach, and a killed torchrun leaves its
ranks running.  So torchrun runs in a new session too, and an interrupt terminates its whole process tree here.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Protocol

from ..transport.sealed import TOKEN

GRACE = 3.0  # seconds between SIGTERM and SIGKILL
_STOPS = ("SIGTERM", "SIGHUP")  # end the ranks as Ctrl-C does


class Lines(Protocol):
    """Takes lines that are written to it."""

    def write(self, line: str, /) -> object: ...
    def flush(self) -> object: ...


def torchrun(
    arguments: Sequence[str], world: int, quiet: bool = False, to: Lines | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `arguments` on `world` processes of this machine.  quiet: capture the output instead of printing it.

    to: takes the lines of stdout.

    Of what stands on stderr the ranks' own lines are kept, see `of_ranks`.
    Raises KeyboardInterrupt when it is interrupted, after all its processes have ended.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    own = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world)), TOKEN: secrets.token_hex(16)}
    environment = {**own, **os.environ}
    home = str(Path(__file__).parents[3])  # the ranks use this splitc, wherever it was imported from
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), home]))
    command, kept = [*launcher, *arguments], io.StringIO()
    with stopped_like_ctrl_c():
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE if quiet or to else None,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        forwarding = forward(process.stderr, kept if quiet else sys.stderr, of_ranks)
        output = b""
        try:
            if to is not None:
                forward(process.stdout, to, iter).join()
            elif process.stdout is not None:
                output = process.stdout.read()
                process.stdout.close()
            process.wait()
        except BaseException:
            end_tree(process)
            raise
        forwarding.join(GRACE)  # a process that outlives its rank may keep the pipe open
    return subprocess.CompletedProcess(command, process.returncode, output.decode(errors="replace"), kept.getvalue())


def forward(pipe: IO[bytes] | None, to: Lines, keep: Callable[[Iterable[str]], Iterable[str]]) -> threading.Thread:
    """Write the lines of a pipe that are kept, until it is closed, while this process does something else."""

    def write() -> None:
        assert pipe is not None
        with io.TextIOWrapper(pipe, "utf-8", "replace", newline="") as lines:  # progress bars end lines with \r
            for line in keep(lines):
                to.write(line)
                to.flush()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


def of_ranks(lines: Iterable[str]) -> Iterator[str]:
    """The lines that ranks wrote, of all that stands on torchrun's stderr.

    Once a rank has failed torchrun says so, ends the others, and lists them; of that only is kept how a rank ended that
    could not say so itself.
    """
    for line in lines:
        if ended := re.search(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", line):
            number, rank = int(ended[1]), ended[2]
            if number < 0:
                hint = " (of the kernel, when memory runs out)" * (-number == signal.SIGKILL)
                yield f"local rank {rank} was ended by {signal.Signals(-number).name}{hint}\n"
            elif number > 1:
                yield f"local rank {rank} ended with exit status {number}\n"
            deque(lines, maxlen=0)  # read on, since the pipe must not fill
        elif not re.match(r"[A-Z]\d{4} .*torch/distributed/|\[W.*\[c10d\] The hostname of the client", line):
            yield line


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Terminate a torchrun and every rank that it started; it is stopped first, so that it starts no more."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGSTOP)
    ranks = _descendants(process.pid)
    process.kill()
    process.wait()
    _signal(ranks, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while (ranks := _alive(ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal(ranks, signal.SIGKILL)


@contextlib.contextmanager
def stopped_like_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt for the signals that end a process, in the main thread."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {getattr(signal, name): signal.signal(getattr(signal, name), stop) for name in _STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal(processes: Sequence[int], number: int) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in _processes().items():
        children.setdefault(parent, []).append(pid)
    found, todo = [], [ancestor]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _alive(ranks: Sequence[int]) -> list[int]:
    """The processes that still run; zombies do not."""
    there = _processes()
    return [pid for pid in ranks if pid in there and not there[pid][1].startswith("Z")]


def _processes() -> dict[int, tuple[int, str]]:
    """Process -> its parent and its state, from /proc, or from `ps` where there is no /proc."""
    found = {}
    if Path("/proc/self/stat").exists():
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                state, parent = path.read_text().rpartition(")")[2].split()[:2]
                found[int(path.parent.name)] = int(parent), state
        return found
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], text=True, capture_output=True, check=False).stdout
    for pid, above, state in map(str.split, table.splitlines()):
        found[int(pid)] = int(above), state
    return found
