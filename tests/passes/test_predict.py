"""Predict: the phases of each rank's step, and nothing else of the plan."""

from __future__ import annotations

from dataclasses import replace
from textwrap import dedent

import pytest
import torch
import torch.nn.functional as F

import splitc
from splitc.cost_models.clusters.named import load_cluster
from splitc.ir.cluster_file import digest
from splitc.ir.placements import Placement
from splitc.ir.program import LoweredProgram
from splitc.passes.predict import Predict
from splitc.passes.rewriting import lower
from splitc.report.figures import as_json
from splitc.report.text import report
from tests.support.every_strategy import Asked, Pins, planned
from tests.support.pair import pair, placed_pair
from tests.support.printed import printed
from tests.support.small_programs import small_cluster

ROWS = Placement(holding="sharded", group=2, split="rows")
WHOLE = Placement(holding="replicated")


def predicted(program: LoweredProgram) -> str:
    """Print the predicted phases, a rank a line, in milliseconds and bytes."""
    return "\n".join(
        f"rank {each.rank}: step {1e3 * each.step:.3f} compute {1e3 * each.compute:.3f} "
        f"waiting {1e3 * each.waiting:.3f} communication {1e3 * each.communication:.3f} sent {each.sent_bytes:.0f}"
        for each in program.plan.prediction.phases
    )


PREDICTIONS = [
    (
        1,
        "single_device",
        """\
        rank 0: step 5.244 compute 5.244 waiting 0.000 communication 0.000 sent 0""",
    ),
    (
        2,
        "data_parallel",
        """\
        rank 0: step 6.512 compute 5.956 waiting 0.556 communication 0.764 sent 364
        rank 1: step 6.512 compute 5.956 waiting 0.556 communication 0.764 sent 364""",
    ),
    (
        2,
        "layer_separation",
        """\
        rank 0: step 4.516 compute 2.704 waiting 1.812 communication 0.780 sent 184
        rank 1: step 4.516 compute 2.540 waiting 1.976 communication 0.780 sent 104""",
    ),
]


def test_every_rank_computes_waits_and_sends() -> None:
    for world, strategy, expected in PREDICTIONS:
        before = lower(placed_pair(world, strategy))
        assert predicted(before) == "", strategy
        assert predicted(Predict(small_cluster()).run(before)) == dedent(expected), strategy


def test_the_plan_and_the_program_stay_as_they_were() -> None:
    cluster, before = small_cluster(), lower(placed_pair(2, "layer_separation"))
    after = Predict(cluster).run(before)
    assert after.plan == before.plan and after.plan.hash == before.plan.hash
    assert printed(after) == printed(before)
    assert after.plan.prediction.priced_on == digest(cluster)
    assert after.plan.prediction.simulated_seconds == max(each.step for each in after.plan.prediction.phases)


def test_prices_are_kept_on_the_same_numbers_and_not_on_the_same_name() -> None:
    cluster = small_cluster()
    example, target = torch.randn(4, 8), torch.randn(4, 5)
    chosen = splitc.compile(pair(), 2, example, target, loss=F.mse_loss, cluster=cluster).program
    assert chosen.plan.step_seconds > 0 and chosen.plan.prediction.cluster == cluster.name
    edited = Predict(replace(cluster, link=replace(cluster.link, latency=0.5))).run(chosen).plan.prediction
    assert not edited.priced and edited.step_seconds == 0 and edited.simulated_seconds > 0.5
    renamed = Predict(replace(cluster, name="another")).run(chosen).plan.prediction
    assert renamed.cluster == "another" and renamed.step_seconds == chosen.plan.step_seconds and renamed.priced


def test_a_slower_link_takes_longer_and_computes_the_same() -> None:
    program = lower(placed_pair(2, "data_parallel"))
    fast, slow = (Predict(small_cluster(bandwidth)).run(program).plan.prediction for bandwidth in (1e6, 1e5))
    assert slow.simulated_seconds > fast.simulated_seconds
    assert [each.compute for each in slow.phases] == pytest.approx([each.compute for each in fast.phases])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "pins", "layers"),
    [
        ("late_multiply", {}, "fc6, fc7, fc8"),
        ("data_parallel", {}, ""),
        pytest.param("modulo_shard(mp=2)", {"fc7": ROWS, "fc8": WHOLE}, "fc7, fc8", marks=pytest.mark.slow),
        pytest.param("modulo_shard(mp=2)", {"fc*": replace(ROWS, split="columns")}, "", marks=pytest.mark.slow),
    ],
)
def test_a_note_says_what_unlike_devices_have_to_compute_alike(strategy: str, pins: Pins, layers: str) -> None:
    mixed = load_cluster("mixed-v100-t4")
    cluster = replace(mixed, unlike=tuple(replace(each, ranks=(1,)) for each in mixed.unlike))
    before = planned(2, Asked(strategy, strategy, pins)).program
    program = Predict(cluster).run(before)
    assert not before.notes and as_json(program)["notes"] == list(program.notes)
    assert len(program.notes) == bool(layers)
    for note in program.notes:
        assert note.startswith(f"Tesla V100 SXM2 16 GB and T4 compute the gradients of {layers} by themselves")
        assert "may drift apart; check_replicas=1000" in " ".join(report(program).split())
