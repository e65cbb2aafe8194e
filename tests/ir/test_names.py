"""Suggestions for names that are nearly right."""

from __future__ import annotations

from splitc.ir.names import near_name

KNOWN = ("data_parallel", "layer_separation", "Auto")


def test_the_nearest_name_is_suggested_as_it_is_written() -> None:
    near = {"layer_seperation": "layer_separation", "DATA_PARALLEL": "data_parallel", "auto": "Auto"}
    assert all(near_name(wrong, KNOWN) == f"did you mean {right}? " for wrong, right in near.items())
    assert near_name("pipeline", KNOWN) == ""
