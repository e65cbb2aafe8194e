"""What every strategy promises of a run: recorded bytes, bit-for-bit checkpoints, a whole file, the model's outputs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from splitc.cost_models.simulation.timeline import simulate
from splitc.runtime.transport.base import Transport
from splitc.runtime.transport.phases import phases
from splitc.runtime.transport.recorder import Recorder, Step
from splitc.runtime.worker import Worker
from tests.cost_models.simulation.test_timeline import toy
from tests.runtime.checkpoints.test_resume import after, assert_equal, batches_of, steps
from tests.support.every_strategy import Asked, Small, everywhere, images, planned
from tests.support.ranks import adam, on_ranks, on_workers, part_of, worker_of

RECORDED = 2


@pytest.mark.parametrize(("world", "asked"), everywhere(3, one_in=12)[::2] + everywhere(slow=(4,))[1::4])
def test_a_run_is_recorded_resumed_exported_and_predicts(world: int, asked: Asked, tmp_path: Path) -> None:
    """The last batch to predict is smaller than the batches of training."""
    program = planned(world, asked, norm=True)
    batches = batches_of(program)
    first, *rest = program.plan.local_batches
    sizes = [first - (first > 2), *rest]
    last = images(sum(sizes))

    def at_once(transport: Transport) -> Any:
        recorder = Recorder(transport)
        worker = worker_of(program, recorder, adam)
        recorder.align()
        counted = [0]
        for batch in batches[:RECORDED]:
            with recorder.step():
                steps(worker, [batch])
            counted.append(worker.rank.sent_bytes)
        steps(worker, batches[RECORDED:3])
        worker.save(tmp_path / "run")
        found = after(worker, steps(worker, batches[3:]))
        worker.export(tmp_path / "model.pt")
        worker.use_sizes(sizes)
        sent = [b - a for a, b in pairwise(counted)]
        return found, recorder.steps, sent, worker.state_dict(), worker.predict(*part_of(worker, last, sizes))

    def resumed(worker: Worker) -> Any:
        assert worker.resume(tmp_path / "run") == 3
        return after(worker, steps(worker, batches[3:]))

    found, recorded, sent, states, outputs = zip(*on_ranks(world, at_once), strict=True)
    assert_equal(on_workers(program, resumed, optimizer=adam), list(found))
    assert_exported_and_predicted(tmp_path / "model.pt", states[0], last[0], outputs)
    assert [k for k, output in enumerate(outputs) if output is not None] == list(
        program.plan.roles[program.plan.reader]
    )
    predicted = simulate(program.program, toy()).phases
    for k in range(RECORDED):
        for rank, each in enumerate(phases([own[k] for own in recorded])):
            assert each.rank == rank and each.sent_bytes == sent[rank][k]
            rounding = len(recorded[rank][k].operations)  # the prediction has parts of bytes
            assert each.sent_bytes == pytest.approx(predicted[rank].sent_bytes, abs=rounding)
            assert_tiled(recorded[rank][k], each)


def assert_tiled(step: Step, each: Any) -> None:
    """A step is computing and waiting, and each operation stands within it."""
    assert each.compute + each.waiting == pytest.approx(each.step) and each.compute >= 0 <= each.waiting
    assert 0 < each.communication <= each.step
    assert all(op.waits and step.begin <= op.issued <= op.completed <= step.end for op in step.operations)


def assert_exported_and_predicted(file: Path, state: Any, batch: Tensor, outputs: tuple[Any, ...]) -> None:
    whole = torch.load(file, weights_only=True)
    assert_equal(whole, state)
    model = Small(norm=True)
    model.load_state_dict(whole)
    got = torch.cat([output for output in outputs if output is not None])
    torch.testing.assert_close(got, model.eval()(batch), rtol=1e-5, atol=1e-5)
