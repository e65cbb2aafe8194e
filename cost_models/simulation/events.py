"""Simulate ranks that compute and communicate, event by event, with all overlap that their programs allow.

Each rank executes its operations in order: it computes, begins a transfer and continues, or waits for transfers that it
began.  A transfer is ready once all its parties have begun it, and occupies its lines (the ports into and out of ranks)
for its whole duration.  A line carries one transfer at a time; among the ready transfers whose other lines are free,
the first to become ready starts first.  So n messages to one rank take n times as long as one, as in the closed form
(Stanza 4.1.1), and transfers on disjoint lines run at the same time.

A transfer may cost its parties processor time (`Transfer.processor`): then it and what they compute meanwhile slow
each other down (`work.speeds`), and it goes on as fast as its slowest party.  Where ranks share cores (`cores`), the
processor time prolongs the next computation instead, unless the rank is idle meanwhile.  Where neither is so, nothing
changes how long a rank computes, and it runs ahead of the clock until it waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import astuple
from itertools import pairwise
from typing import NamedTuple

from splitc.cost_models.simulation.cores import Cores
from splitc.cost_models.simulation.noise import Noise
from splitc.cost_models.simulation.operations import Begin, Compute, Operation, Transfer, Wait
from splitc.cost_models.simulation.work import Progress, Rank, Work, speeds
from splitc.runtime.transport.phases import Phases, Span


class _Ready(NamedTuple):
    """All parties have begun a transfer."""

    transfer: Transfer


class _Tick(NamedTuple):
    """The next completion on shared cores; stale once another task has started or ended."""

    number: int


class _Computed(NamedTuple):
    """The end of what a rank computes; stale if that has changed."""

    rank: int


_Event = Transfer | int | _Tick | _Ready | _Computed


class Simulation:
    """A completed simulation of `programs`, one for each rank.

    record: keep the span of every operation, for a trace.  cores: number of cores that all ranks share; None: one core
    for each rank.  laps: how often each program is run; a rank must have waited for all that it began when it ends.
    noise: of each rank, if computations vary.  units: how many ranks each one stands for, which share the cores too.

    Raises ValueError when a rank waits for a transfer that never begins.
    """

    def __init__(
        self,
        programs: Sequence[Sequence[Operation]],
        record: bool = False,
        cores: float | None = None,
        laps: int = 1,
        noise: Sequence[Noise] = (),
        units: int = 1,
    ) -> None:
        self.ranks = [Rank(program) for program in programs]
        self.spans: list[Span] = []
        self._record, self._laps, self._noise = record, laps, noise
        self._cores = None if cores is None else Cores(cores, units)
        self._events: list[tuple[float, int, float, int, int, _Event]] = []  # (time, order, since, turn, number, what)
        self._number = self._ticks = 0
        begun = {each.transfer: None for program in programs for each in program if isinstance(each, Begin)}
        self._progress = {transfer: Progress() for transfer in begun}
        self._runs_ahead = cores is None and not any(transfer.processor for transfer in begun)
        self._busy: set[int] = set()
        self._queues: dict[int, dict[Transfer, None]] = {}
        for rank in range(len(programs)):
            self._at(0.0, rank, 0.0)
        self._run()
        stuck = [rank for rank, state in enumerate(self.ranks) if state.blocked or state.laps < laps]
        if stuck:
            raise ValueError(f"ranks {stuck[:8]} wait for transfers that others never begin")

    def steps(self, rank: int) -> list[Phases]:
        """Return the phases of `rank` in each step, from mark to mark."""
        totals = [(0.0,) * 5, *(astuple(total)[1:] for total in self.ranks[rank].marks)]
        return [Phases(rank, *(b - a for a, b in zip(*pair, strict=True))) for pair in pairwise(totals)]

    def ends(self) -> list[float]:
        """Return the time at which the last rank reached each mark (s)."""
        marked = (rank.marks for rank in self.ranks if rank.operations)
        return [max(each.step for each in marks) for marks in zip(*marked, strict=True)]

    # -- inside --------------------------------------------------------------------------------------------------------

    def _at(self, time: float, what: _Event, since: float, turn: int | None = None) -> None:
        """Schedule an event at `time`: resume a rank, begin or end a transfer.

        At equal times transfers end first; the others follow as what led to them began, at `since`, in `turn`.
        """
        self._number += 1
        turn = self._number if turn is None else turn
        heapq.heappush(self._events, (time, not isinstance(what, Transfer), since, turn, self._number, what))

    def _run(self) -> None:
        while self._events:
            time, *_, what = heapq.heappop(self._events)
            if isinstance(what, int):
                self._go_on(what, time)
            elif isinstance(what, Transfer):
                if (work := self.ranks[what.parties[0]].flying.get(what)) and work.due == time:
                    self._end(what, work, time)
            elif isinstance(what, _Computed):
                if (work := self.ranks[what.rank].work) and work.due == time:
                    self._computed_alone(what.rank, work, time)
            elif isinstance(what, _Ready):
                self._offer(what.transfer, time)
            elif what.number == self._ticks:
                self._computed(time)

    def _go_on(self, rank: int, clock: float) -> None:
        self._number += 1
        state, now, since, turn = self.ranks[rank], clock, clock, self._number
        while state.laps < self._laps:
            if state.next == len(state.operations):
                state.next, state.laps = 0, state.laps + 1
                continue
            operation = state.operations[state.next]
            if isinstance(operation, Begin):
                state.sent += operation.nbytes
                self._begin(operation.transfer, (now, since, turn), clock)
            elif isinstance(operation, Compute):
                if self._noise:
                    operation = Compute(operation.name, operation.seconds + self._noise[rank].of(operation.seconds))
                if not self._runs_ahead:
                    state.next += 1
                    self._compute(rank, operation, now)
                    return
                state.compute += operation.seconds
                self._span(rank, "compute", operation.name, now, now + operation.seconds)
                now, since = now + operation.seconds, now
            elif now > clock:  # what has ended by then is not known yet
                self._at(now, rank, since, turn)
                return
            elif isinstance(operation, Wait):
                if self._blocks(rank, operation, now):
                    state.next += 1
                    return
            elif state.owed:  # the processor time of a step's transfers is part of the step
                self._compute(rank, Compute("transfers", 0.0), now)
                return
            else:
                communication = state.communication + (now - state.under_way if state.flying else 0.0)
                state.marks.append(Phases(rank, now, state.compute, state.waiting, communication, state.sent))
            state.next += 1

    def _compute(self, rank: int, operation: Compute, now: float) -> None:
        state = self.ranks[rank]
        if self._cores is not None:
            seconds, state.owed = operation.seconds + state.owed, 0.0
            self._cores.add(rank, operation.name, seconds, now)
            self._tick(now)
            return
        state.work = Work(operation, now, operation.seconds, now)
        self._share(rank, now)

    def _computed_alone(self, rank: int, work: Work, now: float) -> None:
        state = self.ranks[rank]
        state.compute += now - work.start
        self._span(rank, "compute", work.what.name, work.start, now)
        state.work = None
        self._share(rank, now)
        self._go_on(rank, now)

    def _share(self, rank: int, now: float) -> None:
        """Divide a rank's core anew between its computing and its transfers."""
        state, pace = self.ranks[rank], 1.0
        if state.work is not None:
            speed, pace = speeds(state.flying)
            if state.work.pace(speed, now):
                self._at(state.work.due, _Computed(rank), now)
        if pace != state.pace:
            state.pace = pace
            for transfer, work in state.flying.items():
                self._fly(transfer, work, now)

    def _fly(self, transfer: Transfer, work: Work, now: float) -> None:
        """Let a transfer go on as fast as the slowest of its parties."""
        if work.pace(min(self.ranks[party].pace for party in transfer.parties), now):
            self._at(work.due, transfer, now)

    def _computed(self, now: float) -> None:
        """Resume the ranks whose computation on shared cores ends now."""
        assert self._cores is not None
        done = self._cores.finish(now)
        for task in done:
            self.ranks[task.rank].compute += now - task.start
            self._span(task.rank, "compute", task.name, task.start, now)
        for task in done:
            self._go_on(task.rank, now)
        self._tick(now)

    def _tick(self, now: float) -> None:
        assert self._cores is not None
        if (end := self._cores.next_end()) is not None:
            self._ticks += 1
            self._at(end, _Tick(self._ticks), now)

    def _blocks(self, rank: int, operation: Wait, now: float) -> bool:
        """Return whether the rank must wait, and register it to resume when the last transfer ends."""
        state = self.ranks[rank]
        found = (self._progress[transfer] for transfer in operation.transfers)
        missing = [each for each in found if each.ended <= state.laps]
        state.blocked, state.since = len(missing), now
        for each in missing:
            each.waiters.append(rank)
        return bool(missing)

    def _begin(self, transfer: Transfer, now: tuple[float, float, int], clock: float) -> None:
        progress = self._progress[transfer]
        progress.begun += 1
        progress.ready = max(progress.ready, now)
        if progress.begun == len(transfer.parties):
            progress.begun = 0
            time, since, turn = progress.ready
            if time > clock:
                self._at(time, _Ready(transfer), since, turn)
            else:
                self._offer(transfer, clock)

    def _offer(self, transfer: Transfer, now: float) -> None:
        """Start a transfer if its lines are free, else queue it for them."""
        if self._busy.isdisjoint(transfer.lines):
            self._start(transfer, now)
            return
        for line in transfer.lines:
            self._queues.setdefault(line, {})[transfer] = None

    def _start(self, transfer: Transfer, now: float) -> None:
        self._busy.update(transfer.lines)
        work = Work(transfer, now, transfer.seconds, now)
        for party in transfer.parties:
            state = self.ranks[party]
            state.under_way = state.under_way if state.flying else now
            state.flying[transfer] = work
            if self._cores is not None:
                state.owed += transfer.processor
            elif transfer.processor:
                self._share(party, now)
        self._fly(transfer, work, now)

    def _end(self, transfer: Transfer, work: Work, now: float) -> None:
        progress = self._progress[transfer]
        for party in transfer.parties:
            state = self.ranks[party]
            del state.flying[transfer]
            state.communication += 0.0 if state.flying else now - state.under_way
            self._span(party, "comm", transfer.name, work.start, now)
            if self._cores is None and transfer.processor:
                self._share(party, now)
        progress.ended += 1
        waiters, progress.waiters = progress.waiters, []
        self._busy.difference_update(transfer.lines)
        for rank in waiters:
            self._unblock(rank, now, transfer)
        for line in transfer.lines:
            if line in self._queues:
                self._start_next(line, now)

    def _start_next(self, line: int, now: float) -> None:
        """Start the first transfer in the queue of `line` whose lines are all free."""
        if line in self._busy:
            return
        for transfer in self._queues[line]:
            if self._busy.isdisjoint(transfer.lines):
                for each in transfer.lines:
                    del self._queues[each][transfer]
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
        self._at(now, rank, now)

    def _span(self, rank: int, stream: str, name: str, start: float, end: float) -> None:
        if self._record and end > start:
            self.spans.append(Span(rank, stream, name, start, end))
