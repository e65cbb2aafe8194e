"""Modules as constructor calls that rebuild them."""

from __future__ import annotations

import torch
from torch import nn

from splitc.ir.constructors import construction, literal

MODULES = {
    "nn.Linear(3, 4)": nn.Linear(3, 4),
    "nn.Linear(3, 4, bias=False)": nn.Linear(3, 4, bias=False),
    "nn.Conv2d(1, 3, 5, stride=(1, 2))": nn.Conv2d(1, 3, 5, stride=(1, 2)),
    "nn.BatchNorm2d(3, momentum=None)": nn.BatchNorm2d(3, momentum=None),
    "nn.Embedding(9, 4, padding_idx=0)": nn.Embedding(9, 4, padding_idx=0),
    'nn.EmbeddingBag(11, 8, mode="max")': nn.EmbeddingBag(11, 8, mode="max"),
    "nn.LSTM(3, 4, num_layers=2)": nn.LSTM(3, 4, num_layers=2),
    'nn.RNN(3, 4, nonlinearity="relu")': nn.RNN(3, 4, nonlinearity="relu"),
    "nn.MultiheadAttention(8, 2, batch_first=True)": nn.MultiheadAttention(8, 2, batch_first=True),
}


def test_the_call_builds_a_module_of_the_same_settings_and_state() -> None:
    """It has the required arguments and those that are not defaults."""
    for text, module in MODULES.items():
        assert construction(module) == text
        other = eval(text, {"nn": nn})
        assert type(other) is type(module) and other.extra_repr() == module.extra_repr()
        assert other.load_state_dict(module.state_dict())


def hooked() -> nn.Module:
    module = nn.Linear(3, 4)
    module.register_forward_hook(lambda *_: None)
    return module


class Own(nn.Linear):
    """A module of the user."""


def test_a_module_that_trains_otherwise_than_a_constructed_one_is_traced_through() -> None:
    for module in [
        hooked(),
        Own(3, 4),
        nn.ReLU(),
        nn.Sequential(nn.Linear(3, 4)),
        nn.BatchNorm1d(3).eval(),
        nn.MultiheadAttention(8, 2, dropout=0.1),
    ]:
        assert construction(module) is None, module


def test_a_literal_evaluates_to_its_value() -> None:
    for value in [
        1,
        -0.5,
        float("inf"),
        True,
        None,
        'a "b" \\ \n',
        (1,),
        (2, (3.0, "x")),
        torch.float16,
        torch.device("cpu"),
    ]:
        assert eval(literal(value), {"torch": torch}) == value
