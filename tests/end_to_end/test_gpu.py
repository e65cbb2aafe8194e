"""Ranks on GPUs: NCCL with a GPU for each rank, and ranks that share one, on gloo through the CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch

from splitc.ir.placements import Placement
from splitc.runtime.seeded.draws import Draws, Layout
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpus(1))])
def test_a_mask_has_the_same_bits_everywhere(device: str) -> None:
    shapes, layouts = ((6, 1000), (6, 3, 17, 5)), (Layout(), Layout(None), Layout(0, 2))
    for shape, layout, p, dtype in product(shapes, layouts, (0.1, 0.5), (torch.float32, torch.bfloat16)):
        examples = 3 if layout.rows == 2 else 6
        masks = [
            Draws(7, 3, [(0, examples)]).mask(torch.ones(shape, dtype=dtype, device=where), p, (1,), layout)
            for where in ("cpu", device)
        ]
        assert torch.equal(masks[0], masks[1].cpu()), (shape, layout, p, dtype)


# -- a whole life ------------------------------------------------------------------------------------------------------


def assert_lives(strategy: str, world: int, folder: Path, device: str) -> None:
    """The run that goes on has the losses of the one that was not interrupted, and what is exported those of both."""
    first, again = lives(strategy, world, folder)
    assert first.device.startswith(device) and again.device == first.device
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
    assert_lives(strategy, world, tmp_path, "cuda")


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        *(pytest.param(text, 2, marks=gpus(2)) for text in ("data_parallel", "local_sgd(period=2)")),
        *(pytest.param(text, 4, marks=gpus(4)) for text in ("modulo_shard(mp=2)", "layer_separation")),
    ],
)
def test_so_it_is_on_nccl(strategy: str, world: int, tmp_path: Path) -> None:
    assert_lives(strategy, world, tmp_path, "cuda")
