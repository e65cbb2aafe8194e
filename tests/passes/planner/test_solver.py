"""What the solver says, and that it says no more than is true."""

from __future__ import annotations

import random

import pulp
import pytest

from splitc.passes.planner import solver
from splitc.passes.planner.solver import Model, total


@pytest.fixture(autouse=True, params=["HiGHS", "CBC"])
def used(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The solver, of which the second is used where the first is missing."""
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: request.param == "HiGHS")
    return str(request.param)


def knapsack(weights: list[int], limit: int) -> Model:
    """The cheapest way to fill a knapsack to at least `limit`."""
    model = Model("knapsack")
    taken = [model.binary(f"take[{i}]") for i in range(len(weights))]
    model.require(total(zip(weights, taken, strict=True)) >= limit, "eq1")
    model.minimise(total(zip(weights, taken, strict=True)))
    return model


def market_split(size: int = 40, rows: int = 5) -> Model:
    """A small problem that takes branch and bound very long."""
    rng = random.Random(0)
    model = Model("market_split")
    chosen = [model.binary(f"x[{i}]") for i in range(size)]
    slack = []
    for row in range(rows):
        numbers = [rng.randrange(100) for _ in range(size)]
        over, under = model.real(f"over[{row}]"), model.real(f"under[{row}]")
        hit = total(zip(numbers, chosen, strict=True)) + under - over
        model.require(hit == sum(numbers) // 2, f"eq{row}")
        slack += [over, under]
    model.minimise(total((1, each) for each in slack))
    return model


def test_a_solved_problem_is_optimal_and_its_bound_is_its_value() -> None:
    solution = knapsack([5, 6, 7], 11).solve(10)
    assert solution.status == "optimal"
    assert solution.objective == solution.bound == 11
    assert solution.values == {"take[0]": 1, "take[1]": 1, "take[2]": 0}


def test_a_problem_without_solution_is_infeasible_and_not_a_matter_of_time() -> None:
    assert knapsack([5, 6, 7], 19).solve(10).status == "infeasible"


def test_integer_infeasible_is_infeasible_too() -> None:
    model = Model("half")
    x = model.binary("x")
    model.require(2 * x == 1, "eq1")
    model.minimise(1 * x)
    assert model.solve(10).status == "infeasible"


@pytest.mark.slow
def test_a_problem_that_the_time_limit_stopped_is_never_called_optimal() -> None:
    solution = market_split().solve(0.2)
    assert solution.status in ("feasible", "unknown")
    assert solution.bound < solution.objective


def test_a_gap_that_is_small_is_no_proof() -> None:
    weights = [100_003 + 7 * i for i in range(30)]
    solution = knapsack(weights, sum(sorted(weights)[:15]) + 1).solve(10)
    assert solution.status == "optimal"
    assert solution.objective == sum(sorted(weights)[:14]) + sorted(weights)[15]


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    knapsack([5, 6, 7], 11).solve(10)
    assert capfd.readouterr() == ("", "")


def test_a_point_that_breaks_a_constraint_is_not_a_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "_holds", lambda constraint: False)
    solution = knapsack([5, 6, 7], 11).solve(10)
    assert solution.status == "unknown"
    assert not solution.values


def test_broken_constraints_are_named() -> None:
    model = Model("named")
    x, y = model.binary("x"), model.real("y")
    model.require(x + y <= 1, "eq1")
    model.require(y >= 2, "eq2")
    x.varValue, y.varValue = 1, 2
    assert model.broken() == ["eq1"]


def test_names_that_look_alike_to_the_solver_stay_two_variables() -> None:
    for names in (("a-b", "a_b"), ("a b", "a+b"), ("x.1", "x/1")):
        model = Model("alike")
        first, second = (model.binary(name) for name in names)
        model.require(first >= 1, "eq1")
        model.require(second <= 0, "eq2")
        model.minimise(1 * first + 1 * second)
        assert model.solve(10).values == {names[0]: 1, names[1]: 0}


def test_an_objective_that_would_spoil_the_bound_is_refused() -> None:
    model = Model("constant")
    with pytest.raises(AssertionError):
        model.minimise(7 + model.binary("x"))


def test_highs_has_the_program_that_pulp_gives_it_row_by_row(used: str) -> None:
    given = []
    for own in (True, False):
        model = market_split(size=6, rows=3)
        model.require(model.real("part", 0.5) + 0 * model.binary("y") >= 0.25, "at_least")
        highs = pulp.HiGHS(msg=False)
        if own:
            highs.buildSolverModel = model._give
        highs.createAndConfigureSolver(model._problem)
        highs.buildSolverModel(model._problem)
        lp = model._problem.solverModel.getLp()
        parts = lp.col_cost_, lp.col_lower_, lp.col_upper_, lp.row_lower_, lp.row_upper_, lp.integrality_
        matrix = lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_
        given.append([list(each) for each in (*parts, *matrix)])
    assert given[0] == given[1]
