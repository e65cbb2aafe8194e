"""Solve an integer program: the one file that knows PuLP, its CBC, and what they leave unsaid.

PuLP calls CBC's answer at a time limit "Optimal", and an infeasible program "No Solution Found"; CBC
may return a point that breaks a constraint after a time limit.  `Model.solve` tells which of four
things happened, checks the point against every constraint, and reads the bound from CBC's log.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pulp

from splitc.errors import InternalError

Expression = Any
"""A linear expression of PuLP: variables, added and multiplied by numbers."""

_TOLERANCE = 1e-6  # of a constraint's largest term: CBC writes its numbers with few digits
_PRINTED = 1e-3  # CBC prints its bound to three digits


@dataclass(frozen=True)
class Solution:
    """What the solver found.

    status  "optimal": proven.  "feasible": the time limit stopped it, `values` hold all constraints.
            "infeasible": proven that there is none.  "unknown": stopped before it found one.
    objective: the value of `values`; infinite without.  bound: no solution has a smaller objective.
    """

    status: Literal["optimal", "feasible", "infeasible", "unknown"]
    objective: float = math.inf
    bound: float = -math.inf
    values: Mapping[str, float] = field(default_factory=dict)


class Model:
    """An integer program to be minimised.  Numbers should lie within a few orders of 1."""

    def __init__(self, name: str) -> None:
        self._problem = pulp.LpProblem(name, pulp.LpMinimize)
        self._variables: dict[str, Any] = {}
        self._constraints: dict[str, Any] = {}

    def binary(self, name: str) -> Expression:
        return self._variable(name, 1, "Binary")

    def real(self, name: str, highest: float | None = None) -> Expression:
        """A number of at least 0."""
        return self._variable(name, highest, "Continuous")

    def _variable(self, name: str, highest: float | None, category: str) -> Expression:
        assert name not in self._variables, f"two variables are named {name}"
        # Not the given name: PuLP replaces signs in it, after which two may be equal.
        add = getattr(self._problem, "add_variable", pulp.LpVariable)
        self._variables[name] = add(f"v{len(self._variables)}", 0, highest, category)
        return self._variables[name]

    def minimise(self, expression: Expression) -> None:
        """Set the objective: variables times numbers of at least 0, no constant.

        CBC's bound leaves constants out, and is 0 when it was stopped before it had one.
        """
        expression = pulp.LpAffineExpression(expression)
        assert expression.constant == 0 and all(n >= 0 for n in expression.values())
        self._problem.setObjective(expression)

    def require(self, constraint: Expression, name: str) -> None:
        """Add a constraint such as `x + y <= 1`; names begin with the number of its equation."""
        assert name not in self._constraints, f"two constraints are named {name}"
        self._constraints[name] = constraint
        self._problem.addConstraint(constraint, f"c{len(self._constraints)}")

    def broken(self) -> list[str]:
        """Names of the constraints that the variables' present values break."""
        return [name for name, c in self._constraints.items() if not _holds(c)]

    def solve(self, seconds: float) -> Solution:
        """The least objective, or the best that `seconds` allow."""
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of PuLP 4, which is not used
            log = os.path.join(folder, "cbc.log")
            cbc = pulp.PULP_CBC_CMD(msg=False, timeLimit=max(seconds, 0.01), logPath=log)
            try:
                self._problem.solve(cbc)
            except pulp.PulpSolverError as error:
                raise InternalError(f"the solver CBC that PuLP brings failed: {error}") from error
            with open(log, encoding="utf-8", errors="replace") as file:
                bound = _bound(file.read())
        return self._solution(bound)

    def _solution(self, bound: float) -> Solution:
        status, found = self._problem.status, self._problem.sol_status
        if status == pulp.LpStatusInfeasible:
            return Solution("infeasible", bound=math.inf)
        if found not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            return Solution("unknown", bound=bound)
        values = {}
        for name, variable in self._variables.items():
            value = variable.value() or 0.0  # CBC leaves variables out that are in no constraint
            variable.varValue = values[name] = float(round(value)) if variable.cat == "Integer" else value
        if self.broken():
            return Solution("unknown", bound=bound)
        objective = float(pulp.value(self._problem.objective))
        if found == pulp.LpSolutionOptimal:
            return Solution("optimal", objective, objective, values)
        return Solution("feasible", objective, min(bound, objective), values)


def total(terms: Iterable[Expression]) -> Expression:
    """The sum of many terms; much faster than `sum`."""
    return pulp.lpSum(terms)


def _holds(constraint: Any) -> bool:
    terms = (abs(number * (x.value() or 0.0)) for x, number in constraint.items())
    largest = max(terms, default=0.0)
    return bool(constraint.valid(_TOLERANCE * max(1.0, largest, abs(constraint.constant))))


def _bound(log: str) -> float:
    """The lower bound that CBC prints when a limit stopped it."""
    found = re.findall(r"^Lower bound:\s+(\S+)", log, re.MULTILINE)
    try:
        return float(found[-1]) - _PRINTED if found else -math.inf
    except ValueError:
        return -math.inf
