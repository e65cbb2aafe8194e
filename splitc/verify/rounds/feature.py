"""Rounds of local updates in one process: a copy of the model for each unit, and what units make of them together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram
from splitc.runtime.spec import Rounds
from splitc.verify.features import STATISTICS, Joint
from splitc.verify.replay import Unit

State = dict[str, Tensor]


class Copies(Joint):
    """Copies of the model, averaged after each round.

    shares: of units, of examples.
    """

    what = "copies"
    separates = True

    def __init__(self, program: LoweredProgram, model: nn.Module, units: Sequence[Unit]) -> None:
        super().__init__(program, model, units)
        self.alike &= _shared(model)
        sizes = [unit.examples[1] - unit.examples[0] for unit in units]
        self.shares = [size / sum(sizes) for size in sizes]
        assert program.plan.rounds is not None
        self._rounds = program.plan.rounds
        self._outer = _Outer(self._rounds, units[0].state, model)

    @staticmethod
    def concerns(program: LoweredProgram) -> bool:
        return program.plan.rounds is not None

    @staticmethod
    def period(plan: Plan) -> int:
        return min(plan.rounds.steps, 2) if plan.rounds and not plan.rounds.in_turns else 1

    @staticmethod
    def notes(plan: Plan) -> Iterator[str]:
        if plan.rounds and (plan.rounds.in_turns or plan.rounds.steps > 2):
            few = "1 update, so that turns of fragments are not verified" if plan.rounds.in_turns else "2 updates"
            yield f"losses are those of the units, in rounds of {few}; the plan has rounds of {plan.rounds.steps}"

    def end(self, number: int, before: State) -> None:
        states = [unit.state for unit in self.units]
        together = {
            name: self.join(number, name, old, [state[name] for state in states]) for name, old in before.items()
        }
        self._outer.step(before, together)
        loss = sum(share * unit.trial.losses[-1] for share, unit in zip(self.shares, self.units, strict=True))
        for unit in self.units:
            unit.state |= together
            if len(unit.trial.losses) == (number + 1) * self._rounds.steps:
                unit.trial.losses[-1] = loss

    def join(self, number: int, name: str, old: Tensor, trained: Sequence[Tensor]) -> Tensor:
        """What units make of a tensor: each element is the mean over those that have it, or what it was before."""
        total, weight = torch.zeros_like(old), torch.zeros_like(old)
        for unit, tensor in enumerate(trained):
            own = self.shares[unit] * self.has(number, name, old, unit)
            total += own * tensor.where(own != 0, 0)
            weight += own
        return torch.where(weight != 0, total / weight, old)

    def has(self, number: int, name: str, tensor: Tensor, unit: int) -> Tensor:
        """1 for the elements of a tensor that a unit has."""
        return torch.ones_like(tensor)


JOINT = Copies


class _Outer:
    """The optimizer to which the averaged change of a round is the gradient (DiLoCo); the usual one takes it whole."""

    def __init__(self, plan: Rounds, state: State, model: nn.Module) -> None:
        named = model.named_parameters(remove_duplicate=False)
        self._parameters = {name: nn.Parameter(state[name].clone()) for name, _ in named if name in state}
        values = self._parameters.values()
        self._sgd = torch.optim.SGD(values, plan.outer_lr, plan.outer_momentum, nesterov=plan.nesterov)

    def step(self, before: State, together: State) -> None:
        """Change what units have together after a round."""
        for name, parameter in self._parameters.items():
            parameter.data, parameter.grad = before[name].clone(), before[name] - together[name]
        self._sgd.step()
        together |= {name: parameter.detach() for name, parameter in self._parameters.items()}


def _shared(model: nn.Module) -> set[str]:
    """What units have alike at the beginning of a round: parameters, and statistics of normalisations."""
    norms = [path for path, module in model.named_modules() if isinstance(module, _NormBase)]
    statistics = {f"{path}.{name}" for path in norms for name in STATISTICS}
    return statistics | {name for name, _ in model.named_parameters(remove_duplicate=False)}
