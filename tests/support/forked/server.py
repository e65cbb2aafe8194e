"""Fork a process for each request; what they would all load is loaded once, and no thread is started here."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import multiprocessing
import os
import runpy
import select
import signal
import site
import socket
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

PRELOADED = (
    "highspy", "mlxtend.data", "networkx", "pulp", "sklearn.datasets", "tabulate", "tomli_w", "torch._dynamo",
    "torch.distributed.elastic.rendezvous.utils", "torch.distributed.launcher.api", "torch.utils.flop_counter",
)  # fmt: skip
OURS = ("splitc.cli.entry", "splitc.cli.launching", "splitc.compiled", "splitc.prepared", "splitc.runtime.launch.main")
"""Loaded from this tree; a process that finds splitc elsewhere, or not at all, forgets it."""

ROOT = Path(__file__).parents[3]
ABOVE = 500  # numbers of files that no process uses


@dataclass(frozen=True)
class Request:
    """What a program wants: `command` is a script, -m and a module, or -c and a text, and their arguments."""

    command: list[str]
    unbuffered: bool
    folder: str
    environment: dict[bytes, bytes]
    files: list[int]  # their numbers, in the order in which they are handed over
    program: int
    parent: int


@dataclass
class Child:
    """A process, the connection of its program, and a file that tells when it has ended."""

    process: int
    client: socket.socket
    request: Request
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = os.pidfd_open(self.process)


def serve(address: str) -> tuple[Request, list[int]]:
    """Return in each process that is forked, with what it is to do and its files; end when stdin does."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(64)
    children: list[Child] = []
    print("ready", flush=True)
    while True:
        waiting = [sys.stdin, listener, *(child.client for child in children), *(child.end for child in children)]
        ready, _, _ = select.select(waiting, [], [])
        for child in [child for child in children if child.end in ready]:
            children.remove(child)
            tell(child, os.waitstatus_to_exitcode(os.waitpid(child.process, 0)[1]))
        for child in [child for child in children if child.client in ready]:
            signals = received(child.client, 16)
            for number in signals:
                os.kill(child.process, number)  # it is there, or a zombie, until its end is seen above
            if not signals:
                kill(child, children)
        if sys.stdin in ready:
            for child in children:
                kill(child, children)
            sys.exit()
        if listener in ready:
            client, _ = listener.accept()
            text, files = asked(client)
            if text:
                request = Request(*ast.literal_eval(text.decode()))
                assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the threads of the server"
                if not (process := os.fork()):
                    return request, files
                children.append(Child(process, client, request))
            for number in files:
                os.close(number)


def asked(client: socket.socket) -> tuple[bytes, list[int]]:
    """What a program asks for, and the files that it hands over; nothing where it ends before it has asked."""
    length, files, _, _ = socket.recv_fds(client, 8, 250)
    text = b""
    while len(text) < int.from_bytes(length, "big"):
        if not (more := received(client, 1 << 16)):
            return b"", files
        text += more
    return text, files


def received(client: socket.socket, most: int) -> bytes:
    """What a program has sent, after its request signals for its process; nothing where it is gone."""
    try:
        return client.recv(most)
    except ConnectionResetError:
        return b""


def tell(child: Child, status: int) -> None:
    os.close(child.end)
    with contextlib.suppress(OSError), child.client:
        child.client.send(status.to_bytes(4, "big", signed=True))


def kill(child: Child, children: list[Child]) -> None:
    """End a process, and those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.process, signal.SIGKILL)
    for other in children:
        if other.request.parent == child.process:
            kill(other, children)


def become(request: Request, files: list[int], program: str) -> None:
    """Give this process all that it would have inherited from its program."""
    os.setsid()
    join(request.program)
    held = [fcntl.fcntl(number, fcntl.F_DUPFD, ABOVE) for number in files]
    os.closerange(3, ABOVE)
    for number, source in zip(request.files, held, strict=True):
        os.dup2(source, number)
        os.close(source)
    os.environ.clear()
    os.environb.update(request.environment)
    os.chdir(request.folder)
    sys.executable = program
    multiprocessing.set_executable(program)
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    through = request.unbuffered or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout.reconfigure(write_through=through)  # type: ignore[union-attr]
    added = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [*map(os.path.abspath, added), *sys.path[1:]]
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    numpy.random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))


def join(process: int) -> None:
    """Go to the control groups of a process, and then to its network and mounted folders, where no groups may be."""
    ours = Path("/proc/self/cgroup").read_text().splitlines()
    for line in Path(f"/proc/{process}/cgroup").read_text().splitlines():
        if line not in ours:
            _, controllers, group = line.split(":", 2)
            (Path("/sys/fs/cgroup") / controllers / group.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "mnt"):
        theirs = f"/proc/{process}/ns/{kind}"
        if os.stat(theirs).st_ino != os.stat(f"/proc/self/ns/{kind}").st_ino:
            number = os.open(theirs, os.O_RDONLY)
            if libc.setns(number, 0):
                raise OSError(ctypes.get_errno(), f"cannot join {theirs}")
            os.close(number)


def run(kind: str, *rest: str) -> None:
    """Do what `python` does with these arguments."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.excepthook = without_ours
    if kind == "-m":
        sys.argv, sys.path[:0] = ["-m", *rest[1:]], [os.getcwd()]
        forget_others()
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif kind == "-c":
        sys.argv, sys.path[:0] = ["-c", *rest[1:]], [""]
        forget_others()
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[:0] = [kind, *rest], [os.path.dirname(os.path.realpath(kind))]
        forget_others()
        main.__file__ = kind
        exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)


def forget_others() -> None:
    """Unload splitc where this process would find another one, or none."""
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "splitc"}
    found = importlib.util.find_spec("splitc")
    if found is not None and found.origin is not None and Path(found.origin).parent.samefile(ROOT / "splitc"):
        sys.modules.update(ours)


def without_ours(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print an error as Python would, which knows nothing of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for name in (*PRELOADED, *OURS):
        importlib.import_module(name)
    sys.path.remove(str(ROOT))
    gc.collect()
    gc.freeze()
    request, files = serve(sys.argv[1])
    become(request, files, sys.argv[2])
    run(*request.command)
