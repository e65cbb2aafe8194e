"""Losses over many classes that a group divides by classes, in the ways in which users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitc.ir import comm_ops
from splitc.ir.placements import Placement
from splitc.ir.transitions import shard
from tests.passes.test_heads import CLASSES, Tagger, divided, holds, numbers
from tests.support.compiled import compiled

Loss = Callable[[Any, Tensor, Tensor], Any]


def nll(**options: Any) -> Loss:
    return lambda net, h, y: F.nll_loss(F.log_softmax(h, dim=-1), y, **options)


def modules(net: Any, h: Tensor, y: Tensor) -> Any:
    return nn.NLLLoss(weight=net.rare, ignore_index=1)(nn.LogSoftmax(dim=1)(h), y)


def gathered(net: Any, h: Tensor, y: Tensor) -> Any:
    return -torch.log_softmax(h, 1).gather(1, y.unsqueeze(1)).mean()


def with_entropy(net: Any, h: Tensor, y: Tensor) -> Any:
    likely = h.log_softmax(-1)
    return F.nll_loss(likely, y) - 0.1 * (likely.exp() * likely).sum(-1).mean()


def of_normaliser(net: Any, h: Tensor, y: Tensor) -> Any:
    return (torch.logsumexp(h, dim=1) - h.gather(1, y.view(-1, 1)).squeeze(1)).mean()


def with_z(net: Any, h: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(h, y) + 0.1 * h.logsumexp(-1, keepdim=True).square().mean()


def brier(net: Any, h: Tensor, y: Tensor) -> Any:
    return (F.softmax(h, -1) - F.one_hot(y, CLASSES)).square().sum(1).mean()


def smoothed(net: Any, h: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(h, y, weight=net.rare, label_smoothing=0.1, ignore_index=1)


LOSSES: dict[str, Loss] = {
    "mean": nll(),
    "sum": nll(reduction="sum"),
    "each": lambda net, h, y: nll(reduction="none")(net, h, y).square().mean(),
    "modules": modules,
    "gathered": gathered,
    "entropy": with_entropy,
    "normaliser": of_normaliser,
    "z": with_z,
    "brier": brier,
    "smoothed": smoothed,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_likelihoods_is_divided_by_classes_and_trains_as_one_process_does(name: str) -> None:
    holds(divided(Tagger(LOSSES[name]), numbers(), 3, "fc"))


def test_a_likelihood_apart_from_its_loss_is_one_cross_entropy() -> None:
    program = divided(Tagger(modules), numbers(), 4, "fc")
    functions = [node.target for node in program.program.graph.nodes]
    assert comm_ops.cross_entropy in functions and comm_ops.logsumexp not in functions
    holds(program)


def test_few_classes_are_gathered() -> None:
    """Six numbers of each row would be sent in place of six."""
    pins = {"*": Placement(group=3), "fc": Placement(None, "sharded", group=3, split="columns")}
    program = compiled(Tagger(of_normaliser, 6).double(), numbers(9, 6), None, None, 3, "mixed", pins=pins)
    functions = [node.target for node in program.program.graph.nodes]
    assert shard in functions and comm_ops.logsumexp not in functions
