"""The passes that turn a placed program into one for each part, in reading order."""

from __future__ import annotations

from splitc.ir.pass_manager import Pass
from splitc.passes.bucket_gradients import BucketGradients
from splitc.passes.insert_comm import InsertComm
from splitc.passes.insert_pulls import InsertPulls
from splitc.passes.late_multiply import LateMultiply
from splitc.passes.scale_loss import ScaleLoss
from splitc.passes.schedule import Schedule
from splitc.passes.seed_dropout import SeedDropout
from splitc.passes.shard_layers import ShardLayers
from splitc.passes.split_ranks import SplitRanks
from splitc.passes.synchronise_norms import SynchroniseNorms


def rewrites() -> list[Pass]:
    """One of each."""
    return [
        ScaleLoss(),
        SeedDropout(),
        InsertComm(),
        ShardLayers(),
        LateMultiply(),
        SynchroniseNorms(),
        SplitRanks(),
        BucketGradients(),
        InsertPulls(),
        Schedule(),
    ]
