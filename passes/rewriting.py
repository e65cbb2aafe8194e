"""The passes that turn a placed program into one for each part, in reading order."""

from __future__ import annotations

from passes.bucket_gradients import BucketGradients
from passes.insert_comm import InsertComm
from passes.insert_pulls import InsertPulls
from passes.late_multiply import LateMultiply
from passes.scale_loss import ScaleLoss
from passes.schedule import Schedule
from passes.seed_dropout import SeedDropout
from passes.shard_layers import ShardLayers
from passes.split_ranks import SplitRanks
from passes.synchronise_norms import SynchroniseNorms
from splitc.pipeline import Pass


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
