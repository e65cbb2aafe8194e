"""The best option for every layer, for one division of the world into roles, groups and microbatches.

Plain numbers in, plain numbers out.  x[i,o]: layer i runs by option o.  z[v,s,t]: value v, made in place s, is moved to
place t, once however many layers read it there.  m: microbatches.  a: batches to an update.

    minimise  path / m + (1 - 1/m) load + exposed                                                    (1)

    path  = sum (forward + backward + moving)[i,o] x[i,o] + sum seconds[v,s,t] z[v,s,t]              (2)
    load = load[forward] + load[backward];  each >= the computing, and the transfers, of each class  (3)
    left[c,i] >= left[c,i+1] - backward[c,i] / m + syncing[c,i];  left >= syncing;
    exposed = (sum_c left[c,1] + sum updating[i,o] x[i,o]) / a     over the layers i of each class c (4)
    sum_o x[i,o] = 1                                                                                 (5)
    role[i] <= role[j]                              along every edge i -> j                          (6)
    sum_s z[v,s,t] >= x of a reader that needs t;  z[v,s,t] <= x of its maker that makes s           (7)
    role[i] = role[j]                               i and j cannot be parted                         (8)
    x[i, in way w] = x[j, in way w]                 i and j share a parameter; w: `Option.way`       (9)
    every role has a layer with parameters                                                          (10)
    sum memory x + sum memory z <= memory           on each class of ranks                          (11)
    some layer has what the strategy is for                                                         (12)

(1) is the time of m pieces through a pipeline whose slowest part has `load` to do; with m = 1 it is the sum of all that
a step does one after the other.  (4) is the rule of overlap: two transfers cannot hide under the same computing, so
what is left to send when the backward of layer i ends is what was left before, less that backward, and its own
gradient; and what a class has left when it ends delays the gradients that it sends to the one before.
`Equations` has (1) to (4), (6) and (8) to (12) once, for a program and for a given assignment.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from splitc.passes.planner.problem import Equations, Option, Place, Problem, Value, need_of
from splitc.passes.planner.solver import Expression, Model, total

Assignment = Mapping[str, Option]


@dataclass(frozen=True)
class Answer:
    """The best assignment found, None without one.  bound: seconds; no assignment is faster.  proved: none is."""

    chosen: Assignment | None
    seconds: float
    bound: float
    proved: bool


def solve(problem: Problem, seconds: float, start: Assignment | None = None, relevant: float = math.inf) -> Answer:
    """The fastest assignment, or the best that `seconds` of search allow; never one that breaks an equation.

    start: one that is known.  relevant: seconds of a step above which an assignment is of no interest.
    """
    if problem.fullness > 1:
        return Answer(None, math.inf, relevant, proved=relevant == math.inf)
    known = problem.seconds(start) if start is not None else math.inf
    scale = 1e4 / min(known, relevant, _largest(problem))
    program = _Program(problem, scale, min(known, relevant))
    solution = program.model.solve(seconds)
    least = problem.least_seconds()
    if solution.status == "infeasible":  # nothing is faster than what is known
        reached = min(known, relevant)
        return Answer(start, known, reached, proved=known <= reached)
    least = max(least, solution.bound / scale)
    found = program.chosen(solution.values) if solution.values else None
    if found is not None and problem.broken(found):
        found = None
    best = min((each for each in (start, found) if each), key=lambda each: problem.seconds(each), default=None)
    if best is None:
        return Answer(None, math.inf, least, proved=False)
    reached = problem.seconds(best)
    proved = solution.status == "optimal" and found is not None
    return Answer(best, reached, reached if proved else min(least, reached), proved)


def least_memory(problem: Problem, seconds: float) -> Assignment | None:
    """The assignment that meets all but the memory and whose fullest rank needs least of it."""
    program = _Program(problem, 1.0, math.inf, memory_first=True)
    solution = program.model.solve(seconds)
    return program.chosen(solution.values) if solution.values else None


def _largest(problem: Problem) -> float:
    """Seconds that no step needs to exceed."""
    every = problem.options.values()
    layers = sum(max(o.computing + o.moving + o.syncing + o.updating for o in options) for options in every)
    return layers + sum(max((m.seconds for m in v.moves.values()), default=0.0) for v in problem.values) or 1.0


class _Program(Equations):
    """The program, with x and z of a model, in units of 1 / `scale` seconds."""

    def __init__(self, problem: Problem, scale: float, limit: float, memory_first: bool = False) -> None:
        self.model = Model("place_layers")
        self._names = {
            layer: [f"x[{layer},{k}]" for k in range(len(options))] for layer, options in problem.options.items()
        }
        runs = {
            layer: [(o, self.model.binary(name)) for o, name in zip(options, self._names[layer], strict=True)]
            for layer, options in problem.options.items()
        }
        moved: list[tuple[Value, Place, Place, Expression]] = []
        super().__init__(problem, runs, moved, scale)
        for layer, options in runs.items():
            self.model.require(total((1, x) for _, x in options) == 1, f"eq5_{layer}")
        for name, rule in self.rules():
            self.model.require(rule, name)
        for value in problem.values:
            moved += self._moves(value)
        thousandths = 1e3 / problem.memory
        most = self.model.real("memory") if memory_first else 1e3
        for where in problem.classes:
            self.model.require(thousandths * self.memory(where) <= most, f"eq11_{where}")
        if not memory_first:
            most = self.model.real("seconds")
            self.model.require(self.step() <= most, "eq1_eq2")
            if math.isfinite(limit):
                self.model.require(most <= scale * limit * (1 + 1e-6), "eq1_limit")
        self.model.minimise(most)

    def total(self, terms: Iterable[tuple[float, Expression]]) -> Expression:
        return total(terms)

    def highest(self, name: str, terms: Iterable[Expression]) -> Expression:
        most = self.model.real(name)
        for k, term in enumerate(terms):
            self.model.require(term <= most, f"eq3_eq4_{name}_{k}")
        return most

    def chosen(self, values: Mapping[str, float]) -> Assignment:
        """The assignment that the solver's values stand for."""
        return {
            layer: options[max(range(len(options)), key=lambda k: values[self._names[layer][k]])]
            for layer, options in self.problem.options.items()
        }

    def _by_place(self, layer: str, how: str = "makes") -> dict[Place, list[tuple[int, Expression]]]:
        """Place -> the options of a layer that make its value there, or need one that they read in some way."""
        found: dict[Place, list[tuple[int, Expression]]] = defaultdict(list)
        for o, x in self.runs[layer]:
            found[(o.role, o.makes) if how == "makes" else need_of(o, how)].append((1, x))
        return found

    def _moves(self, value: Value) -> Iterator[tuple[Value, Place, Place, Expression]]:
        """Yield a value's moves, each with its z, and require (7)."""
        made = self._by_place(value.layer) if value.layer is not None else {(0, "batch"): []}
        read = {(reader, how): self._by_place(reader, how) for reader, how in value.readers}
        into: dict[Place, list[tuple[int, Expression]]] = {need: [] for each in read.values() for need in each}
        for s, makers in made.items():
            out = []
            for t, ways in into.items():
                if (s, t) in value.moves:
                    out.append(z := self.model.real(f"z[{value.name},{s},{t}]", 1))
                    ways.append((1, z))
                    yield value, s, t, z
            makes = 1 if value.layer is None else total(makers)
            for k, z in enumerate(
                [total((1, z) for z in out)] if len(value.readers) == 1 else out
            ):  # which needs one place only
                self.model.require(z <= makes, f"eq7_{value.name}_from_{s}_{k}")
        for (reader, how), needs in read.items():
            for t, readers in needs.items():
                self.model.require(total(into[t]) >= total(readers), f"eq7_{value.name}_{reader}_{how}_{t}")
