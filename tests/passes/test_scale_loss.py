"""How each kind of loss is scaled so that the ranks' contributions sum to the loss of the global batch."""

from __future__ import annotations

from dataclasses import replace
from inspect import cleandoc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from splitc.errors import PlacementError
from splitc.passes.scale_loss import ScaleLoss
from tests.support.printed import changes, placed, program_after, two_layers


def masked(scores: Tensor, target: Tensor) -> Tensor:
    """The sum over the positive targets, divided by their number."""
    mask = (target > 0).float()
    return (scores * mask).sum() / mask.sum()


def normalised(scores: Tensor, target: Tensor) -> Tensor:
    """A sum divided by one of the scores, which takes no part in backward."""
    return (scores * target).sum() / (scores.detach() ** 2).sum()


def test_a_mean_is_scaled_by_the_share_of_the_rank() -> None:
    program = placed(two_layers(), 2, "data_parallel")
    assert changes(ScaleLoss, program) == cleandoc("""
    - return mse_loss
    + mse_loss_scale_by_share = scale_by_share(mse_loss) # f32[] fc2
    + return mse_loss_scale_by_share
    """)


def test_a_cross_entropy_becomes_a_sum_divided_by_the_weight_of_the_global_batch() -> None:
    program = placed(two_layers(), 2, "data_parallel", target=torch.tensor([0, 1, 2, 3]), loss=F.cross_entropy)
    assert changes(ScaleLoss, program) == cleandoc("""
    - cross_entropy = cross_entropy(fc2, target, reduction='mean') # f32[] fc2
    + cross_entropy = cross_entropy(fc2, target, reduction='sum') # f32[] fc2
    - return cross_entropy
    + cross_entropy_weight = global_weight(target) # i64[] fc2
    + loss = truediv(cross_entropy, cross_entropy_weight) # f32[] fc2
    + return loss
    """)


def test_the_denominator_of_a_quotient_is_all_reduced() -> None:
    program = placed(two_layers(), 2, "data_parallel", loss=masked)
    assert changes(ScaleLoss, program) == cleandoc("""
    + sum_2_all_reduce_scalar = all_reduce_scalar(sum_2) # f32[] fc2
    - truediv = truediv(sum_1, sum_2) # f32[] fc2
    + truediv = truediv(sum_1, sum_2_all_reduce_scalar) # f32[] fc2
    """)


def test_a_loss_of_the_whole_batch_on_one_rank_stays_as_it_is() -> None:
    program = placed(two_layers(), 1, "single_device")
    assert program_after(ScaleLoss, program) is program


def test_a_denominator_that_depends_on_the_model_cannot_be_summed_by_microbatch() -> None:
    program = placed(two_layers(), 2, "modulo_shard(mp=2, scheme=BK)", loss=normalised)
    groups = {role: replace(group, scheme="B") for role, group in program.plan.groups.items()}
    microbatched = program.placed(replace(program.plan, groups=groups))
    with pytest.raises(PlacementError, match=r"depends on fc2 .* cannot be summed by microbatch; use scheme=BK"):
        program_after(ScaleLoss, microbatched)
