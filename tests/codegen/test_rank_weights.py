"""The initial weights of ranks: their own parts, of which they make the stages that they make of whole weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from splitc.runtime.launch.loader import load_rank
from splitc.runtime.transport.base import Transport
from splitc.runtime.weights import first_names
from splitc.runtime.worker import Worker
from tests.support.every_strategy import Asked, everywhere, planned
from tests.support.ranks import on_ranks, on_workers


@pytest.mark.parametrize(("world", "asked"), everywhere(2, slow=(3, 4), one_in=4))
def test_a_rank_is_sent_no_more_than_it_holds(world: int, asked: Asked) -> None:
    program = planned(world, asked, norm=True)
    weights, parts = program.weights()["state"], list(program.parts())

    def stage_of(worker: Worker) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in worker.stage.state_dict().items()}

    def of_parts(transport: Transport) -> dict[str, Tensor]:
        part, own = load_rank(program.files, transport.rank), parts[transport.rank]
        return stage_of(Worker(part, transport, own, first_names(weights), None))

    expected = on_workers(program, stage_of)
    for part, stage, whole in zip(parts, on_ranks(world, of_parts), expected, strict=True):
        assert stage.keys() == whole.keys()
        assert all(torch.equal(stage[name], tensor) for name, tensor in whole.items())
        assert {name: tensor.shape for name, tensor in part.items()} == {n: t.shape for n, t in whole.items()}
