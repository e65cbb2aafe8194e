"""Values of files and options, read as the types of dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from splitc.ir.decode import Keys, at_least, decode, hints_of, more_than, one_of


@dataclass(frozen=True)
class Part:
    size: Annotated[int, at_least(1)]
    kind: Annotated[str, one_of("round", "square")] | None = None


@dataclass(frozen=True)
class Whole:
    name: str
    flat: Annotated[bool, one_of(True, False)] = False
    parts: tuple[Part, ...] = ()
    by_name: Mapping[str, Part | str] = field(default_factory=dict)
    rates: Annotated[Mapping[str, Annotated[float, more_than(0)]], Keys(("in", "out"), flat=True)] = field(
        default_factory=dict
    )


def test_tables_become_dataclasses_lists_tuples_and_flat_keys_a_table() -> None:
    data = {"name": "it", "parts": [{"size": 2, "kind": "round"}], "by_name": {"a": {"size": 1}, "b": "c"}, "in": 2.5}
    values, problems = decode(hints_of(Whole), data, needed=["name"])
    assert not problems
    assert Whole(**values) == Whole("it", False, (Part(2, "round"),), {"a": Part(1), "b": "c"}, {"in": 2.5})


def test_everything_that_is_wrong_is_told_by_its_path_and_the_rest_is_read() -> None:
    data = {"parts": [{"size": 0}], "by_name": {"a": {"siz": 1}, "b": {"size": 1, "kind": "sqare"}, "c": "d"}, "out": 0}
    data["flat"] = "truly"
    values, problems = decode(hints_of(Whole), data, needed=["name"])
    assert values == {"by_name": {"c": "d"}, "rates": {}}
    assert sorted(map(str, problems)) == [
        "by_name: a: siz is an unknown key; did you mean size? there are size, kind",
        "by_name: a: size is missing; it must be a whole number of at least 1",
        "by_name: b: kind is 'sqare'; did you mean square? it must be one of round, square",
        "flat is 'truly'; did you mean True? it must be one of True, False",
        "name is missing; it must be a text",
        "out is 0; it must be a finite number of more than 0",
        "parts: number 0: size is 0; it must be a whole number of at least 1",
    ]
