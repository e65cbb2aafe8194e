"""Dropouts become nodes that are seeded by layer and example; other random ops are refused."""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.errors import CaptureError
from splitc.ir import comm_ops
from splitc.ir.pass_manager import run_pass
from splitc.passes.seed_dropout import SeedDropout
from tests.support.printed import placed, printed, program_after, program_before, two_layers


def test_a_dropout_is_seeded_by_the_path_of_its_module() -> None:
    program = placed(two_layers(nn.Dropout(0.25)), 2, "data_parallel")
    assert printed(program_before(SeedDropout, program)) == cleandoc("""
    def Sequential(input, target):
        input_1 = input                                     # f32[b, 8]
        target = input                                      # f32[b, 5]
        fc1 = self.fc1(input_1)                             # f32[b, 6]  fc1
        middle = dropout(fc1, p=0.25, training=True)        # f32[b, 6]  fc1
        fc2 = self.fc2(middle)                              # f32[b, 5]  fc2
        mse_loss = mse_loss(fc2, target, reduction='mean')  # f32[]  fc2
        mse_loss_scale_by_share = scale_by_share(mse_loss)  # f32[]  fc2
        return mse_loss_scale_by_share
    """)
    assert printed(program_after(SeedDropout, program)) == cleandoc("""
    def Sequential(input, target):
        input_1 = input                                     # f32[b, 8]
        target = input                                      # f32[b, 5]
        fc1 = self.fc1(input_1)                             # f32[b, 6]  fc1
        middle = dropout(fc1, 0.25, layer='middle')         # f32[b, 6]  fc1
        fc2 = self.fc2(middle)                              # f32[b, 5]  fc2
        mse_loss = mse_loss(fc2, target, reduction='mean')  # f32[]  fc2
        mse_loss_scale_by_share = scale_by_share(mse_loss)  # f32[]  fc2
        return mse_loss_scale_by_share
    """)


def test_a_dropout_that_drops_nothing_is_removed() -> None:
    program = placed(two_layers(nn.Dropout(0.0)), 2, "data_parallel")
    assert printed(program_before(SeedDropout, program)) == cleandoc("""
    def Sequential(input, target):
        input_1 = input                                     # f32[b, 8]
        target = input                                      # f32[b, 5]
        fc1 = self.fc1(input_1)                             # f32[b, 6]  fc1
        middle = dropout(fc1, p=0.0, training=True)         # f32[b, 6]  fc1
        fc2 = self.fc2(middle)                              # f32[b, 5]  fc2
        mse_loss = mse_loss(fc2, target, reduction='mean')  # f32[]  fc2
        mse_loss_scale_by_share = scale_by_share(mse_loss)  # f32[]  fc2
        return mse_loss_scale_by_share
    """)
    assert printed(program_after(SeedDropout, program)) == cleandoc("""
    def Sequential(input, target):
        input_1 = input                                     # f32[b, 8]
        target = input                                      # f32[b, 5]
        fc1 = self.fc1(input_1)                             # f32[b, 6]  fc1
        fc2 = self.fc2(fc1)                                 # f32[b, 5]  fc2
        mse_loss = mse_loss(fc2, target, reduction='mean')  # f32[]  fc2
        mse_loss_scale_by_share = scale_by_share(mse_loss)  # f32[]  fc2
        return mse_loss_scale_by_share
    """)


def test_a_dropout_module_that_is_used_twice_has_two_labels() -> None:
    twice = nn.Dropout(0.25)
    program = program_after(SeedDropout, placed(two_layers(nn.Sequential(twice, twice)), 1, "single_device"))
    labels = [node.kwargs["layer"] for node in program.graph.nodes if node.target is comm_ops.dropout]
    assert len(labels) == len(set(labels)) == 2, labels


@pytest.mark.parametrize(
    ("function", "words"),
    [(F.alpha_dropout, "alpha_dropout cannot be seeded by example"), (F.rrelu, "rrelu is random")],
)
def test_a_random_op_that_capture_let_through_is_refused(function: Callable[..., Tensor], words: str) -> None:
    program = program_before(SeedDropout, placed(two_layers(nn.Dropout(0.25)), 2, "data_parallel"))
    next(node for node in program.graph.nodes if node.name == "middle").target = function
    with pytest.raises(CaptureError, match=words):
        run_pass(SeedDropout(), program)
