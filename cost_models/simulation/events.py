"""Simulate ranks that compute and communicate, event by event, with all overlap that their programs allow.

Each rank executes its operations in order: it computes, begins a transfer and continues, or waits for transfers that it
began.  A transfer is ready once all its parties have begun it, and occupies its lines (the ports into and out of ranks)
for its whole duration.  A line carries one transfer at a time; among the ready transfers whose other lines are free,
the first to become ready starts first.  So n messages to one rank take n times as long as one, as in the closed form
(Stanza 4.1.1), and transfers on disjoint lines run at the same time.

A transfer may cost its parties processor time (`Transfer.processor`), which prolongs their computing unless they are
idle meanwhile.  Ranks may share cores (`cores`).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from itertools import pairwise

from splitc.cost_models.simulation.cores import Cores
from splitc.ir.phases import Phases
from splitc.runtime.transport.phases import Span


@dataclass(frozen=True)
class Compute:
    """Compute for `seconds`."""

    name: str
    seconds: float


@dataclass(frozen=True, eq=False)
class Transfer:
    """A message or collective.

    parties: ranks that must begin it.  lines: numbers of the lines that it occupies.  seconds: its duration.
    processor: processor time that it costs each party (s).
    """

    name: str
    parties: tuple[int, ...]
    lines: tuple[int, ...]
    seconds: float
    processor: float = 0.0


@dataclass(frozen=True)
class Begin:
    """Begin `transfer`, of which this rank sends `nbytes`, without waiting for it."""

    transfer: Transfer
    nbytes: float = 0.0


@dataclass(frozen=True)
class Wait:
    """Wait until all `transfers` have ended."""

    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class Mark:
    """The end of a step."""


Operation = Compute | Begin | Wait | Mark


@dataclass
class _Rank:
    """Progress of one rank, and its time by phase (s)."""

    operations: Sequence[Operation]
    next: int = 0
    owed: float = 0.0  # processor time of transfers, to be added to the next computation
    compute: float = 0.0
    waiting: float = 0.0
    communication: float = 0.0
    sent: float = 0.0
    under_way: float = 0.0  # end of its last transfer in flight
    blocked: int = 0  # number of unfinished transfers that it waits for
    since: float = 0.0  # start of the current wait
    marks: list[Phases] = field(default_factory=list)  # totals at each mark; `step` is the clock


@dataclass(frozen=True)
class _Tick:
    """The next completion on shared cores; stale once another task has started or ended."""

    number: int


class Simulation:
    """A completed simulation of `programs`, one for each rank.

    record: keep the span of every operation, for a trace.  cores: number of cores that all ranks share; None: one core
    for each rank.

    Raises ValueError when a rank waits for a transfer that never begins.
    """

    def __init__(
        self, programs: Sequence[Sequence[Operation]], record: bool = False, cores: float | None = None
    ) -> None:
        self.ranks = [_Rank(program) for program in programs]
        self.spans: list[Span] = []
        self._record = record
        self._cores = None if cores is None else Cores(cores)
        self._events: list[tuple[float, int, int, Transfer | int | _Tick]] = []  # (time, order, number, what)
        self._number = self._ticks = 0
        self._begun: dict[Transfer, int] = {}
        self._ended: set[Transfer] = set()
        self._waiters: dict[Transfer, list[int]] = {}
        self._busy: set[int] = set()
        self._queues: dict[int, deque[Transfer]] = {}
        self._started: set[Transfer] = set()
        for rank in range(len(programs)):
            self._at(0.0, rank)
        self._run()
        stuck = [rank for rank, state in enumerate(self.ranks) if state.blocked or state.next < len(state.operations)]
        if stuck:
            raise ValueError(f"ranks {stuck[:8]} wait for transfers that others never begin")

    def steps(self, rank: int) -> list[Phases]:
        """Return the phases of `rank` in each step, from mark to mark."""
        totals = [(0.0,) * 5, *(astuple(total)[1:] for total in self.ranks[rank].marks)]
        return [Phases(rank, *(b - a for a, b in zip(*pair, strict=True))) for pair in pairwise(totals)]

    def ends(self) -> list[float]:
        """Return the time at which the last rank reached each mark (s)."""
        return [max(each.step for each in marks) for marks in zip(*(r.marks for r in self.ranks), strict=True)]

    # -- inside --------------------------------------------------------------------------------------------------------

    def _at(self, time: float, what: Transfer | int | _Tick) -> None:
        """Schedule an event at `time`: resume a rank or end a transfer.  At equal times transfers end first."""
        self._number += 1
        heapq.heappush(self._events, (time, not isinstance(what, Transfer), self._number, what))

    def _run(self) -> None:
        while self._events:
            time, _, _, what = heapq.heappop(self._events)
            if isinstance(what, int):
                self._go_on(what, time)
            elif isinstance(what, Transfer):
                self._end(what, time)
            elif what.number == self._ticks:
                self._computed(time)

    def _go_on(self, rank: int, now: float) -> None:
        state = self.ranks[rank]
        while state.next < len(state.operations):
            operation = state.operations[state.next]
            state.next += 1
            if isinstance(operation, Compute):
                self._compute(rank, operation, now)
                return
            if isinstance(operation, Begin):
                state.sent += operation.nbytes
                self._begin(operation.transfer, now)
            elif isinstance(operation, Wait):
                if self._blocks(rank, operation, now):
                    return
            elif state.owed:  # the processor time of a step's transfers is part of the step
                state.next -= 1
                self._compute(rank, Compute("transfers", 0.0), now)
                return
            else:
                beyond = max(0.0, state.under_way - now)  # transfers that continue into the next step
                communication = state.communication - beyond
                state.marks.append(Phases(rank, now, state.compute, state.waiting, communication, state.sent))

    def _compute(self, rank: int, operation: Compute, now: float) -> None:
        state = self.ranks[rank]
        seconds, state.owed = operation.seconds + state.owed, 0.0
        if self._cores is not None:
            self._cores.add(rank, operation.name, seconds, now)
            self._tick()
            return
        state.compute += seconds
        self._span(rank, "compute", operation.name, now, now + seconds)
        self._at(now + seconds, rank)

    def _computed(self, now: float) -> None:
        """Resume the ranks whose computation on shared cores ends now."""
        assert self._cores is not None
        done = self._cores.finish(now)
        for task in done:
            self.ranks[task.rank].compute += now - task.start
            self._span(task.rank, "compute", task.name, task.start, now)
        for task in done:
            self._go_on(task.rank, now)
        self._tick()

    def _tick(self) -> None:
        assert self._cores is not None
        if (end := self._cores.next_end()) is not None:
            self._ticks += 1
            self._at(end, _Tick(self._ticks))

    def _blocks(self, rank: int, operation: Wait, now: float) -> bool:
        """Return whether the rank must wait, and register it to resume when the last transfer ends."""
        missing = [each for each in operation.transfers if each not in self._ended]
        state = self.ranks[rank]
        state.blocked, state.since = len(missing), now
        for each in missing:
            self._waiters.setdefault(each, []).append(rank)
        return bool(missing)

    def _begin(self, transfer: Transfer, now: float) -> None:
        begun = self._begun.get(transfer, 0) + 1
        self._begun[transfer] = begun
        if begun < len(transfer.parties):
            return
        if self._busy.isdisjoint(transfer.lines):
            self._start(transfer, now)
            return
        for line in transfer.lines:
            self._queues.setdefault(line, deque()).append(transfer)

    def _start(self, transfer: Transfer, now: float) -> None:
        self._busy.update(transfer.lines)
        self._started.add(transfer)
        end = now + transfer.seconds
        for party in transfer.parties:
            state = self.ranks[party]
            state.communication += max(0.0, end - max(now, state.under_way))
            state.under_way = max(state.under_way, end)
            state.owed += transfer.processor
            self._span(party, "comm", transfer.name, now, end)
        self._at(end, transfer)

    def _end(self, transfer: Transfer, now: float) -> None:
        self._ended.add(transfer)
        self._busy.difference_update(transfer.lines)
        for rank in self._waiters.pop(transfer, ()):
            self._unblock(rank, now, transfer)
        for line in transfer.lines:
            self._start_next(line, now)

    def _start_next(self, line: int, now: float) -> None:
        """Start the first transfer in the queue of `line` whose lines are all free."""
        queue = self._queues.get(line)
        if not queue or line in self._busy:
            return
        while queue and queue[0] in self._started:
            queue.popleft()
        for transfer in queue:
            if transfer not in self._started and self._busy.isdisjoint(transfer.lines):
                self._start(transfer, now)
                return

    def _unblock(self, rank: int, now: float, transfer: Transfer) -> None:
        state = self.ranks[rank]
        state.blocked -= 1
        if state.blocked:
            return
        waited = now - state.since
        state.waiting += waited
        state.owed = max(0.0, state.owed - waited)
        self._span(rank, "wait", transfer.name, state.since, now)
        self._at(now, rank)

    def _span(self, rank: int, stream: str, name: str, start: float, end: float) -> None:
        if self._record and end > start:
            self.spans.append(Span(rank, stream, name, start, end))
