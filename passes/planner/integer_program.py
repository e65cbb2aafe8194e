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
    x[i, divided by d] = x[j, divided by d]         i and j share a parameter; d: `Option.divides`   (9)
    every role has a layer with parameters                                                          (10)
    sum memory x + sum memory z <= memory           on each class of ranks                          (11)
    some layer has what the strategy is for                                                         (12)

(1) is the time of m pieces through a pipeline whose slowest part has `load` to do; with m = 1 it is the sum of all that
a step does one after the other.  (4) is the rule of overlap: two transfers cannot hide under the same computing, so
what is left to send when the backward of layer i ends is what was left before, less that backward, and its own
gradient; and what a class has left when it ends delays the gradients that it sends to the one before.
`Problem.step` and `Problem.broken` are these equations for a given assignment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from splitc.passes.planner.problem import Option, Place, Problem, Value, need_of, places
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
    known = problem.step(start).total if start is not None else math.inf
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
    best = min((each for each in (start, found) if each), key=lambda each: problem.step(each).total, default=None)
    if best is None:
        return Answer(None, math.inf, least, proved=False)
    reached = problem.step(best).total
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


class _Program:
    """The program, in units of 1 / `scale` seconds."""

    def __init__(self, problem: Problem, scale: float, limit: float, memory_first: bool = False) -> None:
        self.problem, self.model, self._scale = problem, Model("place_layers"), scale
        self._names = {
            (layer, k): f"x[{layer},{k}]" for layer, options in problem.options.items() for k in range(len(options))
        }
        self._x = {key: self.model.binary(name) for key, name in self._names.items()}
        self._z: list[tuple[Place, Place, Value, Expression]] = []
        self._each_layer_once()
        self._roles()
        self._moves()
        self._tied()
        memory = self._memory(memory_first)
        if memory_first:
            self.model.minimise(memory)
        else:
            self._seconds(limit)

    def chosen(self, values: Mapping[str, float]) -> Assignment:
        """The assignment that the solver's values stand for."""
        return {
            layer: max(zip(options, range(len(options)), strict=True), key=lambda o: values[self._names[layer, o[1]]])[
                0
            ]
            for layer, options in self.problem.options.items()
        }

    def _sum(self, layer: str, of: object) -> Expression:
        """The sum of x over the options of a layer that `of` holds for."""
        options = self.problem.options[layer]
        assert callable(of)
        return total(self._x[layer, k] for k, option in enumerate(options) if of(option))

    def _each_layer_once(self) -> None:
        for layer, options in self.problem.options.items():
            self.model.require(total(self._x[layer, k] for k in range(len(options))) == 1, f"eq5_{layer}")

    def _roles(self) -> None:
        problem = self.problem
        later = range(1, len(problem.ranks))
        for name, pairs, same in (("eq6", problem.order, False), ("eq8", problem.together, True)):
            for i, j in dict.fromkeys(pairs):
                for role in later:
                    a, b = (self._sum(layer, lambda o, r=role: o.role >= r) for layer in (i, j))
                    self.model.require(a == b if same else a <= b, f"{name}_{i}_to_{j}_{role}")
        for role in sorted(problem.filled):
            owners = [self._sum(layer, lambda o, r=role: o.role == r) for layer in sorted(problem.parameters)]
            self.model.require(total(owners) >= 1, f"eq10_{role}")
        for part, words in problem.wanted:
            having = [self._sum(layer, lambda o, p=part, w=words: getattr(o, p) in w) for layer in problem.options]
            self.model.require(total(having) >= 1, f"eq12_{part}")

    def _moves(self) -> None:
        for value in self.problem.values:
            made = ((0, "batch"),) if value.layer is None else places(self.problem.options[value.layer])
            needs = {need: None for reader, how in value.readers for need in places(self.problem.options[reader], how)}
            into: dict[Place, list[Expression]] = {need: [] for need in needs}
            for s in made:
                out = []
                for t in needs:
                    if (s, t) in value.moves:
                        z = self.model.real(f"z[{value.name},{s},{t}]", 1)
                        self._z.append((s, t, value, z))
                        out.append(z)
                        into[t].append(z)
                self._leaves(value, s, out)
            for reader, how in value.readers:
                for t in places(self.problem.options[reader], how):
                    reads = self._sum(reader, lambda o, h=how, need=t: need_of(o, h) == need)
                    self.model.require(total(into[t]) >= reads, f"eq7_{value.name}_{reader}_{how}_{t}")

    def _leaves(self, value: Value, s: Place, out: list[Expression]) -> None:
        """The second part of (7); a single reader needs one place only."""
        makes = 1 if value.layer is None else self._sum(value.layer, lambda o: (o.role, o.makes) == s)
        alone = len(value.readers) == 1
        for k, z in enumerate([total(out)] if alone else out):
            self.model.require(z <= makes, f"eq7_{value.name}_from_{s}_{k}")

    def _tied(self) -> None:
        for i, j in dict.fromkeys(self.problem.tied):
            dims = {o.divides for layer in (i, j) for o in self.problem.options[layer]} - {None}
            for dim in sorted(dims, key=str):
                a, b = (self._sum(layer, lambda o, d=dim: o.divides == d) for layer in (i, j))
                self.model.require(a == b, f"eq9_{i}_{j}_{dim}")

    def _memory(self, free: bool) -> Expression:
        """Equation (11), in thousandths of what a rank has."""
        unit = 1e3 / self.problem.memory
        limit = self.model.real("memory") if free else 1e3
        for where in self.problem.classes:
            need = [
                unit * option.memory * self._x[layer, k]
                for layer, options in self.problem.options.items()
                for k, option in enumerate(options)
                if self.problem.ranks[option.role] == where
            ]
            for s, t, value, z in self._z:
                for (role, _), nbytes in zip((s, t), value.moves[s, t].memory, strict=True):
                    if self.problem.ranks[role] == where and nbytes:
                        need.append(unit * nbytes * z)
            self.model.require(total(need) <= limit, f"eq11_{where}")
        return limit

    def _seconds(self, limit: float) -> None:
        """Equations (1) to (4)."""
        model, problem, m = self.model, self.problem, self.problem.microbatches
        seconds = model.real("seconds")
        path = [
            self._scale * (option.computing + option.moving) * self._x[layer, k]
            for layer, options in problem.options.items()
            for k, option in enumerate(options)
        ]
        path += [self._scale * value.moves[s, t].seconds * z for s, t, value, z in self._z]
        load = total(self._load(direction) for direction in ("forward", "backward")) if m > 1 else 0
        exposed = [self._left(where) for where in problem.classes]
        exposed += [
            self._scale * option.updating * self._x[layer, k]
            for layer, options in problem.options.items()
            for k, option in enumerate(options)
            if option.updating
        ]
        step = 1 / m * total(path) + (1 - 1 / m) * load + 1 / problem.accumulate * total(exposed)
        model.require(step <= seconds, "eq1_eq2")
        if math.isfinite(limit):
            model.require(seconds <= self._scale * limit * (1 + 1e-6), "eq1_limit")
        model.minimise(seconds)

    def _load(self, direction: str) -> Expression:
        """Equation (3) of one direction."""
        problem, load = self.problem, self.model.real(f"load[{direction}]")
        moves = "there" if direction == "forward" else "back"
        for where in problem.classes:
            own = [
                (option, self._x[layer, k])
                for layer, options in problem.options.items()
                for k, option in enumerate(options)
                if problem.ranks[option.role] == where
            ]
            moved = [
                (v.moves[s, t], z) for s, t, v, z in self._z if where in (problem.ranks[s[0]], problem.ranks[t[0]])
            ]
            for name, terms in (
                ("computing", [(getattr(o, direction), x) for o, x in own]),
                ("moving", [(getattr(o, moves), x) for o, x in (*own, *moved)]),
            ):
                self.model.require(
                    total(self._scale * seconds * x for seconds, x in terms if seconds) <= load,
                    f"eq3_{direction}_{name}_{where}",
                )
        return load

    def _left(self, where: int) -> Expression:
        """Equation (4) of a class of ranks: what its syncs expose."""
        problem, left = self.problem, None
        for layer in reversed(list(problem.options)):
            own = [
                (o, self._x[layer, k]) for k, o in enumerate(problem.options[layer]) if problem.ranks[o.role] == where
            ]
            sends = any(o.syncing for o, _ in own)
            if not (sends or left is not None):
                continue
            syncing = total(self._scale * o.syncing * x for o, x in own)
            hidden = self._scale / problem.microbatches if problem.overlap else 0.0
            before, left = left, self.model.real(f"left[{where},{layer}]")
            if before is not None:
                computing = total(hidden * o.backward * x for o, x in own)
                self.model.require(before - computing + syncing <= left, f"eq4_{where}_{layer}")
            if sends:
                self.model.require(syncing <= left, f"eq4_own_{where}_{layer}")
        return 0 if left is None else left
