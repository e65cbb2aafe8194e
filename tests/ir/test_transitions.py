"""The table of transitions: that of LAYOUTS 2, written out a second time, and the nodes that stand for its rows."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import fx

from splitc.ir import transitions
from splitc.ir.transitions import (
    name_of,
    nbytes_sent,
    options_of,
    transition_of,
)
from splitc.runtime.collectives.layouts import MOVES, Extents, State
from tests.support.transitions import TABLE, TRANSITIONS, fractions_sent


def test_its_node_and_what_it_does_are_those_of_the_table() -> None:
    for transition in TRANSITIONS:
        name, forward, backward = TABLE[transition]
        assert name_of(transition) == name, transition
        for move, what in ((transition, forward), (transition.adjoint, backward)):
            verb, _, parts = what.partition(" of ")
            collective = verb.replace("-", "_") if parts or verb == "all-reduce" else "none"
            assert move.move.collective == collective, transition
            assert not parts or move.by_examples == (parts == "examples"), transition
        function, _ = options_of(transition, 8, 0, 1)
        assert transitions.TRANSITIONS[function] is transition.move.collective, transition


def test_a_node_tells_its_transition() -> None:
    for transition in TRANSITIONS:
        for dim, rows in ((0, 1), (1, 1), (0, 3), (2, 4)):
            function, options = options_of(transition, 8, dim, rows)
            graph = fx.Graph()
            node = graph.call_function(function, (graph.placeholder("x"),), options)
            assert transition_of(node) == transition, transition
            assert ("features" in options) == (State.FEATURES in transition), transition
            by_batch = State.BATCH in transition
            assert (options.get("dim", 0), options.get("rows", 1)) == ((dim, rows) if by_batch else (0, 1)), transition
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


def test_both_ways_are_moves_and_gradients_end_in_the_state_of_their_value() -> None:
    for transition in TRANSITIONS:
        source, target = transition
        assert transition.move in MOVES.values() and transition.adjoint.move in MOVES.values(), transition
        assert transition.adjoint == (target.gradient, source.gradient), transition
        assert source.gradient.gradient in (source, State.REPLICATE), transition


def test_parts_cost_what_the_closed_forms_say() -> None:
    """LAYOUTS 2: v f for gathers and reduce-scatters, 2 v f for all-reduces, v f / k for an all-to-all."""
    v = 1024.0
    for transition, ranks in product(TRANSITIONS, (2, 3)):
        even, uneven, f = Extents((5,) * ranks, (7,) * ranks), Extents((3, 0, 2), (1, 4, 0)), (ranks - 1) / ranks
        closed = {"all-gather": v * f, "reduce-scatter": v * f, "all-reduce": 2 * v * f, "all-to-all": v * f / ranks}
        for move, what in zip((transition, transition.adjoint), TABLE[transition][1:], strict=True):
            expected = closed.get(what.partition(" of ")[0], 0.0)
            for index in range(ranks):
                assert nbytes_sent(move, v, even, index) == pytest.approx(expected), move
                own = v * fractions_sent(what, uneven, index)
                assert nbytes_sent(move, v, uneven, index) == pytest.approx(own), move


def test_a_value_without_examples_costs_nothing() -> None:
    for transition in TRANSITIONS:
        assert nbytes_sent(transition, 0.0, Extents((0, 0), (0, 0)), 1) == 0
