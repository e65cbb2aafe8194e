"""Run torchrun on this machine, and end it with all its ranks when this process is interrupted.

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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Protocol

from ..errors import DONE, RESTART, SIGNALS, STOP, STOPPED_BY
from ..transport.sealed import TOKEN

GRACE = 3.0  # seconds between SIGTERM and SIGKILL
SAVING = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}  # seconds that torchrun leaves ranks to save; else 30


class Lines(Protocol):
    """Takes lines that are written to it."""

    def write(self, line: str, /) -> object: ...
    def flush(self) -> object: ...


@dataclass
class Ends:
    """How ranks have ended, as their lines say.

    stopped: all after the same step, for a signal.  asked: the signal that this process got for them, by its name.
    final: another start will do no better.
    """

    stopped: bool = False
    asked: str = ""
    final: bool = False

    def code(self, failed: object) -> int:
        """What a run exits with; failed: whether a torchrun did."""
        return DONE if self.stopped else STOP if self.final else RESTART if failed else DONE


def torchrun(
    arguments: Sequence[str], world: int, quiet: bool = False, to: Lines | None = None, saves: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `arguments` on `world` processes of this machine; the returncode is that of their launch.py.

    quiet: capture the output instead of printing it.  to: takes the lines of stdout.
    saves: at the first signal the ranks are asked to stop after a step; they end at once at the second.

    Of what stands on stderr the ranks' own lines are kept, see `of_ranks`.
    Raises KeyboardInterrupt when it is interrupted, after all its processes have ended.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    own = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world)), TOKEN: secrets.token_hex(16)}
    environment = {**own, **SAVING, **os.environ}
    home = str(Path(__file__).parents[3])  # the ranks use this splitc, wherever it was imported from
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), home]))
    command, kept, ends = [*launcher, *arguments], io.StringIO(), Ends()
    with stopped_like_ctrl_c((lambda: process.send_signal(signal.SIGTERM)) if saves else None, ends):
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE if quiet or to else None,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        forwarding = forward(process.stderr, kept if quiet else sys.stderr, lambda lines: of_ranks(lines, ends))
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
    return subprocess.CompletedProcess(
        command, ends.code(process.returncode), output.decode(errors="replace"), kept.getvalue()
    )


def forward(pipe: IO[bytes] | None, to: Lines, keep: Callable[[Iterable[str]], Iterable[str]]) -> threading.Thread:
    """Write the lines of a pipe that are kept, until it is closed, while this process does something else."""

    def write() -> None:
        assert pipe is not None
        erase = "\x1b[K" * (sys.stderr.isatty() and to is sys.stderr)  # the line that training renews
        with io.TextIOWrapper(pipe, "utf-8", "replace", newline="") as lines:  # progress bars end lines with \r
            for line in keep(lines):
                to.write(erase + line)
                to.flush()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


def of_ranks(lines: Iterable[str], ends: Ends) -> Iterator[str]:
    """The lines that ranks wrote, of all that stands on torchrun's stderr; what they say of their end goes into `ends`.

    Once a rank has failed torchrun says so, ends the others, and lists them; of that only is kept how a rank ended that
    could not say so itself.  What it says when a signal ends it is left out.
    """
    held = ""
    for line in lines:
        if held and '"<frozen runpy>"' in line:  # torchrun's own, since ranks are started by their files
            deque(lines, maxlen=0)
            return
        if held:
            yield held
        held = line if line.startswith("Traceback (") else ""
        if held:
            continue
        if line.startswith(STOPPED_BY):  # what torchrun passes on is SIGTERM
            ends.stopped, line = True, re.sub(r"SIG\w+", ends.asked or r"\g<0>", line, count=1)
        if ended := re.search(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", line):
            number, rank = int(ended[1]), ended[2]
            ends.final |= number == STOP
            if number < 0:
                hint = " (of the kernel, when memory runs out)" * (-number == signal.SIGKILL)
                yield f"local rank {rank} was ended by {signal.Signals(-number).name}{hint}\n"
            elif number not in (RESTART, STOP):
                yield f"local rank {rank} ended with exit status {number}\n"
            deque(lines, maxlen=0)  # read on, since the pipe must not fill
        elif not re.match(r"[A-Z]\d{4} .*torch/distributed/|\[W.*\[c10d\] The hostname of the client", line):
            yield line
    if held:
        yield held


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
def stopped_like_ctrl_c(ask: Callable[[], object] | None, ends: Ends) -> Iterator[None]:
    """Raise KeyboardInterrupt for the signals that end a process, in the main thread.

    ask: called for the first one in place of that; then it is raised at the end, unless ranks have stopped as asked.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        if ask is None or ends.asked:
            raise KeyboardInterrupt
        ends.asked = signal.Signals(number).name
        ask()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if ends.asked and not ends.stopped:
        raise KeyboardInterrupt


def _signal(processes: Sequence[int], number: int) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants(ancestor: int) -> list[int]:
    table, found = _processes(), [ancestor]
    for above in found:  # which grows meanwhile
        found += [pid for pid, (parent, _) in table.items() if parent == above]
    return found[1:]


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
