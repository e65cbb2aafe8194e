"""The pass runner: what a pass requires and ensures is checked, and a watcher sees every step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from splitc import units
from splitc.checks.graph import has_costs
from splitc.errors import InternalError
from splitc.ir.graph import tensor_spec
from splitc.ir.pass_manager import Check, Pass, run_passes
from splitc.ir.program import Program
from tests.support.capturing import capture
from tests.support.compiled import class_batch


def program() -> Program:
    x, y = class_batch((4, 6))
    return capture(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 10)), (x,), y, F.cross_entropy)


@dataclass(frozen=True)
class Rename(Pass[Program, Program]):
    to: str = "other"

    def run(self, program: Program) -> Program:
        return replace(program, name=self.to)


@dataclass(frozen=True)
class NeedsCosts(Rename):
    requires: ClassVar[tuple[Check, ...]] = (has_costs,)


@dataclass(frozen=True)
class PromisesCosts(Rename):
    ensures: ClassVar[tuple[Check, ...]] = (has_costs,)


def test_passes_run_in_order_and_leave_the_program_given_as_it_was() -> None:
    given = program()
    seen: list[tuple[str, str]] = []
    made = run_passes(given, [Rename("a"), Rename("b")], lambda each, p, _: seen.append((each.name, p.name)))
    assert (given.name, made.name) == ("Sequential", "b") and seen == [("rename", "a"), ("rename", "b")]


@pytest.mark.slow
def test_a_pass_that_cannot_start_names_what_is_missing() -> None:
    with pytest.raises(InternalError, match=r"rename cannot start:\n  - has_costs: layer 0 .* has no price"):
        run_passes(program(), [NeedsCosts()])


def test_a_broken_promise_names_the_pass_and_every_problem() -> None:
    with pytest.raises(InternalError, match=r"broke the program:\n  - has_costs: layer 0 .*\n  - has_costs: layer 2"):
        run_passes(program(), [PromisesCosts()])


def test_numbers_are_scaled_only_when_printed() -> None:
    for text, expected in [
        (units.nbytes(234_500_000), "234 MB"),
        (units.nbytes(0), "0 B"),
        (units.nbytes(1_024), "1.02 kB"),
        (units.count(58_631_144), "58.6 M"),
        (units.flops(2.4e11), "240 GFLOP"),
        (units.seconds(0.00031), "310 us"),
        (units.seconds(0), "0 s"),
        (units.seconds(12.3), "12.3 s"),
        (units.bandwidth(1.25e9), "10.0 Gbit/s"),
    ]:
        assert text == expected


def test_specs_know_shapes_and_bytes_at_any_batch() -> None:
    spec = tensor_spec(next(n for n in program().graph.nodes if n.op == "call_module"))
    assert spec.at(5) == (5, 8) and spec.nbytes(5) == 160 and spec.template() == (-1, 8) and spec.dtype == torch.float32
