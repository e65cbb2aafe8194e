"""The ranks of every plan train exactly as one process: float64 within 1e-9, float32 within 1e-5."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.alexnet import alexnet
from examples.mlp import mlp
from examples.resnet import resnet18
from examples.vgg16 import vgg16
from splitc.compiled import CompiledProgram
from splitc.ir.program import Program
from tests.support.compiled import analyse, class_batch, compiled
from tests.support.sampling import along

SPLITS = list(itertools.product((1, 2, 3, 5), (1, 2)))


def ignoring() -> nn.Module:
    return nn.CrossEntropyLoss(ignore_index=3, weight=torch.linspace(0.5, 2.0, 10))


def frozen_trunk() -> nn.Module:
    model = small_vgg()
    model.features.requires_grad_(False)
    return model


def small_vgg() -> nn.Module:
    return vgg16(width=0.05, num_classes=10, batch_norm=True)


def small_alexnet() -> nn.Module:
    return alexnet(width=0.05, num_classes=10)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Any]] = {
    "alexnet": (small_alexnet, (3, 3, 96, 96), F.cross_entropy),
    "vgg_bn": (small_vgg, (4, 3, 32, 32), F.cross_entropy),
    "mlp": (lambda: mlp(hidden=(32, 24, 48)), (4, 3, 32, 32), F.cross_entropy),
    "resnet": (lambda: resnet18(width=8), (4, 3, 32, 32), F.cross_entropy),
    "ignore_index": (small_vgg, (4, 3, 32, 32), ignoring()),
    "frozen_trunk": (frozen_trunk, (4, 3, 32, 32), F.cross_entropy),
}


@cache
def analysed(name: str, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor, torch.Tensor, Any, Program]:
    """A model, its batch and what is known of it, once for all plans."""
    make, shape, loss = MODELS[name]
    model = make().to(dtype)
    loss = copy.deepcopy(loss).to(dtype) if isinstance(loss, nn.Module) else loss
    x, y = class_batch(shape, dtype=dtype)
    return model, x, y, loss, analyse(model, (x,), y, loss)


def program(
    name: str, world: int, strategy: str, dtype: torch.dtype = torch.float64, **options: object
) -> CompiledProgram:
    model, x, y, loss, known = analysed(name, dtype)
    return compiled(model, (x,), y, loss, world, strategy, analysed=known, **options)


@pytest.mark.slow
@along(1, split=SPLITS, name=["mlp", *(name for name in MODELS if name != "mlp")])
def test_layer_separation_is_the_same_training_in_float64(split: tuple[int, int], name: str) -> None:
    n_c, n_f = split
    result = program(name, n_c + n_f, f"layer_separation(n_c={n_c}, n_f={n_f})").verify(steps=2)
    assert result.holds and result.tolerance == 1e-9, str(result)


@pytest.mark.slow
def test_layer_separation_is_the_same_training_in_float32() -> None:
    for name, split in (("frozen_trunk", "n_c=2, n_f=2"), ("vgg_bn", "n_c=3, n_f=1")):
        result = program(name, 4, f"layer_separation({split})", torch.float32).verify(steps=2)
        assert result.holds and result.tolerance == 1e-5, str(result)


@along(0, world=[2, 1, 3], name=[*MODELS][::-1])
def test_data_parallel_is_the_same_training(name: str, world: int) -> None:
    result = program(name, world, "data_parallel").verify(steps=2)
    assert result.holds, str(result)


@along(
    0,
    shares=[(3, 2, 11), (3, 1, 10), (5, 2, 13), (2, 3, 7), (1, 2, 5)],
    name=["ignore_index", "vgg_bn"],
)
def test_unequal_shares_are_the_same_training(name: str, shares: tuple[int, int, int]) -> None:
    n_c, n_f, batch = shares
    compiled_program = program(name, n_c + n_f, f"layer_separation(n_c={n_c}, n_f={n_f})", global_batch=batch)
    assert len(set(compiled_program.plan.local_batches)) > 1 or n_c == 1 or batch % n_c == 0
    result = compiled_program.verify(steps=2)
    assert result.holds and result.examples == batch, str(result)


@pytest.mark.slow
def test_unequal_shares_of_data_parallel_are_the_same_training() -> None:
    result = program("ignore_index", 3, "data_parallel", global_batch=11).verify(steps=2)
    assert result.holds, str(result)


@pytest.mark.slow
def test_ranks_without_work_learn_the_loss() -> None:
    result = program("mlp", 3, "single_device").verify(steps=2)
    assert result.holds, str(result)


@pytest.mark.slow
def test_no_gradient_crosses_a_cut_below_which_nothing_trains() -> None:
    compiled_program = program(
        "frozen_trunk", 3, "layer_separation(n_c=2, n_f=1)", pins={"features.*": "conv", "classifier.*": "fc"}
    )
    assert "d_cut0" not in compiled_program.files["conv.py"] and ".backward(" not in compiled_program.files["conv.py"]
    assert "requires_grad_()" not in compiled_program.files["fc.py"]
    assert compiled_program.verify(steps=2).holds


@pytest.mark.processes
@pytest.mark.slow
@along(
    dtype=[torch.float64, torch.float32],
    case=[("resnet", 2, 1), ("frozen_trunk", 1, 2)],
)
def test_real_processes_are_the_same_training(dtype: torch.dtype, case: tuple[str, int, int]) -> None:
    name, n_c, n_f = case
    strategy = f"layer_separation(n_c={n_c}, n_f={n_f})"
    result = program(name, n_c + n_f, strategy, dtype, global_batch=4 * n_c + 1).verify(steps=2, processes=True)
    assert result.holds and result.tolerance == (1e-9 if dtype == torch.float64 else 1e-5), str(result)
