"""Solve an integer program: the one file that knows PuLP, its solvers, and what they leave unsaid.

The solver is HiGHS, in this process; where highspy is missing, the CBC that PuLP brings, which is slower and
gives no bound.  PuLP calls the answer of either at a time limit "Optimal", and what CBC finds infeasible "No
Solution Found"; CBC may return a point that breaks a constraint after a time limit.  `Model.solve` tells
which of four things happened, and checks the point against every constraint.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, Literal

import pulp

from splitc.errors import InternalError

Expression = Any
"""A linear expression of PuLP: variables, added and multiplied by numbers."""

_TOLERANCE = 1e-6  # of a constraint's largest term: CBC writes its numbers with few digits


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
        """Set the objective: variables times numbers of at least 0, no constant, which PuLP's HiGHS leaves out."""
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
        limit = max(seconds, 0.01)
        highs = pulp.HiGHS(msg=False, threads=1, gapRel=0, timeLimit=limit)
        highs.buildSolverModel = self._give
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of PuLP 4, which is not used
            try:
                self._problem.solve(highs if highs.available() else pulp.PULP_CBC_CMD(msg=False, timeLimit=limit))
            except pulp.PulpSolverError as error:
                raise InternalError(f"the solver that PuLP uses failed: {error}") from error
        # A program of a time limit has the bound of its relaxation, 0 where the limit came first.
        return self._solution(self._problem.solverModel.getInfo().mip_dual_bound if highs.available() else -math.inf)

    def _give(self, problem: Any) -> None:
        """Give HiGHS the program as a whole: PuLP's way, row by row, takes longer than solving it."""
        columns, rows, solver = problem.variables(), [*self._constraints.values()], problem.solverModel
        for index, one in chain(enumerate(columns), enumerate(rows)):
            one.index = index
        n, most = len(columns), [math.inf if x.upBound is None else x.upBound for x in columns]
        solver.addCols(n, [problem.objective.get(x, 0.0) for x in columns], [0.0] * n, most, 0, [], [], [])
        solver.changeColsIntegrality(n, range(n), [x.cat == pulp.LpInteger for x in columns])
        terms = [[(x.index, number) for x, number in row.items() if number] for row in rows]
        starts, flat = [0, *accumulate(map(len, terms))], [*chain(*terms)]
        low = [-math.inf if row.sense == pulp.LpConstraintLE else -row.constant for row in rows]
        high = [math.inf if row.sense == pulp.LpConstraintGE else -row.constant for row in rows]
        solver.addRows(len(rows), low, high, len(flat), starts[:-1], [k for k, _ in flat], [a for _, a in flat])

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


def total(terms: Iterable[tuple[float, Expression]]) -> Expression:
    """The sum of many numbers times variables; much faster than `sum`."""
    numbers: dict[Expression, float] = {}
    for number, x in terms:
        numbers[x] = numbers.get(x, 0) + number
    return pulp.LpAffineExpression(numbers)


def _holds(constraint: Any) -> bool:
    largest = max((abs(number * (x.value() or 0.0)) for x, number in constraint.items()), default=0.0)
    return bool(constraint.valid(_TOLERANCE * max(1.0, largest, abs(constraint.constant))))
