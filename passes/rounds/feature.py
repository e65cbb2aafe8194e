"""Rounds, in the passes."""

from __future__ import annotations

from splitc.passes.features import Feature
from splitc.passes.rounds.bucket_averages import BucketAverages


class InRounds(Feature):
    """Buckets of what units average."""

    with_buckets = (BucketAverages(),)


FEATURE = InRounds()
