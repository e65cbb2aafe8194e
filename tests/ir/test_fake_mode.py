"""Fake tensors have shapes for operations that torch calls dynamic though theirs are fixed, and for no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from splitc.ir.fake_mode import AT_ONCE, FakeMode
from tests.support.capturing import captured
from tests.support.compiled import compiled
from tests.support.models import Made


def test_the_ctc_loss_and_its_gradient_have_shapes() -> None:
    with FakeMode():
        log_probs = torch.zeros(12, 4, 6, requires_grad=True)
        lengths = torch.full((4,), 12), torch.full((4,), 3)
        loss = F.ctc_loss(log_probs, torch.ones(4, 3, dtype=torch.long), *lengths, reduction="none")
        loss.sum().backward()
    assert loss.shape == (4,) and log_probs.grad is not None and log_probs.grad.shape == (12, 4, 6)


def test_a_shape_that_depends_on_the_data_is_refused() -> None:
    for call in [torch.nonzero, lambda x: x[x > 0], torch.unique, lambda x: torch.bincount(x.long())]:
        with FakeMode(), pytest.raises(DynamicOutputShapeException):
            call(torch.zeros(5))


def test_what_runs_at_once_has_the_tensors_of_its_parts() -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            results = func(*args, **(kwargs or {}))
            if func in AT_ONCE:
                known = {each.untyped_storage()._cdata for each in args if isinstance(each, Tensor)}
                made = results if isinstance(results, tuple) else (results,)
                alike = [(t.shape, t.stride(), t.dtype, t.untyped_storage()._cdata in known) for t in made]
                found.append((func, alike))
            return results

    seen = []
    for mode in (FakeMode(), FakeTensorMode()):
        found: list[tuple[Any, list[Any]]] = []
        FakeTensorMode.cache_clear()
        with mode, Seen():  # type: ignore[no-untyped-call]
            for dtype in (torch.float32, torch.bfloat16):
                layer, labels = nn.Linear(6, 4, dtype=dtype), torch.zeros(5, dtype=torch.long)
                y = layer(torch.zeros(5, 6, dtype=dtype)).relu()
                losses = [F.cross_entropy(y, labels, reduction=how) for how in ("none", "sum", "mean")]
                losses += [F.cross_entropy(y.t()[None], labels[None, :5]), F.mse_loss(y.t(), torch.zeros_like(y.t()))]
                sum(loss.sum() for loss in losses).backward()  # type: ignore[union-attr]
        seen.append(found)
    assert seen[0] == seen[1] and {func for func, _ in seen[0]} >= AT_ONCE


def speech_model() -> nn.Module:
    """Classifies frames, time first as `F.ctc_loss` wants them."""

    def run(m: Any, frames: Tensor) -> Tensor:
        return m.second(m.first(frames).relu()).log_softmax(-1).transpose(0, 1)

    return Made(run, first=nn.Linear(6, 8), second=nn.Linear(8, 5))


def speech(rows: int = 4) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    frames, lengths = torch.full((rows,), 10), torch.randint(1, 4, (rows,))
    return torch.randn(rows, 10, 6), (torch.randint(1, 5, (rows, 3)), frames, lengths)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_ctc_loss_is_captured(reduction: str) -> None:
    def loss(scores: Tensor, target: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
        return F.ctc_loss(scores, target, frames, lengths, reduction=reduction)

    captured(speech_model(), *speech(), loss)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["layer_separation", "data_parallel"])
def test_the_ctc_loss_trains_as_in_one_process(strategy: str) -> None:
    assert compiled(speech_model(), *speech(), nn.CTCLoss(), 2, strategy).verify(steps=2, dtype=torch.float64).holds


def test_the_gradient_of_a_mean_over_no_examples_has_a_shape() -> None:
    with FakeMode():
        x = torch.empty(0, 4, requires_grad=True)
        F.mse_loss(x, torch.empty(0, 4)).backward()
    assert x.grad is not None and x.grad.shape == (0, 4)
