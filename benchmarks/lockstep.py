"""Processes that stop at marks, so that their parent can read counters while all of them stand still.

A rank calls `Marks.reach("warm", ...)`: it writes one line and waits for one.  The parent hears all ranks, reads what
it wants, and lets them go on.  This needs no message between the ranks, so it adds nothing to what is counted.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.errors import BedError

TIMEOUT = 300.0  # seconds to the next mark
_TAIL = 15  # lines of a failed rank's errors that are shown


class Marks:
    """A rank's side.  Its standard output is for marks alone: what it prints otherwise goes to its errors."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._out = os.dup(1)
        os.dup2(2, 1)

    def reach(self, mark: str, **figures: float) -> None:
        """Tell the parent, and wait until it lets this rank go on.  Raises BedError when the parent is gone."""
        os.write(self._out, (json.dumps({"mark": mark, **figures}) + "\n").encode())
        if not os.read(0, 1):
            raise BedError("the process that started this rank is gone")


class Lockstep:
    """The parent's side.  processes: with pipes without buffers as input and output.  logs: where their errors go."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
        self._processes, self._logs = processes, logs
        self._texts = [b""] * len(processes)

    def hear(self, mark: str, timeout: float = TIMEOUT) -> list[dict[str, Any]]:
        """What every rank says at `mark`, in the order of the ranks.

        Raises BedError, with the last lines of its errors, when a rank ends or says something else before.
        """
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None, "a rank in lockstep talks through pipes"
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = ", ".join(str(key.data) for key in selector.get_map().values())
                    raise BedError(f"rank {late} did not come to {mark!r} within {timeout:g} s")
                for key, _ in ready:
                    text = os.read(key.fd, 65536)
                    self._texts[key.data] += text
                    if not text:
                        raise BedError(self._failure(key.data, mark))
                    if text.endswith(b"\n"):
                        selector.unregister(key.fileobj)
        said = [json.loads(text) for text in self._texts]
        self._texts = [b""] * len(self._processes)
        for rank, figures in enumerate(said):
            if figures["mark"] != mark:
                raise BedError(f"rank {rank} came to {figures['mark']!r}, not to {mark!r}")
        return said

    def go_on(self) -> None:
        """Let all ranks go on."""
        for process in self._processes:
            assert process.stdin is not None, "a rank in lockstep talks through pipes"
            process.stdin.write(b"\n")

    def _failure(self, rank: int, mark: str) -> str:
        status = self._processes[rank].wait()
        lines = self._logs[rank].read_text(errors="replace").splitlines()[-_TAIL:]
        return "\n".join([f"rank {rank} ended with status {status} before {mark!r}:", *(f"  {line}" for line in lines)])
