"""Ranks on a GPU: NCCL with one rank, and several ranks that share one GPU, on gloo through the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.every_strategy import planned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]

SHARED = [
    "data_parallel",
    "layer_separation",
    "hybrid_single",
    "late_multiply",
    "modulo_shard(mp=2)",
    "parameter_server",
]


def test_one_rank_on_nccl_trains_as_one_process() -> None:
    assert planned(1, "single_device").verify(processes=True).holds


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="two GPUs are two ranks of NCCL")
@pytest.mark.parametrize("strategy", SHARED)
def test_ranks_that_share_a_gpu_train_as_one_process(strategy: str) -> None:
    assert planned(2, strategy).verify(processes=True).holds


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each rank")
@pytest.mark.parametrize("strategy", SHARED)
def test_ranks_with_a_gpu_each_train_as_one_process(strategy: str) -> None:
    assert planned(2, strategy).verify(processes=True).holds
