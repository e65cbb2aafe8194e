"""Random problems of plain numbers, and what each equation of `integer_program` says of an assignment, written again.

Nothing here calls `Problem.step`, `Problem.broken` or what they call: these are oracles for them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

from splitc.passes.planner.problem import Move, Option, Place, Problem, Value

Assignment = Mapping[str, Option]

KINDS = (
    Option(0),
    Option(0, sync="late_multiply"),
    Option(0, reads="replicate", joins="replicate", makes="replicate", divides=-1),
    Option(0, "sharded", "columns", reads="divided", joins="features", makes="features", divides=0),
    Option(0, "sharded", "rows", reads="features", joins="replicate", makes="replicate", divides=1),
    Option(0, "sharded", "rows", reads="features", joins="batch", makes="batch", divides=1),
)
WANTED = (
    (("sync", frozenset({"late_multiply"})),),
    (("holding", frozenset({"sharded"})),),
    (("makes", frozenset({"features", "replicate"})), ("sync", frozenset({"late_multiply"}))),
)
STATES = ("batch", "features", "replicate", "divided")


# -- random problems ---------------------------------------------------------------------------------------------------


def random_problem(seed: int, most: int = 400) -> Problem:
    """A problem of at most so many assignments: chains, diamonds and other graphs, in one to three roles."""
    rng = random.Random(seed)
    ranks = rng.choice([(0,), (0, 0), (0, 1), (0, 1), (0, 0, 0), (0, 1, 1), (0, 1, 2), (0, 0, 2)])
    layers = [f"layer{k}" for k in range(rng.randint(2, 6))]
    wide = rng.uniform(0.0, 1.0)
    options = {layer: _options(rng, len(ranks)) for layer in layers}
    while math.prod(map(len, options.values())) > most:
        layer = max(layers, key=lambda each: (len(options[each]), rng.random()))
        options[layer] = tuple(rng.sample(options[layer], len(options[layer]) - 1))
    readers = _readers(rng, layers, wide)
    edges = [(i, j) for i, read in readers.items() if i is not None for j in dict.fromkeys(j for j, _ in read)]
    pairs = list(itertools.combinations(layers, 2))
    parameters = frozenset(layer for layer in layers if rng.random() < 0.8)
    fullest = sum(max(o.memory for o in each) for each in options.values())
    return Problem(
        options=options,
        values=tuple(
            Value(f"value{k}", layer, read, _moves(rng, len(ranks)))
            for k, (layer, read) in enumerate(readers.items())
            if read
        ),
        parameters=parameters,
        order=tuple(edges) if rng.random() < 0.9 else (),
        together=tuple(rng.sample(pairs, 1)) if rng.random() < 0.15 else (),
        tied=tuple(rng.sample(pairs, 1)) if rng.random() < 0.15 else (),
        ranks=ranks,
        memory=fullest * (rng.uniform(0.2, 0.8) if rng.random() < 0.5 else 2.0),
        filled=frozenset(range(len(ranks))) if rng.random() < 0.4 else frozenset(),
        wanted=rng.choice([(), (), (), *WANTED]),
        pieces=rng.randint(1, 4),
        overlap=rng.random() < 0.7,
        accumulate=rng.choice((1, 1, 3)),
    )


def random_chain(seed: int) -> Problem:
    """A chain of up to 30 layers in up to three roles of the same ranks, without overlap and with memory for all."""
    rng = random.Random(seed)
    roles = rng.randint(1, 3)
    layers = [f"layer{k}" for k in range(rng.randint(2, 30))]
    makers = [None, *layers[:-1]]
    return Problem(
        options={layer: _options(rng, roles) for layer in layers},
        values=tuple(
            Value(f"value{k}", maker, ((reader, rng.choice(("reads", "joins", "whole"))),), _moves(rng, roles, 0.0))
            for k, (maker, reader) in enumerate(zip(makers, layers, strict=True))
        ),
        parameters=frozenset(layers),
        order=tuple(itertools.pairwise(layers)),
        together=(),
        tied=(),
        ranks=(0,) * roles,
        memory=1e6,
        filled=frozenset(),
        overlap=False,
    )


def _options(rng: random.Random, roles: int) -> tuple[Option, ...]:
    found = []
    speed = [rng.choice((1.0, 1.0, 3.0)) for _ in range(roles)]  # of unequal devices
    for role in range(roles):
        for kind in rng.sample(KINDS, rng.randint(1, 3)):
            forward, backward, there, back, syncing = (rng.choice((0.0, 1.0)) * rng.random() for _ in range(5))
            found.append(
                replace(
                    kind,
                    role=role,
                    forward=speed[role] * forward,
                    backward=2 * speed[role] * backward,
                    there=there / 4,
                    back=back / 4,
                    syncing=2 * syncing,
                    updating=syncing / 3,
                    memory=rng.choice((0.0, 1.0, 1.0)) * rng.random(),
                )
            )
    return tuple(found)


def _readers(rng: random.Random, layers: list[str], wide: float) -> dict[str | None, tuple[tuple[str, str], ...]]:
    """Maker, None for an input -> who reads its value, and how; each layer reads at least one value."""
    found: dict[str | None, list[tuple[str, str]]] = {None: [], **{layer: [] for layer in layers}}
    for k, layer in enumerate(layers):
        before: list[str | None] = [None, *layers[:k]]
        for maker in {before[-1], *(each for each in before if rng.random() < wide / 2)}:
            found[maker] += [(layer, how) for how in rng.sample(("reads", "joins", "whole"), rng.choice((1, 1, 1, 2)))]
    return {maker: tuple(read) for maker, read in found.items()}


def _moves(rng: random.Random, roles: int, missing: float = 0.1) -> dict[tuple[Place, Place], Move]:
    places = [(role, state) for role in range(roles) for state in STATES]
    found = {}
    for s, t in itertools.product(places, places):
        if s == t and rng.random() < 0.9:
            found[s, t] = Move(0.0)
        elif rng.random() >= missing:
            memory = (0.2 * rng.random(), 0.2 * rng.random())
            found[s, t] = Move(rng.random(), rng.choice((0.0, 1.0)) * rng.random(), memory)
    return found


# -- the equations -----------------------------------------------------------------------------------------------------


def assignments(problem: Problem) -> Iterator[Assignment]:
    """All of them: equation (5)."""
    for each in itertools.product(*problem.options.values()):
        yield dict(zip(problem.options, each, strict=True))


def used_moves(problem: Problem, chosen: Assignment) -> list[tuple[Place, Place, Move | None]]:
    """The z of equation (7) that are 1: a value from where it is made to each place where someone reads it."""
    found = []
    for value in problem.values:
        maker = chosen.get(value.layer or "")
        start = (maker.role, maker.makes) if maker else (0, "batch")
        ends = set()
        for reader, how in value.readers:
            option = chosen[reader]
            state = option.reads if how == "reads" else option.joins
            if how == "whole" and state == "features":
                state = "replicate"
            ends.add((option.role, state))
        found += [(start, end, value.moves.get((start, end))) for end in sorted(ends)]
    return found


def step_seconds(problem: Problem, chosen: Assignment) -> float:
    """Equations (1) to (4)."""
    m, moves, classes = problem.pieces, used_moves(problem, chosen), set(problem.ranks)
    path = sum(o.forward + o.backward + o.there + o.back for o in chosen.values())
    path += sum(move.there + move.back for _, _, move in moves if move)
    load = 0.0
    for compute, travel in (("forward", "there"), ("backward", "back")):
        lines = []
        for where in classes:
            own = [o for o in chosen.values() if problem.ranks[o.role] == where]
            met = [mv for s, t, mv in moves if mv and where in (problem.ranks[s[0]], problem.ranks[t[0]])]
            lines.append(sum(getattr(o, compute) for o in own))
            lines.append(sum(getattr(each, travel) for each in (*own, *met)))
        load += max(lines)
    updating = sum(option.updating for option in chosen.values())
    exposed = sum(exposed_seconds(problem, chosen, where) for where in classes)
    return path / m + (1 - 1 / m) * load + (exposed + updating) / problem.accumulate


def exposed_seconds(problem: Problem, chosen: Assignment, where: int) -> float:
    """Equation (4) unrolled: for some k, the first k layers' syncs less what the first k - 1 compute in backward."""
    worst = sent = hidden = 0.0
    for option in (each for each in chosen.values() if problem.ranks[each.role] == where):
        sent += option.syncing
        worst = max(worst, sent - hidden)
        hidden += option.backward / problem.pieces if problem.overlap else 0.0
    return worst


