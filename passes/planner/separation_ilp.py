"""Which layers the fc ranks run, for one division of the world into n_c conv and n_f fc ranks.

Plain numbers in, plain numbers out: this file knows no graph and no torch.

    minimise  compute + exchange + sync                                                    (1)

    compute  = sum_i conv_seconds[i] (1 - fc[i]) + fc_seconds[i] fc[i]                     (2)
    exchange = sum_v seconds[v] cross[v]            there, and the gradient back           (3)
    sync    >= conv_sync(sum_i gradient[i] (1 - fc[i]))     both run at the same time      (4)
    sync    >= fc_sync(sum_i gradient[i] fc[i])                                            (5)
    fc[i]   <= fc[j]                                along every edge i -> j                (6)
    cross[v] >= fc[j] - fc[i]                       value v of i, its readers j            (7)
    fc[i]    = fc[j]                                i and j cannot be parted               (8)
    1 <= sum_i fc[i] <= layers with parameters - 1  over the layers with parameters        (9)
    sum_i memory[i] + sum_v memory[v] cross[v] <= memory    on a conv and on an fc rank   (10)
                                                            (both sums where they are one)
    fc[i]    = 0 or 1                               where only one role is allowed        (11)

(2) to (5) are the terms of Stanza's equation (3), layer by layer and with its overlap of the two
all-reduces (4.1.3); a reduction of nothing takes no time.  An input of the step is a value of a
layer that is always conv.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from splitc.passes.planner.separation import LayerNumbers, Separation
from splitc.passes.planner.solver import Expression, Model, Solution, total

_ROUNDING = 1e-9  # of sums of seconds in another order


@dataclass(frozen=True)
class Assignment:
    """The best assignment found: the layers that are fc, None when there is none.

    status: as of `Solution`.  bound: seconds; no assignment is faster.
    """

    status: str
    fc: frozenset[str] | None
    seconds: float
    bound: float


def best_suffix(problem: Separation) -> frozenset[str] | None:
    """The fastest that fits of "all from the k-th layer on"; a plan to begin with, optimal for chains."""
    names, least = [n.name for n in problem.layers], _least_seconds(problem)
    best: tuple[float, int] | None = None
    for k in sorted(range(1, len(names)), key=lambda k: least[k]):
        if best is not None and least[k] > best[0] * (1 + _ROUNDING):
            break
        fc = frozenset(names[k:])
        if problem.allowed(fc) and problem.fits(fc):
            found = problem.step(fc).total, k
            best = found if best is None else min(best, found)
    return None if best is None else frozenset(names[best[1] :])


def _least_seconds(problem: Separation) -> list[float]:
    """For each k, the seconds of a step with the layers from the k-th on as fc, less the latency of the all-reduces."""
    layers = problem.layers
    place = {n.name: k for k, n in enumerate(layers)}
    change = [0.0] * (len(layers) + 1)
    for v in problem.values:
        made = -1 if v.layer is None else place[v.layer]
        read = max((place[reader] for reader in v.readers), default=made)
        if read > made:  # it crosses for made < k <= read
            change[made + 1] += v.seconds
            change[read + 1] -= v.seconds
    conv, fc, before = ([0.0, *accumulate(each)] for each in zip(*map(_numbers, layers), strict=True))
    on_conv, on_fc = problem.conv_sync.seconds_per_byte, problem.fc_sync.seconds_per_byte
    return [
        conv[k] + (fc[-1] - fc[k]) + crossing + max(on_conv * before[k], on_fc * (before[-1] - before[k]))
        for k, crossing in enumerate(accumulate(change))
    ]


def _numbers(layer: LayerNumbers) -> tuple[float, float, float]:
    return layer.conv_seconds, layer.fc_seconds, layer.gradient


def solve(problem: Separation, seconds: float) -> Assignment:
    """The fastest assignment, or the best that `seconds` allow; never one that does not fit."""
    start = best_suffix(problem)
    known = problem.step(start).total if start is not None else math.inf
    scale = 1e4 / (known if math.isfinite(known) else _largest(problem))
    model, fc = _model(problem, scale)
    solution = model.solve(seconds)
    if solution.status == "infeasible" and start is None:
        return Assignment("infeasible", None, math.inf, math.inf)
    found = _chosen(problem, fc, solution, problem.fits)
    least = problem.least_seconds()
    if solution.status != "infeasible":
        least = max(least, solution.bound / scale)
    best = min(
        (f for f in (start, found) if f is not None),
        key=lambda f: problem.step(f).total,
        default=None,
    )
    if best is None:
        return Assignment("unknown", None, math.inf, least)
    reached = problem.step(best).total
    if solution.status == "optimal" and found is not None:
        return Assignment("optimal", best, reached, reached)
    return Assignment("feasible", best, reached, min(least, reached))


def least_memory(problem: Separation, seconds: float) -> Assignment:
    """The allowed assignment whose fuller rank needs the least memory, whether it fits or not."""
    model, fc = _model(problem, 1.0, memory_first=True)
    solution = model.solve(seconds)
    found = _chosen(problem, fc, solution, lambda _: True)
    reached = problem.step(found).total if found is not None else math.inf
    return Assignment(solution.status, found, reached, problem.least_seconds())


def _chosen(
    problem: Separation,
    fc: dict[str, str],
    solution: Solution,
    wanted: Callable[[frozenset[str]], bool],
) -> frozenset[str] | None:
    """The solver's point as a set of layers, if it holds what it must: solvers have tolerances."""
    chosen = frozenset(name for name, variable in fc.items() if solution.values.get(variable))
    return chosen if problem.allowed(chosen) and wanted(chosen) else None


