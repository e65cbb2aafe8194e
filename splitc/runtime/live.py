"""What training says of its own speed: how long steps take beside the prediction, and when they drift, why.

Every rank times its steps and what it waits for, and posts the medians of a few steps in the store of the process
group.  Rank 0 reads what is there: no rank waits for another one, and nothing is sent among them.  It prints a line
once, then when steps change by more than their noise, and looks for the cause of a change of 12 %, or where
what ranks wait drifts by 25 %: ranks that compute for longer than they did, or else transfers that take longer.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .clocks import Clock

FIRST = 20  # steps, after which there is a line
WINDOW, LEAST = 10, 0.5  # steps that are taken together, or as many more as take so long (s)
DRIFT, CAUSE, CHANGE = 0.25, 0.12, 0.05  # of a step's time: drifts, to look for a cause, and to print at least
_SLOWER, _TRIES = 1.2, 10  # times as long is a cause; steps in which rank 0 asks for what others have not posted yet
_NOTED = 50  # steps, after which a training is recorded

Ends = tuple[int, ...]

Moment = tuple[Any, float, dict[Ends, float]]
"""By the clock of what computes; what was waited by then, in all and by the ends of transfers."""


class Waits:
    """Seconds that a rank has waited, and by the ranks at the ends of a transfer, those from its issue to its end.

    now: the operation that it is in, its ranks, and since when; "" between operations.
    """

    def __init__(self) -> None:
        self.now: tuple[str, Ends, float] = "", (), time.monotonic()
        self.seconds, self.by = 0.0, defaultdict[Ends, float](float)

    def add(self, ends: Ends, issued: float, begun: float) -> None:
        """A transfer was waited for from `begun` to now."""
        now = time.monotonic()
        self.seconds += now - begun
        self.by[ends] += now - issued


@dataclass(frozen=True)
class Cause:
    """What changed: ranks that compute so many times as long, or transfers among ranks that do."""

    computing: Mapping[int, float] = field(default_factory=dict)
    transfers: float = 1.0
    ends: Ends = ()


@dataclass(frozen=True)
class Posted:
    """A step of a rank, the median of some: seconds in all, computing, and by ends of transfers (`Waits`)."""

    made: int
    step: float
    compute: float
    by: Mapping[str, float]
    host: str


@dataclass(frozen=True)
class Expected:
    """What rank 0 knows of the plan.

    seconds: predicted of a step; 0: it is not.  compute: of each rank.  period: steps in which all happens that a plan
    does.  advise: whether another plan would be faster, in words, called in a thread.  note: records what steps took.
    """

    seconds: float = 0.0
    compute: Sequence[float] = ()
    period: int = 1
    advise: Callable[[Cause], str] = lambda cause: ""
    note: Callable[[float], None] = lambda seconds: None


class Live:
    """Follows the steps of one rank; on rank 0 it prints.

    transport: a `TorchTransport`.  say: prints a line.  clock: of what computes; None: of the host.
    """

    def __init__(self, transport: Any, say: Callable[[str], None] | None = None, clock: Clock | None = None) -> None:
        self._rank, self._world = transport.rank, transport.world
        self._waits, self._store = transport.waits, transport.store
        self._say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        self.expected = Expected()
        self._made, self._judged = 0, -_TRIES  # steps: so far, and up to the post that is to be judged
        self._steps: list[tuple[float, float]] = []  # since the last post: seconds, and those computing
        self._since, self._by = time.monotonic(), defaultdict[Ends, float](float)  # the last post, and by ends since
        self._clock, self._begun = clock or Clock(time.monotonic), (0.0, 0.0, dict[Ends, float]())
        self._ended = deque[tuple[Moment, Moment]]()  # steps that the device may not have come to the end of
        self._shown, self._noise, self._was = 0.0, 0.0, list[Posted]()
        self._changes = False
        self._noted, self._medians = False, list[float]()

    def begin(self) -> None:
        """A step begins; what is between it and the last one is of neither."""
        self._begun = self._moment()

    def after(self) -> None:
        """A step has ended, on a GPU once its stream comes to it."""
        self._ended.append((self._begun, self._moment()))
        while self._ended and self._clock.reached(self._ended[0][1][0]):
            self._count(*self._ended.popleft())

    def _moment(self) -> Moment:
        return self._clock.now(), self._waits.seconds, dict(self._waits.by)

    def _count(self, begun: Moment, ended: Moment) -> None:
        """Take in a step from its begin to its end."""
        seconds, waited = self._clock.between(begun[0], ended[0]), ended[1] - begun[1]
        self._steps.append((seconds, seconds - waited))
        for ends, took in ended[2].items():
            self._by[ends] += took - begun[2].get(ends, 0.0)
        self._made += 1
        size = max(1, -(-WINDOW // self.expected.period)) * self.expected.period
        with suppress(RuntimeError):  # of a store that is gone, which training notices where it matters
            if self._made % size == 0 and time.monotonic() - self._since > LEAST:
                self._post(size)
            if self._rank == 0 and self._judged < self._made <= self._judged + _TRIES:
                self._judge()

    def close(self) -> None:
        """Record what steps took, unless there were few."""
        if self._medians and not self._noted and self._made >= FIRST:
            self._noted = True
            self.expected.note(statistics.median(self._medians))

    def _post(self, size: int) -> None:
        """Post the steps since the last time."""
        steps, self._steps, self._since = self._steps, [], time.monotonic()
        middle = statistics.median if self.expected.period == 1 else statistics.fmean
        by = {" ".join(map(str, ends)): seconds / len(steps) for ends, seconds in self._by.items()}
        self._by.clear()
        own = self._made, middle([s for s, _ in steps]), middle([c for _, c in steps]), by, platform.node()
        self._store.set(f"live {self._rank}", json.dumps(own))
        if self._rank == 0 and self._made >= FIRST:
            self._medians.append(own[1])
            self._judged, self._noise = self._made, _noise([s for s, _ in steps])
            if self._made >= _NOTED:
                self.close()

    def _judge(self) -> None:
        """Print what there is to say of the steps up to the last post, once all ranks have posted."""
        keys = [f"live {rank}" for rank in range(self._world)]
        if not self._store.check(keys):
            return
        posted = [Posted(*json.loads(each)) for each in self._store.multi_get(keys)]
        if min(each.made for each in posted) < self._judged and self._made < self._judged + _TRIES:
            return
        now, self._judged = posted[0].step, -_TRIES
        if self._shown and abs(now / self._shown - 1) <= max(CHANGE, min(self._noise, DRIFT / 2)):
            self._changes = False
        elif self._shown and not self._changes:
            self._changes = True  # if that holds: one post may be of steps before and after it
        else:
            self._shown, self._changes, was = now, False, self._was
            self._say(f"step {_ms(now)}{self._beside_prediction(posted)}")
            if not was or abs(now / was[0].step - 1) >= CAUSE or waits_drift(was, posted):
                self._was = posted
            if was and self._was is posted:
                cause = cause_of(was, posted)
                why = in_words(cause, [each.host for each in posted])
                self._say(f"step {_ms(now)}, {_ms(was[0].step)} before: {why}")
                threading.Thread(target=self._advise, args=(cause,), daemon=True).start()

    def _beside_prediction(self, posted: Sequence[Posted]) -> str:
        """What was predicted, and where that is far off, of which part."""
        told = self.expected
        if not told.seconds:
            return ""
        error = posted[0].step / told.seconds - 1
        text = f", predicted {_ms(told.seconds)} ({100 * error:+.0f} %)"
        if abs(error) < DRIFT or len(told.compute) != len(posted):
            return text
        rank = max(range(len(posted)), key=lambda rank: told.compute[rank])
        own = posted[rank]
        parts = ((own.compute, told.compute[rank]), (own.step - own.compute, told.seconds - told.compute[rank]))
        words = (f"{_ms(a)} in place of {_ms(b)}" for a, b in parts)
        return text + ": rank {} computes {} and waits {}".format(rank, *words)

    def _advise(self, cause: Cause) -> None:
        """Say which plan would be faster; beside training, which has the processor before it."""
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        if advice := self.expected.advise(cause):
            self._say(advice)


def waits_drift(was: Sequence[Posted], now: Sequence[Posted]) -> bool:
    """Whether ranks wait so much longer or less that it shows in the step, although computing hides most of it."""
    before, after = (sum(each.step - each.compute for each in of) for of in (was, now))
    return abs(after - before) >= max(DRIFT * before, 2 * CHANGE * sum(each.step for each in was))


def cause_of(was: Sequence[Posted], now: Sequence[Posted]) -> Cause:
    """What takes longer than it did, or where nothing does, less long.

    A transfer takes as long as on that of its ranks which is the last to begin it.
    """
    ratios = {rank: b.compute / a.compute for rank, (a, b) in enumerate(zip(was, now, strict=True)) if a.compute > 0}
    grown = now[0].step > was[0].step
    changed = {rank: ratio for rank, ratio in ratios.items() if (ratio > _SLOWER if grown else ratio < 1 / _SLOWER)}
    own = {rank: now[rank].compute - was[rank].compute for rank in changed}
    if own and max(map(abs, own.values())) > 0.3 * abs(now[0].step - was[0].step):
        return Cause(changed)
    took = [{key: min(each.by[key] for each in of if key in each.by) for key in _keys(of)} for of in (was, now)]
    both = {key: took[1][key] / took[0][key] for key in took[0].keys() & took[1].keys() if took[0][key] > 1e-4}
    least = 1 + CHANGE if waits_drift(was, now) else _SLOWER  # from issue to end they are partly hidden
    slow = {key: ratio for key, ratio in both.items() if (ratio > least if grown else ratio < 1 / least)}
    if not slow:
        return Cause()
    weight = {key: took[1][key] for key in slow}
    ratio = sum(weight.values()) / sum(took[0][key] for key in slow)
    common = set.intersection(*({*map(int, key.split())} for key in slow))
    other = {rank for key in both.keys() - slow.keys() for rank in map(int, key.split())}
    ends = common - other or {int(rank) for key in slow for rank in key.split()}
    return Cause({}, ratio, tuple(sorted(ends)))


def _keys(posted: Sequence[Posted]) -> set[str]:
    return {key for each in posted for key in each.by}


def in_words(cause: Cause, hosts: Sequence[str]) -> str:
    """`rank 3 computes 2.0 times slower`, `the link of rank 2 (node2) runs at 60 %`."""

    def of(rank: int) -> str:
        return f"rank {rank} ({hosts[rank]})" if len(set(hosts)) > 1 else f"rank {rank}"

    if cause.computing:
        listed = [*cause.computing.items()]
        words = [f"{of(rank)} computes {_times(ratio)}" for rank, ratio in listed[:4]]
        return ", ".join(words) + (f", and {len(listed) - 4} more" if len(listed) > 4 else "")
    if len(cause.ends) == 1:
        return f"the link of {of(cause.ends[0])} runs at {100 / cause.transfers:.0f} %"
    if cause.ends:
        return f"transfers among ranks {' '.join(map(str, cause.ends))} run at {100 / cause.transfers:.0f} %"
    return "neither computing nor transfers alone explain it"


def _times(ratio: float) -> str:
    return f"{ratio:.1f}x slower" if ratio > 1 else f"{1 / ratio:.1f}x faster"


def _noise(seconds: Sequence[float]) -> float:
    """How far the median of steps may be off, as a fraction: 3 standard errors."""
    middle = statistics.median(seconds)
    deviation = 1.48 * statistics.median(abs(each - middle) for each in seconds)
    return 3 * 1.25 * deviation / len(seconds) ** 0.5 / middle if middle else 0.0


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 or not seconds else f"{seconds * 1e3:.2g} ms"
