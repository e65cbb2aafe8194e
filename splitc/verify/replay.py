"""A step of a unit of ranks in this process, with the random numbers and the normalisations of the ranks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from splitc.capture.trace.random_calls import draw_layouts
from splitc.ir.program import LoweredProgram
from splitc.runtime.launch.trial import Trial
from splitc.runtime.seeded.draws import Draws
from splitc.runtime.seeded.mode import SeededRandom
from splitc.verify.norm_groups import NormGroup


class Trained:
    """Ranks that train together.  examples: theirs, of the global batch.  groups: of each BatchNorm call.

    state: of the model, as they leave it.
    """

    program: LoweredProgram
    examples: tuple[int, int]
    groups: list[list[NormGroup]]
    optimizer: torch.optim.Optimizer
    trial: Trial
    state: dict[str, Tensor]


class Replay(SeededRandom):
    """For one step: the ranks' random numbers, and each BatchNorm call over the groups of examples that they form."""

    def __init__(self, unit: Trained, step: int) -> None:
        super().__init__(Draws(0, step, [unit.examples]), draw_layouts(unit.program))
        self._calls = iter(unit.groups)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm:
            return super().__torch_function__(func, types, args, kwargs)
        bound = inspect.signature(F.batch_norm).bind(*args, **kwargs)
        bound.apply_defaults()
        options = dict(bound.arguments)
        groups = next(self._calls)
        if not options["training"] or len(groups) == 1:
            return func(**options)
        value = options.pop("input")
        parts = []
        for group in groups:
            statistics = {} if group.counts else {"running_mean": None, "running_var": None}
            parts.append(func(value[group.rows], **{**options, **statistics}))
        return torch.cat(parts)[torch.cat([group.rows for group in groups]).argsort()]
