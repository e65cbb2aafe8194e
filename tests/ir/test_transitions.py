"""The table of transitions: that of LAYOUTS 2, written out a second time, and the nodes that stand for its rows."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from splitc.ir.transitions import (
    forward_collective,
    name_of,
    nbytes_sent,
    options_of,
    transition_of,
)
from splitc.runtime.collectives.layouts import MOVES, Extents, State, Transition
from tests.support.transitions import TABLE, TRANSITIONS, fractions_sent

EVERY = pytest.mark.parametrize("transition", TRANSITIONS, ids=str)


@EVERY
def test_its_node_and_what_it_does_are_those_of_the_table(transition: Transition) -> None:
    name, forward, backward = TABLE[transition]
    assert name_of(transition) == name
    for move, what in ((transition, forward), (transition.adjoint, backward)):
        verb, _, parts = what.partition(" of ")
        collective = verb.replace("-", "_") if parts or verb == "all-reduce" else "none"
        assert move.move.collective == collective
        assert not parts or move.by_examples == (parts == "examples")
    function, _ = options_of(transition, 8, 0, 1)
    assert forward_collective(function) is transition.move.collective


@EVERY
def test_a_node_tells_its_transition(transition: Transition) -> None:
    for dim, rows in ((0, 1), (1, 1), (0, 3), (2, 4)):
        function, options = options_of(transition, 8, dim, rows)
        graph = fx.Graph()
        node = graph.call_function(function, (graph.placeholder("x"),), options)
        assert transition_of(node) == transition
        assert ("features" in options) == (State.FEATURES in transition)
        by_batch = State.BATCH in transition
        assert (options.get("dim", 0), options.get("rows", 1)) == ((dim, rows) if by_batch else (0, 1))
        value = torch.ones(2, 3)
        assert function(value, **options) is value, "what one rank alone would see"


def test_no_other_node_is_a_transition() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert transition_of(x) is None and transition_of(graph.call_function(torch.relu, (x,))) is None


def test_the_table_has_every_pair_of_states_that_differ_in_what_ranks_hold() -> None:
    """A partial value comes from products alone, and what is divided was brought there: to neither leads a move."""
    others = [(a, b) for a in State for b in State if a is not b and (a, b) not in TABLE]
    assert others == [
        *((state, State.PARTIAL) for state in (State.BATCH, State.FEATURES, State.REPLICATE)),
        (State.DIVIDED, State.REPLICATE),
        (State.DIVIDED, State.PARTIAL),
    ]


@EVERY
def test_both_ways_are_moves_and_gradients_end_in_the_state_of_their_value(transition: Transition) -> None:
    source, target = transition
    assert transition.move in MOVES.values() and transition.adjoint.move in MOVES.values()
    assert transition.adjoint == (target.gradient, source.gradient)
    assert source.gradient.gradient in (source, State.REPLICATE)


@EVERY
@pytest.mark.parametrize("ranks", [2, 3])
def test_even_parts_cost_what_the_closed_forms_say(transition: Transition, ranks: int) -> None:
    """LAYOUTS 2: v f for gathers and reduce-scatters, 2 v f for all-reduces, v f / k for an all-to-all."""
    extents, v, f = Extents((5,) * ranks, (7,) * ranks), 1024.0, (ranks - 1) / ranks
    closed = {"all-gather": v * f, "reduce-scatter": v * f, "all-reduce": 2 * v * f, "all-to-all": v * f / ranks}
    for move, what in zip((transition, transition.adjoint), TABLE[transition][1:], strict=True):
        for index in range(ranks):
            assert nbytes_sent(move, v, extents, index) == pytest.approx(closed.get(what.partition(" of ")[0], 0.0))


@EVERY
def test_uneven_parts_cost_each_rank_its_own(transition: Transition) -> None:
    extents = Extents((3, 0, 2), (1, 4, 0))
    for move, what in zip((transition, transition.adjoint), TABLE[transition][1:], strict=True):
        for index in range(3):
            assert nbytes_sent(move, 100.0, extents, index) == pytest.approx(100 * fractions_sent(what, extents, index))


def test_a_value_without_examples_costs_nothing() -> None:
    for transition in TRANSITIONS:
        assert nbytes_sent(transition, 0.0, Extents((0, 0), (0, 0)), 1) == 0
