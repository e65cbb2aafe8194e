"""A model whose parameters alone exceed what a rank may use: trained by four ranks, evaluated and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.compiled import CompiledProgram
from splitc.errors import PlacementError
from tests.support.compiled import compiled
from tests.support.file_memory import FileMemory, in_processes

WIDTH = 2048


def made(strategy: str, world: int, model: nn.Module, data: tuple[Tensor, Tensor], **options: Any) -> CompiledProgram:
    return compiled(model, *data, F.cross_entropy, world, strategy, **options)


@pytest.mark.slow
@pytest.mark.processes
def test_subnets_train_evaluate_and_export_a_model_that_exceeds_the_limit_of_a_rank(tmp_path: Path) -> None:
    hidden = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())]
    model = nn.Sequential(nn.Linear(32, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), *hidden, nn.Linear(WIDTH, 4))
    whole = sum(tensor.nbytes for tensor in model.state_dict().values())
    limit = 0.99 * whole
    data = torch.randn(16, 32), torch.randint(4, (16,))
    for strategy, world in (("single_device", 1), ("data_parallel", 4)):
        with pytest.raises(PlacementError, match="of memory and has"):
            made(strategy, world, model, data, memory=limit)
    alone = trained(made("single_device", 1, model, data), tmp_path / "one")[0]
    ranks = trained(made("independent_subnets(local_steps=2)", 4, model, data, memory=limit), tmp_path / "four")
    for found in ranks:
        assert found.held < 0.26 * whole
        assert found.trained < 0.55 * alone.trained, (found, alone)
        assert found.exporting < 0.15 * whole
    state = torch.load(tmp_path / "four" / "model.pt", weights_only=True)
    model.load_state_dict(state)
    assert not any(torch.isnan(tensor).any() for tensor in state.values())


def trained(program: CompiledProgram, folder: Path) -> list[FileMemory]:
    folder.mkdir()
    return in_processes(program, folder, steps=3)
