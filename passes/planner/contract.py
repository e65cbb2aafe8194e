"""Make a problem of many layers smaller: runs of layers with equal choices stay together where several values live.

conv1 - norm1 - conv2 - norm2 -(+)        conv1..norm2 of a residual block: one layer, since a cut inside it would
`-----------------------------'         be crossed by two values where one before or after it is crossed by one
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import add

from splitc.passes.planner.problem import Option, Problem
from splitc.passes.planner.registry import STRATEGIES

ABOVE = 64
"""Layers of a problem that is made smaller."""


@dataclass(frozen=True)
class Contracted:
    """A problem whose layers stand for `runs` of those of another one."""

    whole: Problem
    runs: Mapping[str, tuple[str, ...]]

    @cached_property
    def problem(self) -> Problem:
        if len(self.runs) == len(self.whole.options):
            return self.whole
        of = {layer: run for run, layers in self.runs.items() for layer in layers}

        def pairs(given: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
            return tuple(dict.fromkeys((of[i], of[j]) for i, j in given if of[i] != of[j]))

        values = []
        for value in self.whole.values:
            maker = None if value.layer is None else of[value.layer]
            readers = dict.fromkeys((of[reader], how) for reader, how in value.readers if of[reader] != maker)
            if readers:
                values.append(replace(value, layer=maker, readers=tuple(readers)))
        return replace(
            self.whole,
            options={run: self._options(layers) for run, layers in self.runs.items()},
            values=tuple(values),
            parameters=frozenset(of[layer] for layer in self.whole.parameters),
            order=pairs(self.whole.order),
            together=pairs(self.whole.together),
            tied=pairs(self.whole.tied),
        )

    def _options(self, layers: tuple[str, ...]) -> tuple[Option, ...]:
        return tuple(map(_as_one, zip(*(self.whole.options[layer] for layer in layers), strict=True)))

    def expanded(self, chosen: Mapping[str, Option]) -> dict[str, Option]:
        """The assignment of all layers."""
        if self.problem is self.whole:
            return dict(chosen)
        found: dict[str, Option] = {}
        for run, layers in self.runs.items():
            k = self.problem.options[run].index(chosen[run])
            found |= {layer: self.whole.options[layer][k] for layer in layers}
        return {layer: found[layer] for layer in self.whole.options}


def contract(problem: Problem) -> Contracted:
    """The problem with runs of layers together; each layer is a run of its own where there are not many."""
    if len(problem.options) <= ABOVE:
        return Contracted(problem, {layer: (layer,) for layer in problem.options})
    crowded = _crowded(problem)
    runs: list[list[str]] = []
    for layer in problem.options:
        if runs and layer in crowded and _kind(problem, runs[-1][0]) == _kind(problem, layer):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return Contracted(problem, {run[0]: tuple(run) for run in runs})


def _crowded(problem: Problem) -> set[str]:
    """The layers before which several values that layers made are still to be read."""
    position = {layer: k for k, layer in enumerate(problem.options)}
    change = [0] * (len(position) + 1)
    for value in problem.values:
        if value.layer is not None:
            change[position[value.layer] + 1] += 1
            change[max(position[reader] for reader in value.reads) + 1] -= 1
    living, found = 0, set()
    for layer, more in zip(position, change, strict=False):
        living += more
        if living > 1:
            found.add(layer)
    return found


def _kind(problem: Problem, layer: str) -> tuple[tuple[object, ...], ...]:
    return tuple(
        (o.role, o.holding, o.state, o.reads, o.joins, o.makes, o.sync in STRATEGIES) for o in problem.options[layer]
    )


def _as_one(options: tuple[Option, ...]) -> Option:
    numbers = ("forward", "backward", "there", "back", "syncing", "updating", "memory") * (len(options) > 1)
    return replace(options[0], **{name: reduce(add, (getattr(o, name) for o in options)) for name in numbers})
