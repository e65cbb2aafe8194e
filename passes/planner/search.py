"""Search the divisions of a strategy: numbers, a first assignment and a bound for each, then integer programs.

The first assignment of a division comes from a walk over the layers in graph order, which knows what every option costs
after every other one (exact for chains in one role whose syncs do not overlap).  The integer program is solved for the
divisions that could still be among the best, the most promising first.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from splitc.passes.planner.contract import contract
from splitc.passes.planner.cuts import CutRules
from splitc.passes.planner.divisions import Division, Role
from splitc.passes.planner.integer_program import Assignment, least_memory, solve
from splitc.passes.planner.options import Space, make_problem
from splitc.passes.planner.problem import Move, Option, Place, Problem, need_of
from splitc.passes.planner.request import Request

SOLVED = 24
"""Divisions whose integer program is solved; others keep their first assignment, and their bound."""

THOROUGH = 12_000
"""Options of all solved divisions, up to which more of them are solved, so that small models are proved."""

HUGE = 1_000
"""Options of a division from which its integer program takes minutes: it is solved where nothing else is known."""

NEAR = 0.9
"""Part of the best rate that a division must be able to reach to be of interest: the simulation prices differently."""


@dataclass(frozen=True)
class Found:
    """The best assignment of a division.  seconds: of a step by the program."""

    division: Division
    problem: Problem
    chosen: Assignment
    seconds: float

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.division.global_batch / self.seconds if self.seconds else math.inf


@dataclass(frozen=True)
class Search:
    """The best assignments of several divisions, the fastest first.

    bound: samples per second that no plan exceeds; proved: the first one reaches it.  fullest: where nothing fits, the
    assignment that needs least memory.
    """

    found: tuple[Found, ...]
    bound: float
    proved: bool
    fullest: Found | None = None


class _Case:
    """A division with its numbers, its bound (samples per second), and the best assignment so far."""

    def __init__(self, division: Division, problem: Problem) -> None:
        self.division, self.problem, self.small = division, problem, contract(problem)
        self.bound = self._rate(problem.least_seconds())
        self.found: Found | None = None
        self._start = None if problem.fullness > 1 else first_assignment(self.small.problem)
        self._take(self._start)

    @property
    def promise(self) -> float:
        return self.found.rate if self.found is not None else self.bound

    @property
    def options(self) -> int:
        """Of all layers, or of what stands for them."""
        return sum(map(len, self.small.problem.options.values()))

    def solve(self, seconds: float, best: float) -> None:
        """Solve the integer program, of assignments that are near `best` samples per second."""
        relevant = self.division.global_batch / (NEAR * best) if best else math.inf
        answer = solve(self.small.problem, seconds, self._start if self.found is not None else None, relevant)
        if self.small.problem is self.problem:  # else it bounds a part of the assignments only
            self.bound = self._rate(answer.bound)
        self._take(answer.chosen)

    def _rate(self, seconds: float) -> float:
        return self.division.global_batch / seconds if seconds else math.inf

    def _take(self, chosen: Assignment | None) -> None:
        """Keep an assignment of the small problem where it is the best one and breaks no equation of the whole."""
        whole = None if chosen is None else self.small.expanded(chosen)
        if whole is None or (self.small.problem is not self.problem and self.problem.broken(whole)):
            return
        found = Found(self.division, self.problem, whole, self.problem.seconds(whole))
        if self.found is None or found.seconds < self.found.seconds:
            self.found = found


def search(request: Request, rules: CutRules, divided: Iterable[Division], space: Space, part: float = 1.0) -> Search:
    """The best assignments of `divided` in a space, of those that a part of the time left allows to look at."""
    now = time.monotonic()
    deadline = now + part * max(0.0, request.deadline - now)
    cases: list[_Case] = []
    at_once: dict[tuple[Role, ...], Problem] = {}
    best, bound = 0.0, 0.0
    for division in sorted(divided, key=lambda each: each.order.pieces):
        if (before := at_once.get(division.roles)) is not None:  # pieces of a batch take no less than all at once
            least = replace(before, pieces=division.order.pieces).least_seconds()
            if division.global_batch <= NEAR * best * least:
                bound = max(bound, division.global_batch / least)
                continue
        if best and time.monotonic() > deadline:
            bound = max(bound, _most(request, division))
            continue
        problem = make_problem(request, rules, division, space)
        if not all(problem.options.values()):
            continue
        at_once.setdefault(division.roles, problem)
        cases.append(_Case(division, problem))
        best = max(best, cases[-1].found.rate if cases[-1].found is not None else 0.0)
    most = max(SOLVED, THOROUGH // max((case.options for case in cases), default=1))
    solved = 0
    for case in sorted(cases, key=lambda each: (each.found is not None, each.promise), reverse=True):
        left = deadline - time.monotonic()
        possible = left > 0 and case.options < HUGE
        if case.bound > NEAR * best and solved < most and (possible or not best):
            case.solve(max(left, 1.0), best)
            solved += 1
            best = max(best, case.found.rate if case.found is not None else 0.0)
    ordered = sorted((each.found for each in cases if each.found is not None), key=lambda f: f.rate, reverse=True)
    bound = max([bound, *(each.bound for each in cases)])
    proved = bool(ordered) and bound <= ordered[0].rate * (1 + 1e-6)
    fullest = None if ordered or len(cases) > SOLVED else _fullest(cases, deadline)
    return Search(tuple(ordered), bound, proved, fullest)


def _most(request: Request, division: Division) -> float:
    """Samples per second where all ranks share the computing of a step and nothing is sent; infinite if some differ."""
    batch, busy = division.global_batch, division.busy
    alone = sum(request.seconds(layer.name, batch, busy) for layer in request.program.layers)
    return batch * busy / alone if alone and not request.cluster.unlike else math.inf


def _fullest(cases: list[_Case], deadline: float) -> Found | None:
    """The assignment that needs least memory, whether it fits or not."""
    best: tuple[float, Found] | None = None
    for case in sorted(cases, key=lambda each: each.problem.fullness):
        if best is not None and case.problem.fullness > best[0]:
            break
        problem, chosen = case.problem, least_memory(case.problem, max(deadline - time.monotonic(), 1.0))
        if chosen is not None and not set(problem.broken(chosen)) - {"eq11"}:
            need = max(problem.memory_of(chosen).values()) / problem.memory
            if best is None or need < best[0]:
                best = need, Found(case.division, problem, chosen, problem.seconds(chosen))
    return None if best is None else best[1]


# -- a first assignment ------------------------------------------------------------------------------------------------

_WEIGHTS = ((1.0, 0.0), (0.3, 0.0), (0.0, 0.0), (1.0, 0.1), (1.0, 1.0), (1.0, 10.0))
"""What a second of sync, and a whole memory, count for in a walk (s, s)."""


def first_assignment(problem: Problem) -> Assignment | None:
    """The best of a few walks that breaks no equation; None where all do."""
    best: tuple[float, Assignment] | None = None
    kinds, ways, tried = kinds_of(problem), cache(_ways), set[tuple[int, ...]]()
    for syncing, memory in _WEIGHTS:
        if memory and best is not None:
            break
        chosen = _walk(problem, kinds, ways, syncing, memory)
        if chosen is None or (same := tuple(map(id, chosen.values()))) in tried:
            continue
        tried.add(same)
        if problem.broken(chosen):
            continue
        seconds = problem.seconds(chosen)
        if best is None or seconds < best[0]:
            best = seconds, chosen
    return None if best is None else best[1]


@dataclass(frozen=True, eq=False)
class _Kind:
    """What a walk reads of a layer, and of all that are like it: its options, and what moves before it runs.

    reads: the moves of what it reads, and how it reads it.  crossing: see `_crossing`.
    """

    options: tuple[Option, ...]
    reads: tuple[tuple[Mapping[tuple[Place, Place], Move], str], ...]
    crossing: Mapping[tuple[int, int], float]

    def moving(self, place: Place, option: Option) -> float:
        """Seconds to move what the layer reads from `place`, and on to another role all that lives."""
        if place[0] != option.role:
            return self.crossing.get((place[0], option.role), 0.0)
        seconds = 0.0
        for moves, how in self.reads:
            move = moves.get((place, need_of(option, how)))
            seconds += move.seconds if move is not None else 0.0
        return seconds


_Ways = Callable[[_Kind, tuple[Place, ...]], list[tuple[Option, Place, list[tuple[Place, float]]]]]


def _ways(kind: _Kind, before: tuple[Place, ...]) -> list[tuple[Option, Place, list[tuple[Place, float]]]]:
    """The options of a layer: where each makes its result, and the seconds from every place before it."""
    moved = [[(p, kind.moving(p, o)) for p in before if 0 <= o.role - p[0] <= 1] for o in kind.options]
    return [(o, (o.role, o.makes), each) for o, each in zip(kind.options, moved, strict=True)]


def kinds_of(problem: Problem) -> list[_Kind]:
    """The kind of each layer, the same object for those that are alike."""
    reads: dict[str, list[tuple[Mapping[tuple[Place, Place], Move], str]]] = {name: [] for name in problem.options}
    for value in problem.values:
        for reader, how in value.readers:
            reads[reader].append((value.moves, how))
    known: dict[object, _Kind] = {}
    found = []
    for layer, crossing in _crossing(problem).items():
        options, own = problem.options[layer], reads[layer]
        key = tuple(map(id, options)), tuple((id(moves), how) for moves, how in own), tuple(crossing.items())
        found.append(known.setdefault(key, _Kind(options, tuple(own), crossing)))
    return found


def _crossing(problem: Problem) -> dict[str, dict[tuple[int, int], float]]:
    """Layer -> (role before it, role of it) -> seconds to move all values that live across the boundary before it."""
    position = {layer: k for k, layer in enumerate(problem.options)}
    names = list(problem.options)
    found: dict[str, dict[tuple[int, int], float]] = {layer: defaultdict(float) for layer in names}
    for value in problem.values:
        least: dict[tuple[int, int], float] = {}
        for (s, t), move in value.moves.items():
            if s[0] != t[0]:
                pair = s[0], t[0]
                least[pair] = min(least.get(pair, math.inf), move.seconds)
        first = -1 if value.layer is None else position[value.layer]
        last = max((position[reader] for reader, _ in value.readers), default=first)
        for k in range(first + 1, last + 1):
            for pair, seconds in least.items():
                found[names[k]][pair] += seconds
    return found


def _walk(problem: Problem, kinds: list[_Kind], ways: _Ways, syncing: float, memory: float) -> Assignment | None:
    """Dynamic programming over the layers in graph order; between two of them, the place of the first one's result."""

    def own(option: Option) -> float:
        seconds = option.computing + option.moving + option.updating
        return seconds + (syncing * option.syncing + memory * option.memory / problem.memory)

    alone = {kind: list(map(own, kind.options)) for kind in dict.fromkeys(kinds)}
    last = len(problem.ranks) - 1 if problem.filled else 0
    best: dict[Place, tuple[float, int]] = {(0, "batch"): (0.0, -1)}  # place -> seconds, link to how it came about
    links: list[tuple[int, Option]] = []
    for kind in kinds:
        after: dict[Place, tuple[float, int]] = {}
        for seconds_alone, (option, makes, moved) in zip(alone[kind], ways(kind, tuple(best)), strict=True):
            least, link = math.inf, -1
            for place, moving in moved:
                seconds, before = best[place]
                if (total := seconds + seconds_alone + moving) < least:
                    least, link = total, before
            if least < math.inf and (makes not in after or least < after[makes][0]):
                links.append((link, option))
                after[makes] = least, len(links) - 1
        best = after
        if not best:
            return None
    ends = [end for (role, _), end in best.items() if role >= last]
    if not ends:
        return None
    chosen, link = [], min(ends)[1]
    while link >= 0:
        link, option = links[link]
        chosen.append(option)
    return dict(zip(problem.options, reversed(chosen), strict=True))
