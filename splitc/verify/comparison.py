"""Relative errors of the ranks' losses, gradients and parameters against the same steps in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from splitc.runtime.launch.trial import Trial
from splitc.runtime.weights import part_of

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}

_ROUNDING = 1.5 / TOLERANCES[torch.bfloat16]  # makes 1.5 times autocast's own error the largest that is allowed


@dataclass(frozen=True)
class Comparison:
    """The same training steps on every rank and in one process.

    exact: the one process in float64 without autocast; given where the program runs under autocast.
    """

    ranks: Sequence[Trial]
    reference: Trial
    exact: Trial | None = None

    @property
    def steps(self) -> range:
        """The numbers of the steps."""
        return range(len(self.reference.losses))

    def loss_error(self, step: int) -> float:
        """The largest error of the loss on any rank; infinite for a loss that is not a number."""
        expected = self.reference.losses[step]
        errors = [abs(trial.losses[step] - expected) / max(abs(expected), 1e-12) for trial in self.ranks]
        return max(float("inf") if math.isnan(error) else error for error in errors)

    def gradient_errors(self, step: int) -> dict[str, float]:
        """The largest error of each gradient on any rank; infinite for one that no rank holds."""
        by_rank = [self._rank_errors(trial, step) for trial in self.ranks]
        names = self.reference.gradients[step]
        return {name: max((e[name] for e in by_rank if name in e), default=float("inf")) for name in names}

    def state_errors(self, step: int) -> dict[str, float]:
        """The error of each parameter and buffer after a step; counters must be equal."""
        states = next(trial.states for trial in self.ranks if trial.states)
        got, expected = states[step], self.reference.states[step]
        floats = {name: tensor for name, tensor in expected.items() if tensor.dtype.is_floating_point}
        counters = {
            name: 0.0 if name in got and torch.equal(got[name], tensor) else float("inf")
            for name, tensor in expected.items()
            if name not in floats
        }
        return {**tensor_errors(got, floats, None if self.exact is None else self.exact.states[step]), **counters}

    def gradient_factor(self, names: Sequence[str], step: int) -> float | None:
        """The constant by which the gradients of these parameters are off, if there is one."""
        for trial in self.ranks:
            gradients, expected = trial.gradients[step], held_parts(self.reference.gradients[step], trial)
            for name in names:
                if name in gradients and name in expected and float(expected[name].norm()):
                    a, b = gradients[name].double(), expected[name].double()
                    factor = float((a * b).sum() / (b * b).sum())
                    constant = float((a - factor * b).norm()) <= 1e-3 * float(a.norm()) and abs(factor - 1) > 1e-4
                    return factor if constant else None
        return None

    def _rank_errors(self, trial: Trial, step: int) -> dict[str, float]:
        """The errors of the gradients that one rank holds."""
        got = trial.gradients[step]
        expected = held_parts(self.reference.gradients[step], trial)
        exact = None if self.exact is None else held_parts(self.exact.gradients[step], trial)
        return {name: e for name, e in tensor_errors({**expected, **got}, expected, exact).items() if name in got}


def held_parts(whole: Mapping[str, Tensor], trial: Trial) -> dict[str, Tensor]:
    """The parts of whole tensors that the trial's rank holds."""
    return {name: part_of(tensor, trial.shards.get(name)) for name, tensor in whole.items()}


def tensor_errors(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], exact: Mapping[str, Tensor] | None = None
) -> dict[str, float]:
    """||a - b|| / max(||b||, 1e-3 rms(all) sqrt(numel)) of every tensor, L2; infinite elements must be equal.

    exact: under autocast, b without rounding; the denominator is then at least 75 ||b - exact||.
    """
    wide = {name: b.double().nan_to_num(0.0, 0.0, 0.0) for name, b in expected.items()}
    numel = sum(b.numel() for b in wide.values())
    rms = (sum(float(b.square().sum()) for b in wide.values()) / max(numel, 1)) ** 0.5
    errors = {}
    for name, b in wide.items():
        if name not in got:
            errors[name] = float("inf")
            continue
        a = got[name]
        difference = float(torch.where(a == expected[name], 0.0, a.double() - b).norm())
        scale = max(float(b.norm()), 1e-3 * rms * b.numel() ** 0.5)
        if exact is not None:
            scale = max(scale, _ROUNDING * float((b - exact[name].double()).norm()))
        if difference == 0:
            errors[name] = 0.0
        else:
            errors[name] = float("inf") if math.isnan(difference) or scale == 0 else difference / scale
    return errors


def zero_gradients(exact: Trial) -> set[str]:
    """Parameters whose gradient is zero but for rounding: a bias before BatchNorm, an attention's key bias."""
    zero = set(exact.gradients[0])
    for gradients in exact.gradients:
        rms = {name: float(g.norm()) / g.numel() ** 0.5 for name, g in gradients.items()}
        zero &= {name for name, size in rms.items() if size <= 1e-10 * max(rms.values())}
    return zero
