"""Relative errors of the ranks' losses, gradients and parameters against the same steps in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from splitc.runtime.launch.trial import Trial
from splitc.runtime.weights import part_of

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}

_ROUNDING = 4.0
"""The largest error that is allowed, by the one process's own: both round, and a rounding may flip a ReLU in either."""


@dataclass(frozen=True)
class Comparison:
    """The same training steps on every rank and in one process.

    exact: the one process in float64 without autocast; None where it is the reference itself, or does not run.
    tolerance: an error may be as large, or four times as large as what rounding does in the one process.
    """

    ranks: Sequence[Trial]
    reference: Trial
    exact: Trial | None = None
    tolerance: float = TOLERANCES[torch.float64]

    @property
    def steps(self) -> range:
        """The numbers of the steps."""
        return range(len(self.reference.losses))

    def loss_error(self, step: int) -> float:
        """The largest error of the loss on any rank; infinite for a loss that is not a number."""
        expected = self.reference.losses[step]
        scale = max(abs(expected), 1e-12)
        if self.exact is not None:
            scale = max(scale, _ROUNDING / self.tolerance * abs(expected - self.exact.losses[step]))
        errors = [abs(trial.losses[step] - expected) / scale for trial in self.ranks]
        return max(float("inf") if math.isnan(error) else error for error in errors)

    def gradient_errors(self, step: int) -> dict[str, float]:
        """The largest error of each gradient on any rank; infinite for one that no rank holds."""
        by_rank = [self._rank_errors(trial, step) for trial in self.ranks]
        names = self.reference.gradients[step]
        return {name: max((e[name] for e in by_rank if name in e), default=float("inf")) for name in names}

    def state_errors(self, step: int) -> dict[str, float]:
        """The error of each parameter and buffer after a step; counters must be equal; within a round none."""
        states = next((trial.states for trial in self.ranks if trial.states), self.reference.states)
        got, expected = states[step], self.reference.states[step]
        floats = {name: t for name, t in expected.items() if t.dtype.is_floating_point or t.is_complex()}
        counters = {
            name: 0.0 if name in got and torch.equal(got[name], tensor) else float("inf")
            for name, tensor in expected.items()
            if name not in floats
        }
        exact = None if self.exact is None else self.exact.states[step]
        return {**tensor_errors(got, floats, exact, self.tolerance), **counters}

    def rounding(self, step: int) -> dict[str, float]:
        """The errors of the one process's own gradients in a step, against those without rounding."""
        return {} if self.exact is None else tensor_errors(self.reference.gradients[step], self.exact.gradients[step])

    def gradient_factor(self, names: Sequence[str], step: int) -> float | None:
        """The constant by which the gradients of these parameters are off, if there is one."""
        for trial in self.ranks:
            gradients, expected = trial.gradients[step], held_parts(self.reference.gradients[step], trial)
            for name in (name for name in names if name in gradients and name in expected):
                a, b = _wide(gradients[name]), _wide(expected[name])
                if float((b * b).sum()):
                    factor = float((a * b).sum() / (b * b).sum())
                    constant = float((a - factor * b).norm()) <= 1e-3 * float(a.norm()) and abs(factor - 1) > 1e-4
                    return factor if constant else None
        return None

    def _rank_errors(self, trial: Trial, step: int) -> dict[str, float]:
        """The errors of the gradients that one rank holds."""
        got = trial.gradients[step]
        expected = held_parts(self.reference.gradients[step], trial)
        exact = None if self.exact is None else held_parts(self.exact.gradients[step], trial)
        errors = tensor_errors({**expected, **got}, expected, exact, self.tolerance)
        return {name: error for name, error in errors.items() if name in got}


def held_parts(whole: Mapping[str, Tensor], trial: Trial) -> dict[str, Tensor]:
    """The parts of whole tensors that the trial's rank holds."""
    return {name: part_of(tensor, trial.shards.get(name)) for name, tensor in whole.items()}


def tensor_errors(
    got: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    exact: Mapping[str, Tensor] | None = None,
    tolerance: float = 1.0,
) -> dict[str, float]:
    """||a - b|| / max(||b||, 1e-3 rms(all) sqrt(numel)) of every tensor, L2; infinite elements must be equal.

    exact: b without rounding.  Then b's own error, or the median of these if that is larger, times `_ROUNDING` counts
    as one `tolerance`.
    """
    wide = {name: _wide(b).nan_to_num(0.0, 0.0, 0.0) for name, b in expected.items()}
    numel = sum(b.numel() for b in wide.values())
    rms = (sum(float(b.square().sum()) for b in wide.values()) / max(numel, 1)) ** 0.5
    scales = {name: max(float(b.norm()), 1e-3 * rms * b.numel() ** 0.5) for name, b in wide.items()}
    if exact is not None:
        own = {n: float((b - _wide(exact[n]).nan_to_num(0.0, 0.0, 0.0)).norm()) for n, b in wide.items() if n in exact}
        typical = median([rounding / scales[n] for n, rounding in own.items() if scales[n]] or [0.0])
        for name, rounding in own.items():
            allowed = _ROUNDING * max(rounding, typical * scales[name])
            scales[name] = max(scales[name], allowed / tolerance)
    errors = {}
    for name, b in wide.items():
        if name not in got:
            errors[name] = float("inf")
            continue
        difference = float(torch.where(_wide(got[name]) == _wide(expected[name]), 0.0, _wide(got[name]) - b).norm())
        if difference == 0:
            errors[name] = 0.0
        else:
            errors[name] = float("inf") if math.isnan(difference) or not scales[name] else difference / scales[name]
    return errors


def _wide(tensor: Tensor) -> Tensor:
    """In float64; a complex number is a row of two."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def zero_gradients(exact: Trial) -> set[str]:
    """Parameters whose gradient is zero but for rounding: a bias before BatchNorm, an attention's key bias."""
    zero = set(exact.gradients[0])
    for gradients in exact.gradients:
        rms = {name: float(g.norm()) / max(g.numel(), 1) ** 0.5 for name, g in gradients.items()}
        zero &= {name for name, size in rms.items() if size <= 1e-10 * max(rms.values())}
    return zero
