"""The text form of strategies: parsed, never evaluated."""

from __future__ import annotations

import pytest

from splitc.errors import PlacementError
from splitc.passes.planner.strategy import parse_strategy
from splitc.strategies.auto import Auto
from splitc.strategies.data_parallel import DataParallel
from splitc.strategies.layer_separation import LayerSeparation


@pytest.mark.parametrize(("text", "expected"), [
    ("auto", Auto()),
    (" data_parallel ", DataParallel()),
    ("layer_separation", LayerSeparation()),
    ("layer_separation()", LayerSeparation()),
    ("layer_separation(n_f=2)", LayerSeparation(n_f=2)),
    ("layer_separation( n_c = 3 , n_f = 1 )", LayerSeparation(3, 1)),
    (LayerSeparation, LayerSeparation()),
    (LayerSeparation(n_c=4), LayerSeparation(4)),
])  # fmt: skip
def test_a_strategy_is_a_name_a_class_or_an_instance(text: object, expected: object) -> None:
    assert parse_strategy(text) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", [LayerSeparation(3, 1), LayerSeparation(n_f=2), DataParallel()])
def test_the_text_of_a_strategy_parses_back(strategy: object) -> None:
    assert parse_strategy(str(strategy)) == strategy


@pytest.mark.parametrize(("text", "message"), [
    ("data_paralel", "unknown strategy"),
    ("layer_separation(n_c=0)", "at least 1"),
    ("layer_separation(n_c=two)", "whole number"),
    ("layer_separation(k=1)", "no option"),
    ("layer_separation(n_c=)", "no value"),
    ("data_parallel(n=1)", "no option"),
    ("layer_separation(n_c=__import__('os').system('true'))", "whole number|no option|unknown"),
    ("layer_separation(n_c=1", "unknown strategy"),
])  # fmt: skip
def test_a_wrong_strategy_is_answered_with_what_there_is(text: str, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        parse_strategy(text)
