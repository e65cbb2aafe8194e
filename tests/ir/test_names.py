"""Suggestions for names that are nearly right."""

from __future__ import annotations

import pytest

from splitc.ir.names import near_name

KNOWN = ("data_parallel", "layer_separation", "Auto")


@pytest.mark.parametrize(
    ("wrong", "suggestion"),
    [
        ("layer_seperation", "did you mean layer_separation? "),
        ("DATA_PARALLEL", "did you mean data_parallel? "),
        ("auto", "did you mean Auto? "),
        ("pipeline", ""),
    ],
)
def test_the_nearest_name_is_suggested_as_it_is_written(wrong: str, suggestion: str) -> None:
    assert near_name(wrong, KNOWN) == suggestion
