"""The integer program finds what trying every assignment finds, and never claims more."""

from __future__ import annotations

import math
import random

import pytest

from splitc.passes.planner.integer_program import least_memory, solve
from splitc.passes.planner.problem import Option, Place, Problem, Value
from splitc.passes.planner.search import first_assignment
from tests.support.sampling import sampled
from tests.support.small_problems import (
    Assignment,
    assignments,
    broken_equations,
    fullest_nbytes,
    least_step,
    random_chain,
    random_problem,
    step_seconds,
)

SEEDS = range(60)


@sampled("seed", SEEDS, one_in=10)
def test_the_program_is_as_fast_as_the_best_of_all_assignments(seed: int) -> None:
    problem = random_problem(seed)
    best, start = least_step(problem), first_assignment(problem)
    for answer in (solve(problem, 60.0), *([solve(problem, 60.0, start)] if start is not None else [])):
        assert answer.proved and answer.seconds == pytest.approx(best, rel=1e-6)
        assert (answer.chosen is None) == math.isinf(best)
        assert answer.bound <= best * (1 + 1e-6)
        if answer.chosen is not None:
            assert not broken_equations(problem, answer.chosen)
            assert step_seconds(problem, answer.chosen) == pytest.approx(best, rel=1e-6)
    if not math.isinf(best) and best:
        assert_proves_what_is_relevant(problem, best, start, (0.5, 0.9, 1.1)[seed % 3])
    assert_least_memory(problem)


def assert_proves_what_is_relevant(problem: Problem, best: float, start: Assignment | None, part: float) -> None:
    answer = solve(problem, 60.0, start, relevant=part * best)
    assert answer.bound <= best * (1 + 1e-6)
    assert answer.seconds >= best * (1 - 1e-6)
    assert not answer.proved or answer.seconds == pytest.approx(best, rel=1e-6)


def assert_least_memory(problem: Problem) -> None:
    allowed = [each for each in assignments(problem) if not broken_equations(problem, each) - {"eq11"}]
    found = least_memory(problem, 60.0)
    assert (found is None) == (not allowed)
    if found is not None:
        least = min(fullest_nbytes(problem, each) for each in allowed)
        assert fullest_nbytes(problem, found) == pytest.approx(least, rel=1e-6)
        assert least >= problem.fullness * problem.memory


@pytest.mark.slow
def test_prices_checks_and_bounds_are_those_of_the_equations() -> None:
    for seed in SEEDS:
        problem = random_problem(seed)
        for chosen in random.Random(seed).choices(list(assignments(problem)), k=10):
            broken = broken_equations(problem, chosen)
            assert set(problem.broken(chosen)) == broken, seed
            if "eq7" not in broken:
                assert problem.seconds(chosen) == pytest.approx(step_seconds(problem, chosen), rel=1e-9), seed
        start = first_assignment(problem)
        assert problem.least_seconds() <= least_step(problem) * (1 + 1e-9), seed
        assert start is None or not broken_equations(problem, start), seed


@pytest.mark.slow
def test_the_random_problems_meet_every_case() -> None:
    """Else the tests above prove less than they say."""
    problems = [random_problem(seed) for seed in SEEDS]
    possible = [each for each in problems if math.isfinite(least_step(each))]
    assert 6 <= len(problems) - len(possible) <= 40
    for wanted in ((0,), (0, 0), (0, 1), (0, 0, 0), (0, 1, 1), (0, 1, 2), (0, 0, 2)):
        assert any(each.ranks == wanted for each in possible), wanted
    for case in ("together", "tied", "filled", "wanted"):
        assert sum(bool(getattr(each, case)) for each in possible) >= 2, case
    assert {each.pieces for each in possible} == {1, 2, 3, 4}
    assert {each.overlap for each in possible} == {True, False}
    binding = sum("eq11" in broken_equations(each, chosen) for each in possible for chosen in assignments(each))
    assert binding >= 100
    assert any(len(value.readers) > 2 for each in possible for value in each.values)


# -- chains ------------------------------------------------------------------------------------------------------------


def walked(problem: Problem) -> float:
    """Dynamic programming over the place of each layer's result; every layer of a chain reads the one before it."""
    best: dict[Place, float] = {(0, "batch"): 0.0}
    for (layer, options), value in zip(problem.options.items(), problem.values, strict=True):
        assert [reader for reader, _ in value.readers] == [layer]
        after: dict[Place, float] = {}
        for option in options:
            own = option.forward + option.backward + option.there + option.back + option.syncing + option.updating
            for place, seconds in best.items():
                if place[0] <= option.role:
                    reached = seconds + own + _reading(value, option, place)
                    makes = option.role, option.makes
                    after[makes] = min(after.get(makes, math.inf), reached)
        best = after
    return min(best.values())


def _reading(value: Value, option: Option, place: Place) -> float:
    """Seconds to read a value that was made in `place`, and to bring its gradient back."""
    ((_, how),) = value.readers
    state = option.reads if how == "reads" else option.joins
    move = value.moves[place, (option.role, "replicate" if (how, state) == ("whole", "features") else state)]
    return move.there + move.back


@sampled("seed", range(12), one_in=4)
def test_the_program_is_as_fast_as_a_walk_over_the_states_of_a_chain(seed: int) -> None:
    problem = random_chain(seed)
    best, answer = walked(problem), solve(problem, 60.0)
    assert answer.proved
    assert answer.seconds == pytest.approx(best, rel=1e-6)


def test_the_first_assignment_of_a_chain_is_the_best_in_one_role_and_never_better_in_more() -> None:
    for seed in range(30):
        problem = random_chain(seed)
        start = first_assignment(problem)
        assert start is not None
        seconds, best = step_seconds(problem, start), walked(problem)
        assert seconds >= best * (1 - 1e-9), seed
        assert len(problem.ranks) > 1 or seconds == pytest.approx(best, rel=1e-9), seed
