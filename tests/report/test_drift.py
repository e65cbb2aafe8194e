"""Which plan training says would be faster, when machines or links are no longer what they were."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from splitc.cost_models.clusters.named import load_cluster
from splitc.report.drift import as_seen, faster_plan
from splitc.runtime.live import Cause
from splitc.specialise import Settings
from tests.support.compiled import analysed, compiled


@pytest.mark.slow
def test_a_network_that_drops_makes_another_plan_of_the_same_model_faster() -> None:
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
    example, target = torch.zeros(8, 64), torch.zeros(8, dtype=torch.int64)
    made = compiled(model, example, target, F.cross_entropy, 4, "data_parallel", cluster="cpu16-1gbe")
    place = Settings(4, cluster="cpu16-1gbe", strategy="data_parallel").place()
    program = analysed(model, example, target, F.cross_entropy)
    said = faster_plan(made.program, program, place, Cause(transfers=4.0, ends=(0, 1, 2, 3)))
    assert "another plan would be" in said and "compile again to take it" in said


def test_only_what_changed_is_seen_as_another_machine_or_line() -> None:
    usual = load_cluster("cpu16-1gbe")
    slow = as_seen(usual, Cause({2: 3.0}), 4)
    assert [each.ranks for each in slow.unlike] == [(2,)]
    assert slow.device_of(2).launch == 3 * usual.device.launch and slow.link_of(2) == usual.link_of(2)
    thin = as_seen(usual, Cause(transfers=2.0, ends=(1,)), 4)
    assert thin.link_of(1).bandwidth == usual.link_of(1).bandwidth / 2 and thin.link_of(0) == usual.link_of(0)
