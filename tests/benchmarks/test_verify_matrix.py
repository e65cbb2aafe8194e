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
from tests.support.sampling import sampled


@cache
def of_matrix(name: str) -> tuple[Model, Program]:
    """A model of the matrix, and what is known of it, once for all plans."""
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, model.program()


def cell(name: str, world: int, strategy: str, **options: Any) -> CompiledProgram:
    model, known = of_matrix(name)
    return compiled(model.module, model.example, model.target, model.loss, world, strategy, analysed=known, **options)


SAMPLE = [
    ("alexnet", 3, "hybrid_single"),
    ("alexnet", 4, "modulo_shard(mp=2,scheme=B/K)"),
    ("alexnet", 4, "layer_separation(ranks=2+1+1)"),
    ("vgg", 2, "modulo_shard(mp=2,scheme=B)"),
    ("vgg", 3, "late_multiply"),
    ("transformer", 2, "hybrid_single"),
    ("transformer", 3, "modulo_shard(mp=3,scheme=BK)"),
    ("transformer", 4, "late_multiply"),
    ("recommender", 3, "layer_separation(ranks=1+1+1)"),
    ("recommender", 4, "modulo_shard(mp=4,scheme=B/K)"),
    ("mlp", 3, "data_parallel(all_reduce=recursive_doubling)"),
    ("mlp", 4, "modulo_shard(mp=4,scheme=B)"),
]


@sampled(("name", "world", "strategy"), SAMPLE, everyday=SAMPLE[-2:-1])
def test_a_sample_of_the_matrix_is_one_process_in_float64(name: str, world: int, strategy: str) -> None:
    result = cell(name, world, strategy).verify(dtype=torch.float64)
    assert result.holds and result.tolerance == 1e-9, str(result)


@sampled(("name", "world", "strategy"), SAMPLE[1::2], everyday=SAMPLE[-1:])
def test_so_it_is_in_float32(name: str, world: int, strategy: str) -> None:
    result = cell(name, world, strategy).verify()
    assert result.holds and result.tolerance == 1e-5, str(result)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_whole_matrix_is_one_process(name: str, world: int, dtype: torch.dtype) -> None:
    for strategy in strategies(world):
        result = cell(name, world, strategy).verify(dtype=dtype)
        assert result.holds, f"{strategy}\n{result}"
