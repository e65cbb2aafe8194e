"""Seconds and memory of moving values: between states inside a group, and from one role to another."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from splitc.cost_models.network.alpha_beta import ALGORITHMS, many_to_one, one_to_many
from splitc.ir.transitions import Collective
from splitc.passes.planner.cuts import Crossing
from splitc.passes.planner.divisions import Division, busiest
from splitc.passes.planner.problem import Move, Place
from splitc.passes.planner.request import AS_IT_IS, Carried, Request
from splitc.runtime.collectives.layouts import State, Transition


class Moves:
    """Seconds of the transfers inside the groups of a role, of a whole step in its pieces.

    `nbytes`: of a value of all examples of a group.
    """

    def __init__(self, request: Request, division: Division, role: int, dtype: torch.dtype = torch.float32) -> None:
        """dtype: of the values."""
        self.there, self.back = (request.form(kind, dtype) for kind in ("activations", "errors"))
        r = division.roles[role]
        self._k, self._pieces = r.group, division.pieces(role)
        self._link = request.link_over(True, r.groups)
        self.examples = r.group * r.batch

    def price(self, collective: Collective, nbytes: float, form: Carried = AS_IT_IS) -> float:
        """Seconds of one collective; none of what moves nothing."""
        if collective is Collective.NONE:
            return 0.0
        return (
            self._pieces * ALGORITHMS[collective](form.ratio * nbytes / self._pieces, self._k, self._link)
            + form.cast * nbytes
        )

    def seconds(self, nbytes: float, gradient: bool, made: str, need: str) -> tuple[float, float]:
        """Bring a value from one state to another, and its gradient back."""
        if made == need:
            return 0.0, 0.0
        there = Transition(State(made), State(need))
        back = self.price(there.adjoint.move.collective, nbytes, self.back)
        return self.price(there.move.collective, nbytes, self.there), gradient * back


@dataclass(frozen=True)
class _Line:
    """A move as a line in the bytes of a value for one example: there, back and memory, of no bytes and of one."""

    none: Move
    one: Move

    def at(self, nbytes: float) -> Move:
        ends = ((each.there, each.back, *each.memory) for each in (self.none, self.one))
        there, back, *memory = (a + nbytes * (b - a) for a, b in zip(*ends, strict=True))
        return Move(there, back, (memory[0], memory[1]))


class Lines:
    """The moves of a division.  known: of values that are made and read alike, by the options of who does."""

    def __init__(self, request: Request, division: Division) -> None:
        self._request, self._division = request, division
        self.known: dict[object, dict[tuple[Place, Place], Move]] = {}
        self._lines: dict[tuple[Place, Place, bool, torch.dtype], _Line] = {}
        self._moves: dict[object, dict[tuple[Place, Place], Move]] = {}

    def moves(self, value: Crossing, pairs: tuple[tuple[Place, Place], ...]) -> dict[tuple[Place, Place], Move]:
        """A value's moves between pairs of places; the same for all values of a dtype and as many bytes."""
        key = value.spec.nbytes(1), value.spec.dtype, value.gradient, pairs
        if key not in self._moves:
            self._moves[key] = {(start, end): self._move(value, start, end) for start, end in pairs}
        return self._moves[key]

    def _move(self, value: Crossing, start: Place, end: Place) -> Move:
        key = start, end, value.gradient, value.spec.dtype
        if key not in self._lines:
            none, one = (_move(self._request, self._division, nbytes, *key) for nbytes in (0.0, 1.0))
            self._lines[key] = _Line(none, one)
        return self._lines[key].at(value.spec.nbytes(1))


def _move(
    request: Request, division: Division, nbytes: float, start: Place, end: Place, gradient: bool, dtype: torch.dtype
) -> Move:
    """Bring a value of so many bytes an example from one place to another, and its gradient back."""
    (a, made), (b, need) = start, end
    there = division.roles[b]

    def inside(role: int, made: str, need: str) -> tuple[float, float]:
        r = division.roles[role]
        moves = Moves(request, division, role, dtype)
        return moves.seconds(nbytes * r.group * r.batch, gradient, made, need) if r.group > 1 else (0.0, 0.0)

    def alive(role: int, members: int) -> float:
        kinds = busiest(request, division.roles[role], division.busy)
        return nbytes * max(each.scale * division.live(role, members * each.batch) for each in kinds)

    whole = alive(b, there.group)
    buffers = (1 + gradient) * whole if there.group > 1 and need in ("replicate", "divided") else 0.0
    if a == b:
        return Move(*inside(a, made, need), (0.0, 0.0 if made == need else buffers))
    leaving, entering = inside(a, made, "batch"), inside(b, "batch", need)
    memory, exchanged = (0.0, buffers), (0.0, 0.0)
    if not division.is_local(a, b):
        exchanged = _exchange(request, division, nbytes, gradient, a, b, dtype)
        memory = ((1 + gradient) * alive(a, 1), (1 + gradient) * alive(b, 1) + buffers)
        if need == "features":
            entering = (0.0, 0.0)  # it arrives so
    seconds, back = (sum(each) for each in zip(leaving, exchanged, entering, strict=True))
    return Move(seconds, back, memory)


def _exchange(
    request: Request, division: Division, nbytes: float, gradient: bool, a: int, b: int, dtype: torch.dtype
) -> tuple[float, float]:
    """Seconds that the busiest rank sends or receives a value for, and its gradient (Stanza 4.1.1)."""
    here, there = division.roles[a], division.roles[b]
    messages, pieces = division.messages(a, b), division.order.pieces
    own = there.ranks[0] in here.ranks  # which keeps its examples
    sent = nbytes * max(here.batch, there.batch) / messages / pieces
    link = request.cluster.link_across(here.ranks, there.ranks)
    number, (there_form, back_form) = messages - own, (request.form(kind, dtype) for kind in ("activations", "errors"))
    cast = pieces * number * sent
    seconds = pieces * many_to_one(there_form.ratio * sent, number, link) + there_form.cast * cast
    back = pieces * one_to_many(back_form.ratio * sent, number, link) + back_form.cast * cast
    return seconds, gradient * back
