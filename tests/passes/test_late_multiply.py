"""Which linear layers become late_multiply nodes."""

from __future__ import annotations

from inspect import cleandoc

import pytest

from splitc.errors import InternalError
from splitc.ir.graph import update_info
from splitc.ir.pass_manager import run_pass
from splitc.ir.placements import Placement
from splitc.passes.late_multiply import LateMultiply
from tests.support.printed import changes, placed, program_before, two_layers


def test_a_linear_layer_with_sync_late_multiply_is_replaced_and_the_others_stay() -> None:
    program = placed(two_layers(), 2, "late_multiply", pins={"fc1": Placement(sync="all_reduce")})
    assert changes(LateMultiply, program) == cleandoc("""
    - fc2 = self.fc2(middle) # f32[b, 5] all
    + fc2_weight = self.fc2.weight # all
    + fc2_bias = self.fc2.bias # all
    + fc2 = late_multiply(middle, fc2_weight, fc2_bias) # f32[b, 5] all
    """)


def test_a_plan_without_late_multiply_changes_nothing() -> None:
    program = program_before(LateMultiply, placed(two_layers(), 2, "data_parallel"))
    assert LateMultiply().run(program) is program


def test_the_check_names_the_pass_and_a_node_without_source_line() -> None:
    program = program_before(LateMultiply, placed(two_layers(), 2, "late_multiply"))
    update_info(next(node for node in program.graph.nodes if node.name == "middle"), source="")
    with pytest.raises(InternalError, match=r"late-multiply broke the program(.|\n)*middle has no source line"):
        run_pass(LateMultiply(), program)