def _largest(problem: Separation) -> float:
    """Seconds that no step exceeds."""
    both = sum(n.conv_seconds + n.fc_seconds for n in problem.layers)
    gradient = sum(n.gradient for n in problem.layers)
    sync = problem.conv_sync.seconds(gradient) + problem.fc_sync.seconds(gradient)
    return both + sync + sum(v.seconds for v in problem.values) or 1.0


def _model(problem: Separation, scale: float, memory_first: bool = False) -> tuple[Model, dict[str, str]]:
    """The integer program, and the name of each layer's variable.  `scale`: units of a second."""
    model = Model("separate_layers")
    variable = {n.name: f"fc[{n.name}]" for n in problem.layers}
    fc = {name: model.binary(variable[name]) for name in variable}
    cross = {v.name: model.real(f"cross[{v.name}]", 1) for v in problem.values}
    seconds, sync = model.real("seconds"), model.real("sync")

    compute = total(
        scale * n.conv_seconds * (1 - fc[n.name]) + scale * n.fc_seconds * fc[n.name] for n in problem.layers
    )
    exchange = total(scale * v.seconds * cross[v.name] for v in problem.values)
    model.require(compute + exchange + sync <= seconds, "eq1_eq2_eq3")
    for equation, role, line in (
        ("eq4", "conv", problem.conv_sync),
        ("eq5", "fc", problem.fc_sync),
    ):
        trains = model.real(f"trains[{role}]", 1)  # whether the role has a gradient at all
        nbytes = []
        for n in problem.layers:
            if n.gradient:
                here = fc[n.name] if role == "fc" else 1 - fc[n.name]
                model.require(trains >= here, f"{equation}_trains_{n.name}")
                nbytes.append(scale * line.seconds_per_byte * n.gradient * here)
        model.require(total(nbytes) + scale * line.latency * trains <= sync, f"{equation}_{role}")
    for i, j in dict.fromkeys(problem.order):
        model.require(fc[i] <= fc[j], f"eq6_{i}_to_{j}")
    for v in problem.values:
        maker = fc[v.layer] if v.layer is not None else 0
        for j in v.readers:
            model.require(cross[v.name] >= fc[j] - maker, f"eq7_{v.name}_to_{j}")
    for i, j in dict.fromkeys(problem.together):
        model.require(fc[i] == fc[j], f"eq8_{i}_with_{j}")
    owned = total(fc[name] for name in sorted(problem.owners))
    model.require(owned >= 1, "eq9_fc")
    model.require(owned <= len(problem.owners) - 1, "eq9_conv")
    limit = model.real("memory") if memory_first else 1e3
    for role in ("conv", "fc"):
        need = _memory(problem, fc, cross, role)
        if problem.shared and role == "fc":
            need = need + _memory(problem, fc, cross, "conv")
        model.require(need <= limit, f"eq10_{role}")
    for n in problem.layers:
        if not n.may_be_fc:
            model.require(fc[n.name] == 0, f"eq11_{n.name}_conv")
        if not n.may_be_conv:
            model.require(fc[n.name] == 1, f"eq11_{n.name}_fc")
    model.minimise(limit if memory_first else seconds)
    return model, variable


def _memory(problem: Separation, fc: dict[str, Expression], cross: dict[str, Expression], role: str) -> Expression:
    """The left side of (10), in thousandths of what a rank has."""
    unit = 1e3 / problem.memory
    if role == "fc":
        held = [unit * n.fc_memory * fc[n.name] for n in problem.layers]
        return total([*held, *(unit * v.fc_memory * cross[v.name] for v in problem.values)])
    held = [unit * n.conv_memory * (1 - fc[n.name]) for n in problem.layers]
    return total([*held, *(unit * v.conv_memory * cross[v.name] for v in problem.values)])
