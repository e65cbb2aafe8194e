"""Nested batches are taken apart by path and made again of other tensors."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from splitc.runtime.nested import at, parts, replaced, tensors
from tests.support.sampling import in_one

A, B = torch.zeros(2), torch.ones(2)
Pair = namedtuple("Pair", ("left", "right"))


@dataclass(frozen=True)
class Sample:
    image: Tensor
    size: int
    rest: Any = None


NESTED = {
    "dict": ({"a": A, "n": 3, "b": B}, [("a",), ("b",)]),
    "ordered": (OrderedDict(a=A, b={1: B}), [("a",), ("b", "1")]),
    "list": ([A, None, [B]], [("0",), ("2", "0")]),
    "named": (Pair(A, (B, "text")), [("left",), ("right", "0")]),
    "dataclass": (Sample(A, 4, Sample(B, 5)), [("image",), ("rest", "image")]),
    "object": (SimpleNamespace(a=A, b=[B], c=1), [("a",), ("b", "0")]),
}


@in_one
@pytest.mark.parametrize("name", NESTED)
def test_tensors_have_paths_and_a_copy_has_others_and_the_same_rest(name: str) -> None:
    value, paths = NESTED[name]
    assert [path for path, _ in tensors(value)] == paths
    new = {path: torch.full((2,), 7.0 + k) for k, path in enumerate(paths)}
    made = replaced(value, new)
    assert type(made) is type(value) and all(at(made, path) is new[path] for path in paths)
    assert [at(value, path) is each for path, each in zip(paths, (A, B), strict=True)] == [True, True]
    plain = [(k, v) for k, v in (parts(value) or {}).items() if not any(tensors(v))]
    assert all((parts(made) or {})[k] == v for k, v in plain)


def test_modules_and_plain_values_are_leaves_and_what_is_not_there_is_none() -> None:
    assert parts(torch.nn.Linear(2, 2)) is None and parts(3) is None and parts("text") is None
    assert at({"a": A}, ("b", "c")) is None and replaced("text", {}) == "text"
