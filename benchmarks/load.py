"""How much of the processors other processes took meanwhile: a timing beside a busy neighbour is worth nothing."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")  # per second, the unit of /proc


class Load:
    """Watches from now on."""

    def __init__(self) -> None:
        self._begin = _now()

    def foreign(self) -> float:
        """Fraction of all processors' time since the beginning that neither this process nor its descendants used.

        Time that a hypervisor gave to others counts; interrupts do not, for most of them are the testbed's own packets.
        Time is sampled in ticks: over less than a second the figure says little.
        """
        elapsed, busy, own = (now - then for now, then in zip(_now(), self._begin, strict=True))
        return max(0.0, busy - own) / max(elapsed * (os.cpu_count() or 1), 1 / TICKS)


def _now() -> tuple[float, float, float]:
    """The clock, what all processes have used, and what this one and its descendants have (s)."""
    return time.monotonic(), busy_seconds(Path("/proc/stat").read_text()), own_seconds(os.getpid())


def busy_seconds(stat: str) -> float:
    """User, nice, system and stolen time in the first line of /proc/stat (s)."""
    ticks = [int(word) for word in stat.splitlines()[0].split()[1:]]
    return (sum(ticks[:3]) + ticks[7]) / TICKS


def own_seconds(pid: int) -> float:
    """What a process, its descendants and those of them that have ended have used (s)."""
    table = {each: (parent, ticks) for each, parent, ticks in _processes()}
    children: dict[int, list[int]] = {}
    for each, (parent, _) in table.items():
        children.setdefault(parent, []).append(each)
    total, todo = 0, [pid]
    while todo:
        each = todo.pop()
        total += table[each][1] if each in table else 0
        todo += children.get(each, [])
    return total / TICKS


def started(pid: int) -> int | None:
    """When a process started, in ticks since boot; None when there is none."""
    with contextlib.suppress(OSError):
        return int(_fields(pid)[19])
    return None


def processes(*namespaces: str) -> dict[int, str]:
    """Those that run in one of these network namespaces, with their names."""
    networks = {Path("/run/netns", name).stat().st_ino for name in namespaces}
    found = {}
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if path.stat().st_ino in networks:
                found[int(path.parts[2])] = (path.parents[1] / "comm").read_text().strip()
    return found


def _processes() -> Iterator[tuple[int, int, int]]:
    """Process, its parent, and the ticks that it and its ended children have used."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = _fields(int(path.name))
            yield int(path.name), int(fields[1]), sum(map(int, fields[11:15]))


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the name before it may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
