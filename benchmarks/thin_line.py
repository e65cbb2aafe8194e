"""A thin line between two parts of a testbed: a rate, a delay, and a cut, without the kernel's netem.

    with NetworkTestbed(4, rate) as testbed, ThinLine(testbed, 2, parse_rate("5Mbit"), 0.05) as line:
        line.cut(); ...; line.mend()

The ranks from `first` on move to a bridge of their own; a process carries the frames between the two bridges.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.layout import parse_rate
from benchmarks.testbed import NetworkTestbed, _run

QUEUE = 0.5  # seconds that a frame may wait for the line before it is dropped
_ENDS = ("near", "far")


class ThinLine:
    """The line; the end of its `with` ends what carries frames, and the testbed the rest.

    first: the first rank on the far side.  rate: bytes/s, each way.  delay: seconds, one way.
    """

    def __init__(self, testbed: NetworkTestbed, first: int, rate: float, delay: float) -> None:
        self._testbed, self._first = testbed, first
        self._options = (f"{rate * 8}bit", str(delay))

    def __enter__(self) -> Self:
        switch, ip = self._testbed.layout.switch, ("ip", "-n", self._testbed.layout.switch, "link")
        _run((*ip, "add", "beyond", "type", "bridge", "stp_state", "0"))
        _run((*ip, "set", "beyond", "up"))
        for rank in range(self._first, self._testbed.world):
            _run((*ip, "set", f"rank{rank}", "master", "beyond"))
        for end, bridge in zip(_ENDS, ("switch", "beyond"), strict=True):
            one = ("gso_max_segs", "1")
            _run((*ip, "add", f"{end}-port", *one, "type", "veth", "peer", "name", end, *one))
            _run((*ip, "set", f"{end}-port", "master", bridge, "up"))
            _run((*ip, "set", end, "up"))
        command = ["ip", "netns", "exec", switch, sys.executable, "-m", "benchmarks.thin_line", *self._options]
        root = Path(__file__).resolve().parents[1]
        self._process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, bufsize=0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()

    def cut(self) -> None:
        """Drop all frames from now on."""
        self._tell(b"0")

    def mend(self) -> None:
        """Carry them again."""
        self._tell(b"1")

    def _tell(self, what: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(what)


def carry(rate: float, delay: float) -> None:
    """Carry frames both ways until standard input ends; `0` there cuts the line, `1` mends it."""
    ends = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) for _ in _ENDS]
    selector, whole = selectors.DefaultSelector(), True
    for name, end in zip(_ENDS, ends, strict=True):
        end.bind((name, 0))
        selector.register(end, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    waiting: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    free = [0.0, 0.0]  # when the line can take the next frame, each way
    while True:
        due = min((queue[0][0] for queue in waiting if queue), default=None)
        for key, _ in selector.select(None if due is None else max(0.0, due - time.monotonic())):
            if key.fileobj not in ends:
                if not (told := os.read(0, 1)):
                    return
                whole = told == b"1"
                continue
            way = ends.index(key.fileobj)
            frame, address = ends[way].recvfrom(65536)
            now = time.monotonic()
            if address[2] == socket.PACKET_OUTGOING or not whole or free[way] > now + QUEUE:
                continue
            free[way] = max(now, free[way]) + len(frame) / rate
            waiting[way].append((free[way] + delay, _summed(frame)))
        now = time.monotonic()
        for way, queue in enumerate(waiting):
            while queue and queue[0][0] <= now:
                ends[1 - way].send(queue.popleft()[1])


def _summed(frame: bytes) -> bytes:
    """A frame with the checksum of its TCP segment, which the kernel leaves to cards."""
    start, end = 14 + 4 * (frame[14] & 15), 14 + int.from_bytes(frame[16:18], "big")
    if frame[12:14] != b"\x08\x00" or frame[23] != 6:
        return frame
    segment = bytearray(frame[start:end])
    segment[16:18] = b"\0\0"
    pseudo = frame[26:34] + bytes((0, 6)) + len(segment).to_bytes(2, "big")
    total = int.from_bytes(pseudo + segment + bytes(len(segment) % 2), "big") % 0xFFFF
    segment[16:18] = (0xFFFF - total).to_bytes(2, "big")
    return frame[:start] + bytes(segment) + frame[end:]


if __name__ == "__main__":
    carry(parse_rate(sys.argv[1]), float(sys.argv[2]))
