"""The phases of a step that the simulation predicts."""

from __future__ import annotations

import pytest

from splitc.ir.wire import wire
from splitc.passes.predict import Predict
from splitc.passes.rewriting import lower
from tests.support.pair import placed_pair
from tests.support.small_programs import small_cluster


@pytest.mark.parametrize("strategy", ["data_parallel", "layer_separation", "parameter_server", "late_multiply"])
def test_a_step_is_computing_and_waiting_and_transfers_are_within_it(strategy: str) -> None:
    program = lower(placed_pair(2, strategy))
    phases = Predict(small_cluster()).run(program).plan.prediction.phases
    assert [each.rank for each in phases] == [0, 1]
    for each in phases:
        assert each.compute + each.waiting == pytest.approx(each.step)
        assert 0 < each.communication <= each.step
        assert each.sent_bytes == sum(op.sent for op in wire(program, each.rank))
