"""The grid: which role goes forward and backward with which microbatch, and when."""

from __future__ import annotations

from itertools import product

from splitc.ir.placements import SCHEDULES
from splitc.passes.grid import Cell, grid

PROGRAMS = [[{0}, {1}], [{0}, {1}, {2}], [{0}, {0, 1}], [{0, 1, 2}], [{0}, {0, 1}, {1, 2}], [{0}]]


def shown(cells: list[Cell], roles: set[int]) -> str:
    return " ".join(f"{'F' if cell.forward else 'B'}{cell.microbatch}" for cell in cells if cell.role in roles)


def test_all_forward_goes_forward_with_all_and_back_and_the_role_of_the_loss_alternates() -> None:
    cells = grid([{0}, {1}], [3, 3], "all_forward")
    assert shown(cells, {0}) == "F0 F1 F2 B0 B1 B2" and shown(cells, {1}) == "F0 B0 F1 B1 F2 B2"


def test_1f1b_keeps_as_many_in_flight_as_there_are_roles_to_come() -> None:
    cells = grid([{0}, {1}, {2}], [4, 4, 4], "1f1b")
    assert shown(cells, {0}) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert shown(cells, {1}) == "F0 F1 B0 F2 B1 F3 B2 B3" and shown(cells, {2}) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_one_microbatch_goes_forward_through_the_roles_and_back() -> None:
    for order in SCHEDULES:
        expected = [Cell(role, True, 0) for role in range(3)] + [Cell(role, False, 0) for role in (2, 1, 0)]
        assert all(grid(programs, [1, 1, 1], order) == expected for programs in ([{0}, {1}, {2}], [{0, 1, 2}]))


def test_only_the_role_of_the_loss_may_have_several() -> None:
    assert shown(grid([{0, 1}], [1, 3], "all_forward"), {0, 1}) == "F0 F0 B0 F1 B1 F2 B2 B0"


def test_every_cell_comes_once_and_after_what_it_needs() -> None:
    for order in SCHEDULES:
        for programs, number in product(PROGRAMS, (1, 2, 3, 7)):
            depth = max(map(max, programs)) + 1
            cells = grid(programs, [number] * depth, order)
            at = {cell: k for k, cell in enumerate(cells)}
            assert len(at) == len(cells) == 2 * depth * number
            for (role, forward, k), place in at.items():
                assert forward or at[Cell(role, True, k)] < place
                needed = Cell(role - 1, True, k) if forward else Cell(role + 1, False, k)
                assert needed not in at or at[needed] < place
                assert k == 0 or at[Cell(role, forward, k - 1)] < place


def test_1f1b_bounds_what_is_in_flight() -> None:
    for programs in PROGRAMS:
        depth, flying = max(map(max, programs)) + 1, dict[int, int]()
        for role, forward, _ in grid(programs, [6] * depth, "1f1b"):
            flying[role] = flying.get(role, 0) + (1 if forward else -1)
            assert flying[role] <= depth - role
