"""A borrowed model trains, and comes back as it was."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from splitc.verify.borrowed import borrowed
from tests.support.sampling import in_one


def lent() -> Any:
    model: Any = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.tied, model.history, model.lock = model[0].weight, [1], threading.Lock()
    model.table, model.count = [torch.ones(2)], 0
    model(torch.randn(4, 2)).sum().backward()
    return model


def test_what_a_training_changes_is_undone_and_identities_stay() -> None:
    model = lent()
    tensors = [*model.parameters(), *model.buffers()]
    before = [(tensor, tensor.data_ptr(), tensor.grad, tensor.detach().clone()) for tensor in tensors]
    history, table = model.history, model.table[0]
    with borrowed(model, None):
        assert model[0].weight.grad is None and model.tied is model[0].weight
        model(torch.randn(4, 2)).square().sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        model.history.append(2)
        model.table[0].add_(1)
        model.count, model.new = 5, 6
        model[1].running_mean.fill_(7)
        model.eval()
    for tensor, pointer, gradient, value in before:
        assert tensor.data_ptr() == pointer and tensor.grad is gradient and torch.equal(tensor, value)
    assert model.history is history and history == [1] and torch.equal(table, torch.ones(2))
    assert model.count == 0 and not hasattr(model, "new") and model.training and model[0].weight is model.tied


def test_it_comes_back_from_an_error_too() -> None:
    model = lent()
    with pytest.raises(KeyError), borrowed(model, None):
        model.count = 1
        raise KeyError
    assert model.count == 0


@in_one
@pytest.mark.parametrize("where", ["model", "loss"])
def test_it_may_be_lent_in_another_precision(where: str) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    model.register_buffer("ids", torch.arange(3))
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    model.table = torch.ones(2)
    with borrowed(*((model, other) if where == "model" else (other, model)), torch.float64):
        assert model.weight.dtype == torch.float64 and model.table.dtype == torch.float64
        assert model.get_buffer("ids").dtype == torch.int64 and model.get_buffer("phase").dtype == torch.complex128
        model(torch.ones(2, dtype=torch.float64)).sum().backward()
    assert model.weight.dtype == torch.float32 and model.weight.grad is None
