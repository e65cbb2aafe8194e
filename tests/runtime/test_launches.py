"""How many kernels a step would launch on a GPU, beside one process that trains the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.alexnet import alexnet
from tests.support import launches as counting
from tests.support.compiled import compiled
from tests.support.launches import Launches, declared, launches, of_step
from tests.support.norm_kernels import kernels_on_the_cpu

LAYERS = 10


def foreach(parameters: Any) -> torch.optim.Optimizer:
    """As on a GPU, where it is the default."""
    return torch.optim.SGD(parameters, lr=0.1, foreach=True)


def convolutions() -> nn.Sequential:
    """Ten times convolution, BatchNorm, ReLU, and a linear layer."""
    blocks = [(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*(layer for block in blocks for layer in block), nn.Flatten(), nn.Linear(4 * 36, 5))


def eager(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> int:
    """Launches of an update in one process."""
    optimizer = foreach(model.parameters())

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return launches(step).number


def test_a_step_of_data_parallel_launches_what_one_process_does_and_ten_more() -> None:
    model, x, y = convolutions(), torch.randn(4, 4, 6, 6), torch.randint(5, (4,))
    program = compiled(model, (x,), y, F.cross_entropy, 2, "data_parallel")
    found = of_step(program, optimizer=foreach).number
    assert (eager(model, x, y), found) == (80, 89)  # a bucket to fill, a loss to scale and to sum


@pytest.mark.slow
@pytest.mark.skipif(not declared(), reason="dropout is no op of ours")
def test_alexnet_with_two_dropouts_launches_at_most_three_tenths_more_than_one_process() -> None:
    model, x, y = alexnet(1 / 32, 10), torch.randn(4, 3, 63, 63), torch.randint(10, (4,))
    program = compiled(model, (x,), y, F.cross_entropy, 2, "data_parallel")
    found = of_step(program, optimizer=foreach)
    with patch.object(F, "dropout", lambda x, p, training, inplace: torch.native_dropout(x, p, training)[0]):
        assert found.number <= 1.3 * eager(model, x, y), found.ops


@pytest.mark.slow
def test_synchronised_batch_norm_launches_at_most_twice_as_much_as_one_process() -> None:
    model, x, y = convolutions(), torch.randn(4, 4, 6, 6), torch.randint(5, (4,))
    program = compiled(model, (x,), y, F.cross_entropy, 2, "data_parallel(sync_batchnorm=True)")
    with kernels_on_the_cpu():
        found = of_step(program, optimizer=foreach)
    assert found.number <= 2 * eager(model, x, y), found.ops
    assert found.ops["batch_norm_elemt"] == found.ops["batch_norm_backward_elemt"] == LAYERS


@pytest.mark.slow
def test_what_happens_to_gradients_launches_as_much_for_many_parameters_as_for_few() -> None:
    x, y = torch.randn(4, 4, 6, 6), torch.randint(5, (4,))
    models = convolutions(), convolutions()[-2:]
    programs = [compiled(model, (x,), y, F.cross_entropy, 2, "data_parallel") for model in models]
    plain = [of_step(program, optimizer=foreach).ops for program in programs]
    for asked, ops in (({"clip_norm": 1.0}, 2), ({"check_finite": True}, 1)):
        many, few = (of_step(p, optimizer=foreach, **asked).ops - q for p, q in zip(programs, plain, strict=True))
        assert many.pop("_foreach_copy", 0) == 2 * ("check_finite" in asked), "buffers, of two dtypes"
        assert many == few
        of_gradients = sum(n for name, n in many.items() if name.startswith("_foreach"))
        assert of_gradients == ops and many.total() <= 16, "the others are of single numbers"
    assert of_step(programs[0], optimizer=foreach, accumulate=2).ops["_foreach_div"] == 1


def test_views_and_allocations_launch_nothing_and_a_foreach_op_launches_once() -> None:
    many = [torch.ones(3, 4) for _ in range(5)]

    def run() -> None:
        torch._foreach_mul_(many, 2.0)
        torch.empty(7)
        many[0].t().reshape(-1)  # a copy
        many[1].view(12).split(4)

    found = launches(run)
    assert found.ops == {"_foreach_mul": 1, "clone": 1}
    assert found.nbytes == 2 * 5 * 48 + 2 * 48


def test_an_op_of_ours_launches_what_it_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3)
    with torch.library._scoped_library("splitc", "FRAGMENT") as library:
        library.define("twice_of_test(Tensor x, int n) -> Tensor")
        library.impl("twice_of_test", lambda x, n: (x * 2).relu().exp(), "CPU")

        def cost(n: int, made: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(launches=n - 3, nbytes=made.nbytes)

        monkeypatch.setattr(counting, "declared", lambda: {"twice_of_test": cost})
        found = launches(lambda: torch.ops.splitc.twice_of_test(x, 5))
        assert (found.ops, found.nbytes) == ({"twice_of_test": 2}, 12)
        with Launches({}), pytest.raises(AssertionError, match="splitc::twice_of_test is not in KERNELS of"):
            torch.ops.splitc.twice_of_test(x, 5)


@pytest.mark.slow
def test_a_dropout_is_two_launches_in_each_microbatch() -> None:
    model, x, y = alexnet(1 / 32, 10), torch.randn(4, 3, 63, 63), torch.randint(10, (4,))
    program = compiled(model, (x,), y, F.cross_entropy, 2, "data_parallel(microbatches=2)")
    found = of_step(program, optimizer=foreach).ops
    assert found["dropout"] == found["dropout_backward"] == 2 * 2
