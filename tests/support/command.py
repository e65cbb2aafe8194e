"""Run `splitc` commands in this process, on a small model file, for tests."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from splitc.cli import main

NET = """import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.second(F.relu(self.first(x)))


model = Net
loss = F.cross_entropy


def example(batch=4):
    return (torch.randn(batch, 6),)


def target(batch=4):
    return torch.randint(3, (batch,))
"""
"""A model file whose parts tests replace: `edited(example="example = 3")`."""


def edited(**parts: str) -> str:
    """NET with other parts: the text of `model`, `loss`, `example` or `target`, or of `forward`."""
    text = NET
    blocks = {
        "model": "model = Net\n",
        "loss": "loss = F.cross_entropy\n",
        "example": "def example(batch=4):\n    return (torch.randn(batch, 6),)\n",
        "target": "def target(batch=4):\n    return torch.randint(3, (batch,))\n",
        "forward": "        return self.second(F.relu(self.first(x)))\n",
    }
    for part, new in parts.items():
        assert blocks[part] in text
        text = text.replace(blocks[part], f"{new}\n")
    return text


@dataclass(frozen=True)
class Done:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


def splitc(capsys: pytest.CaptureFixture[str], line: str) -> Done:
    """Run a command in this process, on a cluster that is not measured unless another one is named."""
    arguments = line.split()
    takes_cluster = arguments[:1] and arguments[0] in ("try", "inspect", "explain", "compile", "verify")
    given = [*arguments]
    if takes_cluster and "--cluster" not in arguments and "--plan" not in arguments and "-h" not in arguments:
        given += ["--cluster", "v100-10gbe"]
    capsys.readouterr()
    code = main(given)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    return Done(code, captured.out, captured.err)
