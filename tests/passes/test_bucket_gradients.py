"""BucketGradients: which gradients travel together, and in which order."""

from __future__ import annotations

from dataclasses import replace
from textwrap import dedent

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from splitc.cost_models.clusters.named import load_cluster
from splitc.ir.device import Link
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram
from splitc.passes.bucket_gradients import BucketGradients, bucket_bytes
from tests.support.compiled import compiled
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


def test_a_plan_on_a_fast_link_has_larger_buckets_of_sums_and_no_other_plan_is_changed() -> None:
    program = placed_pair(2, "data_parallel")
    assert program.plan.bucket_bytes is None and "bucket_bytes" not in program.plan.to_json()
    larger = replace(program.plan, bucket_bytes=140)
    assert Plan.from_json(larger.to_json()) == larger and larger.hash != program.plan.hash
    before = program_before(BucketGradients, replace(program, plan=larger))
    assert bucketed(before).splitlines() == ["all: bucket0: b.bias b.weight", "all: bucket1: a.bias a.weight"]


@pytest.mark.parametrize(
    ("cluster", "world", "megabytes"),
    [
        ("v100-10gbe", 16, None),
        ("v100-25gbe", 8, None),
        ("k40-56ib", 8, None),
        ("a10-pcie-100gbe", 4, 8),
        ("a100-nvlink-200ib", 8, 31),
        ("h100-nvlink-400ib", 8, 36),
        ("a100-nvlink-400gbe", 16, 40),
    ],
)
def test_buckets_grow_with_bandwidth_times_latency_of_the_link_of_all_ranks(
    cluster: str, world: int, megabytes: int | None
) -> None:
    found = bucket_bytes(load_cluster(cluster).link_over(range(world)))
    assert found == (None if megabytes is None else megabytes * 10**6)


def test_slow_links_keep_four_megabytes_however_slow_they_are() -> None:
    for bandwidth, latency in ((12.5e6, 1e-4), (125e6, 1e-4), (125e6, 1e-3), (1e6, 0.1)):
        assert bucket_bytes(Link(bandwidth, latency)) is None
    assert bucket_bytes(Link(12.5e9, 1e-5)) is None and bucket_bytes(Link(25e9, 1e-5)) == 8_000_000


def test_the_planner_takes_the_buckets_of_the_cluster_where_gradients_are_summed() -> None:
    given = nn.Linear(6, 5), torch.randn(4, 6), torch.randint(5, (4,)), F.cross_entropy, 2
    found = {
        (cluster, strategy): compiled(*given, strategy, cluster=cluster).plan.bucket_bytes
        for cluster in ("a100-nvlink-200ib", "v100-10gbe")
        for strategy in ("data_parallel", "single_device")
    }
    assert found.pop(("a100-nvlink-200ib", "data_parallel")) == 31_000_000
    assert set(found.values()) == {None}
