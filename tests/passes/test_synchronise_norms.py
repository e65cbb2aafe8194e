"""Which BatchNorms normalise over the global batch."""

from __future__ import annotations

from inspect import cleandoc

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.errors import PlacementError
from splitc.passes.synchronise_norms import SynchroniseNorms
from tests.support.printed import changes, placed, printed, program_after, program_before, two_layers


class FunctionalNorm(nn.Module):
    """BatchNorm as a function, which has no module to synchronise."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


def test_a_batchnorm_of_several_ranks_becomes_a_batch_norm_over_all_of_them() -> None:
    program = placed(two_layers(nn.BatchNorm1d(6, affine=False)), 2, "data_parallel(sync_batchnorm=True)")
    assert changes(SynchroniseNorms, program) == cleandoc("""
    - middle = self.middle(fc1) # f32[b, 6] all
    + middle_1 = self.middle # all
    + middle = batch_norm(fc1, middle_1) # f32[b, 6] all
    """)


def test_a_batchnorm_stays_a_module() -> None:
    for world, strategy in [(2, "data_parallel"), (1, "single_device(sync_batchnorm=True)")]:
        program = placed(two_layers(nn.BatchNorm1d(6)), world, strategy)
        assert printed(program_after(SynchroniseNorms, program)) == printed(
            program_before(SynchroniseNorms, program)
        ), strategy


def test_a_batchnorm_that_is_a_function_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"F\.batch_norm cannot be synchronised; make it a module"):
        placed(two_layers(FunctionalNorm()), 2, "data_parallel(sync_batchnorm=True)")


@pytest.mark.slow
def test_an_instance_norm_with_running_statistics_must_see_the_whole_batch() -> None:
    norm = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten())
    program_after(SynchroniseNorms, placed(two_layers(norm), 1, "single_device"))
    with pytest.raises(
        PlacementError, match="middle_1 is an InstanceNorm with running statistics, means over all examp"
    ):
        program_after(SynchroniseNorms, placed(two_layers(norm), 2, "data_parallel"))