def fullest_nbytes(problem: Problem, chosen: Assignment) -> float:
    """The left side of equation (11), on the class of ranks that needs most."""
    need = dict.fromkeys(problem.ranks, 0.0)
    for option in chosen.values():
        need[problem.ranks[option.role]] += option.memory
    for start, end, move in used_moves(problem, chosen):
        if move:
            need[problem.ranks[start[0]]] += move.memory[0]
            need[problem.ranks[end[0]]] += move.memory[1]
    return max(need.values())


def broken_equations(problem: Problem, chosen: Assignment) -> set[str]:
    """Which of equations (6) to (12) an assignment does not meet; (11) is not asked of moves that do not exist."""
    possible = all(move for _, _, move in used_moves(problem, chosen))
    meets = {
        "eq6": all(chosen[i].role <= chosen[j].role for i, j in problem.order),
        "eq7": possible,
        "eq8": all(chosen[i].role == chosen[j].role for i, j in problem.together),
        "eq9": all(chosen[i].way == chosen[j].way for i, j in problem.tied),
        "eq10": all(any(chosen[layer].role == role for layer in problem.parameters) for role in problem.filled),
        "eq11": not possible or fullest_nbytes(problem, chosen) <= problem.memory,
        "eq12": all(any(getattr(o, part) in words for o in chosen.values()) for part, words in problem.wanted),
    }
    return {name for name, holds in meets.items() if not holds}


def least_step(problem: Problem) -> float:
    """Seconds of the best of all assignments, infinite where none meets the equations."""
    allowed = (each for each in assignments(problem) if not broken_equations(problem, each))
    return min((step_seconds(problem, each) for each in allowed), default=math.inf)
