"""Ranks on GPUs: NCCL with a GPU for each rank, and ranks that share one, on gloo through the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from splitc.ir.placements import Placement
from splitc.runtime.seeded.draws import Draws, Layout
from splitc.runtime.seeded.mode import SeededRandom
from splitc.units import numbered
from tests.support.every_strategy import Asked, planned
from tests.support.whole_life import SAVED, lives

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.slow, pytest.mark.processes]


def gpus(number: int) -> Sequence[pytest.MarkDecorator]:
    """Marks of what needs so many GPUs."""
    return (
        pytest.mark.gpu,
        pytest.mark.skipif(number > GPUS, reason=f"needs {numbered(number, 'GPU')}, torch sees {GPUS or 'none'} here"),
    )


DROPS: list[Callable[[Tensor, float], Tensor]] = [F.dropout, F.dropout2d]
PAIRS = [
    "data_parallel",
    "layer_separation",
    "hybrid_single",
    "late_multiply",
    "modulo_shard(mp=2)",
    "parameter_server",
]
FOURS = [
    *(Asked(text, text) for text in PAIRS),
    *(Asked(text, text) for text in (f"modulo_shard(mp=2,scheme={scheme})" for scheme in ("B", "B/K"))),
    Asked("doubling", "data_parallel(all_reduce=recursive_doubling)"),
    Asked("two and two", "layer_separation(n_c=2, n_f=2)"),
    Asked("pipeline", "layer_separation(ranks=2+1+1)"),
    Asked("sharded, late, one", "mixed", {
        "fc6": Placement(holding="sharded", group=2), "fc7": Placement(sync="late_multiply"), "fc8": "fc",
    }),
]  # fmt: skip
"""Groups of 2 among 4 ranks, roles of unequal size, and all of them together."""


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started sees the first GPU only."""
    first, *_ = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", first)


# -- against one process -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("number", [pytest.param(1, marks=gpus(1))])
def test_one_rank_on_nccl_trains_as_one_process(number: int, norm: bool) -> None:
    assert planned(number, "single_device", norm=norm).verify(processes=True).holds


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("strategy", [pytest.param(text, marks=gpus(1)) for text in PAIRS])
def test_ranks_that_share_a_gpu_train_as_one_process(strategy: str) -> None:
    assert planned(2, strategy).verify(processes=True).holds


@pytest.mark.parametrize("strategy", [pytest.param(text, marks=gpus(2)) for text in PAIRS])
def test_two_ranks_with_a_gpu_each_train_as_one_process(strategy: str) -> None:
    assert planned(2, strategy).verify(processes=True).holds


@pytest.mark.parametrize("asked", [pytest.param(each, marks=gpus(4), id=each.name) for each in FOURS])
def test_groups_of_some_of_the_ranks_train_as_one_process_on_nccl(asked: Asked) -> None:
    assert planned(4, asked).verify(processes=True).holds


@pytest.mark.parametrize("world", [pytest.param(n, marks=gpus(n)) for n in (2, 4)])
def test_synchronised_norms_on_nccl_train_as_one_process(world: int) -> None:
    text = "data_parallel(sync_batchnorm=True)"
    assert planned(world, text, norm=True).verify(processes=True).holds


# -- random numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpus(1))])
def test_dropout_has_the_same_bits_as_on_the_cpu(device: str) -> None:
    layouts = (Layout(), Layout(None), Layout(0, 2), Layout(1))
    for layout, function, p, dtype in product(layouts, DROPS, (0.1, 0.5), (torch.float32, torch.bfloat16)):
        shape = (3, 6, 17, 65) if layout.dim == 1 else (6, 3, 17, 65)
        drawn = []
        for where in ("cpu", device):
            value = torch.ones(shape, dtype=dtype, device=where, requires_grad=True)
            with SeededRandom(Draws(7, 3, [(40, 43) if layout.rows == 2 else (40, 46)]), {(0,): layout}):
                out = function(value, p)
            out.sum().backward()
            assert value.grad is not None
            drawn.append((out.detach().cpu(), value.grad.cpu()))
        assert all(map(torch.equal, *drawn)), (layout, function, p, dtype)
        assert 0 < float((drawn[0][0] == 0).float().mean()) < 1


# -- a whole life ------------------------------------------------------------------------------------------------------


def assert_lives(strategy: str, world: int, folder: Path, device: str, nccl: bool = False) -> None:
    """The run that goes on has the losses of the one that was not interrupted, and what is exported those of both."""
    first, again = lives(strategy, world, folder)
    assert first.device.startswith(device) and (again.device, again.nccl) == (first.device, nccl)
    assert again.losses == pytest.approx(first.losses[SAVED:], rel=1e-5)
    assert again.evaluated == pytest.approx(first.evaluated, rel=1e-4)
    for life in (first, again):
        assert life.evaluated == pytest.approx(life.plain, rel=1e-4)


def test_a_run_on_cpus_is_saved_resumed_evaluated_and_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert_lives("local_sgd(period=2)", 2, tmp_path, "cpu")


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        pytest.param("single_device", 1, marks=gpus(1)),
        *(pytest.param(text, 2, marks=gpus(1)) for text in ("data_parallel", "local_sgd(period=2)")),
    ],
)
def test_so_it_is_on_one_gpu(strategy: str, world: int, tmp_path: Path) -> None:
    assert_lives(strategy, world, tmp_path, "cuda", nccl=world == 1)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        *(pytest.param(text, 2, marks=gpus(2)) for text in ("data_parallel", "local_sgd(period=2)")),
        *(pytest.param(text, 4, marks=gpus(4)) for text in ("modulo_shard(mp=2)", "layer_separation")),
    ],
)
def test_so_it_is_on_nccl(strategy: str, world: int, tmp_path: Path) -> None:
    assert_lives(strategy, world, tmp_path, "cuda", nccl=True)
