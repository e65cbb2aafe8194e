"""Pieces: which examples a microbatch has, and how they are counted."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from splitc.runtime.pieces import Pieces, pieces_of
from tests.support.sampling import along, in_one

BOUNDS = [(0, 8), (0, 5, 7), (0, 4, 9, 12), (0, 1, 2, 9)]


def test_every_example_is_in_one_piece() -> None:
    for bounds, number, whole_shares in product(BOUNDS, (1, 2, 3, 5), (False, True)):
        pieces = Pieces(number, bounds, whole_shares)
        seen = sorted(x for k in range(number) for a, b in pieces.parts(k) for x in range(a, b))
        assert seen == list(range(bounds[-1]))


@in_one
@along(bounds=BOUNDS, number=[2, 3])
def test_the_positions_of_neighbours_join_and_count_their_examples_in_the_piece(
    bounds: tuple[int, ...], number: int
) -> None:
    pieces = Pieces(number, bounds)
    for k in range(number):
        ends = [pieces.positions((0, x), k)[1] for x in range(bounds[-1] + 1)]
        assert ends[0] == 0 and ends[-1] == sum(b - a for a, b in pieces.parts(k))
        for x, (before, after) in enumerate(pairwise(ends)):
            assert after - before == sum(b - a for a, b in pieces.examples((x, x + 1), k))
            assert pieces.positions((x, bounds[-1]), k) == (before, ends[-1])


def test_pieces_are_equal_parts_of_each_share_as_far_as_they_divide() -> None:
    assert Pieces(2, (0, 5, 8)).parts(0) == [(0, 2), (5, 6)] and Pieces(2, (0, 5, 8)).parts(1) == [(2, 5), (6, 8)]
    assert Pieces(2, (0, 5, 8)).examples((1, 6), 1) == [(2, 5)]
    assert Pieces(2, (0, 5, 8)).examples((1, 6), None) == [(1, 6)]


@in_one
@pytest.mark.parametrize(("scheme", "parts"), [("BK", [(0, 2), (4, 7)]), ("B", [(6, 10)]), ("B/K", [(4, 5), (6, 8)])])
def test_the_schemes_divide_the_examples_of_a_group(scheme: str, parts: list[tuple[int, int]]) -> None:
    k = 1 if scheme == "B" else 0
    assert pieces_of(scheme, 2, (0, 4, 10), (4, 6, 10)).parts(k) == parts


@in_one
@pytest.mark.parametrize("whole_shares", [False, True])
def test_positions_count_the_examples_of_a_piece_that_stand_before(whole_shares: bool) -> None:
    """With shares of no examples, and ends between parts."""
    pieces = Pieces(3, (2, 2, 7, 7, 12, 20), whole_shares)
    for piece, first, last in product(range(3), range(22), range(22)):
        own = [k for a, b in pieces.parts(piece) for k in range(a, b)]
        expected = sum(k < first for k in own), sum(k < last for k in own)
        assert pieces.positions((first, last), piece) == expected
