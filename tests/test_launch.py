"""Real launches under torchrun: they train as one process does, and end quickly and clearly when something is wrong.

Every launch imports torch in each process, which takes seconds; so there are few, and each checks many things.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from splitc.api import CompiledProgram
from splitc.runtime.launch import save, synthetic
from splitc.runtime.rank import Rank
from splitc.runtime.transport import LaunchError
from splitc.runtime.trial import torchrun_trial
from tests.compiled import compiled
from tests.ranks import assert_same, one_process

ROOT = Path(__file__).parents[1]
WORLD = 2
SECONDS = 60.0  # a launch takes about 5; one that waits for a lost peer takes 120


def perceptron() -> nn.Module:
    torch.manual_seed(5)
    model = nn.Module()
    model.first, model.second, model.unused = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(2, 2)

    class MLP(type(model)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).relu())  # type: ignore[no-any-return]

    model.__class__ = MLP
    return model
