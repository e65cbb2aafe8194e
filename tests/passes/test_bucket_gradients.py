"""BucketGradients: which gradients travel together, and in which order."""

from __future__ import annotations

from dataclasses import replace
from textwrap import dedent

import torch

from splitc.ir.program import LoweredProgram
from splitc.passes.bucket_gradients import BucketGradients
from tests.support.pair import placed_pair
from tests.support.printed import program_before


def bucketed(program: LoweredProgram, nbytes: int = 16_000_000) -> str:
    """Run the pass and print the buckets of each stage."""
    return buckets_of(BucketGradients(nbytes, alone=nbytes).run(program))


def buckets_of(program: LoweredProgram) -> str:
    """Print the buckets of each stage, a bucket a line."""
    return "\n".join(
        f"{stage.role}: {kind}{number}: {' '.join(bucket)}"
        for stage in program.stages
        for kind, buckets in (("bucket", stage.buckets), ("served", stage.served))
        for number, bucket in enumerate(buckets)
    )


def test_buckets_are_filled_in_the_order_of_backward_up_to_their_size() -> None:
    before = program_before(BucketGradients, placed_pair(2, "data_parallel"))
    assert buckets_of(before) == ""
    assert bucketed(before) == "all: bucket0: b.bias b.weight a.bias a.weight"
    # b holds 4 * (5 + 5 * 6) bytes, and a.weight alone 4 * 6 * 8
    few = ["b.bias b.weight", "a.weight", "a.bias"]
    assert bucketed(before, 140).splitlines() == [f"all: bucket{k}: {names}" for k, names in enumerate(few)]
    alone = ["b.bias", "b.weight", "a.bias", "a.weight"]
    assert bucketed(before, 1).splitlines() == [f"all: bucket{k}: {name}" for k, name in enumerate(alone)]


def test_a_bucket_has_one_dtype() -> None:
    before = program_before(BucketGradients, placed_pair(2, "data_parallel"))
    wide = {"a.bias": replace(before.tensors["a.bias"], dtype=torch.float64)}
    mixed = replace(before, tensors={**before.tensors, **wide})
    assert bucketed(mixed) == dedent("""\
        all: bucket0: b.bias b.weight
        all: bucket1: a.bias
        all: bucket2: a.weight""")


def test_what_is_pushed_to_servers_is_served_and_not_all_reduced() -> None:
    before = program_before(BucketGradients, placed_pair(3, "parameter_server(servers=1)"))
    assert bucketed(before) == "worker: served0: b.bias b.weight a.bias a.weight"


def test_a_role_on_one_rank_has_no_buckets() -> None:
    before = program_before(BucketGradients, placed_pair(3, "layer_separation(n_c=2, n_f=1)"))
    assert bucketed(before) == "trunk: bucket0: a.bias a.weight"
