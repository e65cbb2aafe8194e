"""What torch's allocator hands out on a GPU in a step, next to what was predicted without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples import alexnet, mlp, transformer
from splitc.cost_models.memory.memory_check import memory_of_all
from tests.support.compiled import class_batch, compiled
from tests.support.measured_memory import in_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]

LARGE: dict[str, Callable[[], tuple[nn.Module, Any, Any, Any]]] = {
    "alexnet": lambda: (alexnet.alexnet(), *class_batch((64, 3, 224, 224), 1000), F.cross_entropy),
    "mlp": lambda: (mlp.mlp(3072, (8192, 8192, 8192)), *class_batch((256, 3, 32, 32)), F.cross_entropy),
    "transformer": lambda: (
        transformer.transformer(width=768, depth=6, heads=12, time=256),
        transformer.example(16, 256)[0],
        transformer.target(16, 256),
        transformer.loss,
    ),
}
"""Large enough that the libraries' own workspaces, some ten megabytes, are few of their bytes."""


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("name", LARGE)
def test_the_peak_on_a_gpu_is_within_a_tenth(name: str, autocast: torch.dtype | None, tmp_path: Path) -> None:
    assert_within_a_tenth(name, "single_device", 1, tmp_path, autocast)


@pytest.mark.parametrize("name", ["alexnet", "mlp"])
@pytest.mark.parametrize("strategy", ["data_parallel", "layer_separation", "hybrid_single", "modulo_shard(mp=2)"])
def test_so_it_is_on_ranks_that_exchange(name: str, strategy: str, tmp_path: Path) -> None:
    assert_within_a_tenth(name, strategy, 2, tmp_path)


def assert_within_a_tenth(
    name: str, strategy: str, world: int, folder: Path, autocast: torch.dtype | None = None
) -> None:
    done = compiled(*LARGE[name](), world, strategy, autocast=autocast)
    for memory, real in zip(memory_of_all(done.program), in_processes(done, folder), strict=True):
        assert (memory.parameters, memory.gradients) == (real.parameters, real.gradients)
        assert memory.optimizer_state == real.optimizer_state
        if memory.peak > 3e8:  # a rank that holds little has mostly the libraries' workspaces
            assert memory.peak == pytest.approx(real.peak, rel=0.1)
