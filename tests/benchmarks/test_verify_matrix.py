"""The matrix of the benchmark: the examples under every exact strategy train exactly as one process does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.verify_matrix import MODELS, Model, strategies
from splitc.compiled import CompiledProgram
from splitc.ir.program import Program
from tests.support.compiled import compiled
from tests.support.sampling import thinned

F32, F64 = torch.float32, torch.float64


@cache
def of_matrix(name: str) -> tuple[Model, Program]:
    """A model of the matrix, and what is known of it, once for all plans."""
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, model.program()


def cell(name: str, world: int, strategy: str, **options: Any) -> CompiledProgram:
    model, known = of_matrix(name)
    return compiled(model.module, model.example, model.target, model.loss, world, strategy, analysed=known, **options)


CELLS = [(name, (4, 3, 2)[k % 3], k % 8, F32 if k == 1 else F64) for k, name in enumerate(MODELS)]
"""Of the worlds, eighths of all strategies and precisions that the benchmark tries, one for each model."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world", "first", "dtype"), thinned(CELLS))
def test_a_model_of_the_matrix_is_one_process_under_every_eighth_strategy(
    name: str, world: int, first: int, dtype: torch.dtype
) -> None:
    for strategy in [*strategies(world)][first::8]:
        result = cell(name, world, strategy).verify(steps=2, dtype=dtype)
        assert result.holds and result.tolerance == (1e-9 if dtype == F64 else 1e-5), f"{strategy}\n{result}"


@pytest.mark.slow
def test_a_cell_of_the_matrix_is_one_process() -> None:
    assert cell("mlp", 4, "modulo_shard(mp=4,scheme=B)").verify(steps=2, dtype=F64).holds
