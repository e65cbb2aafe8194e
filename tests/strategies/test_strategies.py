"""The text form of strategies: parsed, never evaluated."""

from __future__ import annotations

from typing import Any

import pytest

from splitc.errors import PlacementError
from splitc.passes.planner.strategy import Strategy, parse_strategy
from splitc.strategies.auto import Auto
from splitc.strategies.data_parallel import DataParallel
from splitc.strategies.layer_separation import LayerSeparation

PARSED: list[tuple[Any, Strategy]] = [
    ("auto", Auto()),
    (" data_parallel ", DataParallel()),
    ("layer_separation", LayerSeparation()),
    ("layer_separation()", LayerSeparation()),
    ("layer_separation(n_f=2)", LayerSeparation(n_f=2)),
    ("layer_separation( n_c = 3 , n_f = 1 )", LayerSeparation(3, 1)),
    (LayerSeparation, LayerSeparation()),
    (LayerSeparation(n_c=4), LayerSeparation(4)),
]


def test_a_strategy_is_a_name_a_class_or_an_instance_and_its_text_parses_back() -> None:
    for given, expected in PARSED:
        assert parse_strategy(given) == expected == parse_strategy(str(expected))


def test_a_wrong_strategy_is_answered_with_what_there_is() -> None:
    for text, message in (
        ("data_paralel", "unknown strategy"),
        ("layer_separation(n_c=0)", "at least 1"),
        ("layer_separation(n_c=two)", "whole number"),
        ("layer_separation(k=1)", "no option"),
        ("layer_separation(n_c=)", "no value"),
        ("data_parallel(n=1)", "no option"),
        ("layer_separation(n_c=__import__('os').system('true'))", "whole number|no option|unknown"),
        ("layer_separation(n_c=1", "unknown strategy"),
    ):
        with pytest.raises(PlacementError, match=message):
            parse_strategy(text)
