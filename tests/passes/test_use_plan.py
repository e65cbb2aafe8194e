"""UsePlan: a plan that was made before, for the same model only."""

from __future__ import annotations

from dataclasses import replace
from textwrap import dedent

import pytest

from splitc.errors import PlacementError
from splitc.ir.pass_manager import run_pass
from splitc.ir.plan import Plan
from splitc.passes.use_plan import UsePlan
from tests.support.pair import analysed_pair, placed_pair
from tests.support.printed import printed


def plan() -> Plan:
    return placed_pair(2, "layer_separation").plan


def test_the_program_is_placed_as_the_plan_says() -> None:
    program = analysed_pair()
    after = run_pass(UsePlan(plan(), "c0ffee"), program)
    assert printed(after) == dedent("""\
        def Sequential(input, target):
            input_1 = input                                   # f32[b, 8]
            target = input                                    # f32[b, 5]
            a = self.a(input_1)                               # f32[b, 6]  a
            b = self.b(a)                                     # f32[b, 5]  b
            mse_loss = mse_loss(b, target, reduction='mean')  # f32[]  b
            return mse_loss""")
    assert {layer: placed.role for layer, placed in after.plan.placements.items()} == {"a": "trunk", "b": "head"}
    assert after.plan == replace(plan(), model="c0ffee"), "the plan is now one for this model"


def test_a_plan_for_a_model_of_the_same_layers_but_another_fingerprint_is_refused() -> None:
    with pytest.raises(PlacementError, match="another model than Sequential or another batch; compile without it"):
        UsePlan(replace(plan(), model="abad1dea"), "c0ffee").run(analysed_pair())


def test_layers_that_the_plan_misses_or_adds_are_named() -> None:
    other = {"a": plan().placements["a"], "c": plan().placements["b"]}
    with pytest.raises(
        PlacementError, match=r"'c' matches no layer; the first are a, b(.|\n)*nothing matches b; place them"
    ):
        UsePlan(replace(plan(), placements=other), "").run(analysed_pair())
