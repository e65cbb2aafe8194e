"""Specs at any batch, cuts, and what a placed and a lowered program know."""

from __future__ import annotations

import torch

from splitc.ir.program import TensorSpec
from tests.support.small_programs import Row, place, small_program

SPEC = TensorSpec((3, 8), torch.float16, batch_dim=0)


def test_a_spec_scales_its_batch_dimension_by_the_rows_of_an_example() -> None:
    assert (SPEC.at(5), SPEC.template(), SPEC.nbytes(5)) == ((15, 8), (-1, 8), 240)
    mask = TensorSpec((3, 8), torch.float16)
    assert (mask.at(5), mask.template(), mask.rows) == ((3, 8), (3, 8), 0)


def test_a_parameter_that_layers_of_two_roles_use_is_tied_over_their_ranks() -> None:
    rows = (
        Row("conv1", ("images",), parameters=100, width=64, flops=4e5),
        Row("fc1", ("conv1",), parameters=50_000, width=64, flops=2e4),
        Row("fc2", ("fc1",), width=64, flops=1e4, shares="conv1"),
        Row("loss", ("fc2", "labels")),
    )
    program = small_program(rows)
    plan = place(program, 3)
    roles = {layer: placed.role for layer, placed in plan.placements.items()}
    assert roles["conv1"] != roles["fc2"], "so the parameter is in both roles"
    assert program.placed(plan).tied == {"conv1.weight": (0, 1, 2)}
