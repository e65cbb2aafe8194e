"""Rounds of local updates in one process: what a unit of ranks trains of the whole model, and what units make of it.

Independent subnets by masks on the whole model (IST 3, algorithms 1 and 2), apart from the runtime, which cuts slices:

    y = W x + b  ->  y = W (m x) + b      m: 1 for the unit's neurons of the layer before, else 0

Then no loss depends on other units' neurons, and what belongs to them has no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from splitc.runtime.seeded.draws import Label
from splitc.runtime.spec import DealtDims, Neurons, Rounds
from splitc.runtime.subnets.deal import indices

State = dict[str, Tensor]
STATISTICS = ("running_mean", "running_var")


class Subnet(NamedTuple):
    """What a unit has of a dealt model.

    inputs: weight -> what the inputs of its linear layers are multiplied by.  drawn: dropout -> 1 for its features.
    """

    inputs: Mapping[Tensor, Tensor]
    drawn: Mapping[Label, Tensor]


@dataclass(frozen=True)
class Round:
    """A round of units.  dealt: tensor -> the neurons along its dims that are dealt.  shares: of units, of examples.

    drawn: dropout -> the neurons that its features are.
    """

    number: int
    dealt: Mapping[str, DealtDims]
    drawn: Mapping[Label, Sequence[Neurons]]
    shares: Sequence[float]

    def subnet(self, model: nn.Module, unit: int) -> Subnet:
        """What `unit` has in this round."""
        weights = [(p, self.dealt[name]) for name, p in model.named_parameters() if 1 in self.dealt.get(name, {})]
        inputs: dict[Tensor, Tensor] = {p: self._neurons(dims[1], p.detach(), unit) for p, dims in weights}
        return Subnet(inputs, {k: self._neurons(runs, torch.empty(0), unit) for k, runs in self.drawn.items()})

    def _neurons(self, runs: Sequence[Neurons], like: Tensor, unit: int) -> Tensor:
        """1 for the features along `runs` that `unit` has, 0 for others."""
        own = like.new_zeros(sum(run.width for run in runs))
        own[indices(0, self.number, runs, unit, len(self.shares))] = 1
        return own

    def join(self, name: str, old: Tensor, trained: Sequence[Tensor]) -> Tensor:
        """What units make of a tensor: each element is the mean over those that have it, or what it was before."""
        total, weight = torch.zeros_like(old), torch.zeros_like(old)
        for unit, tensor in enumerate(trained):
            own = torch.full_like(old, self.shares[unit])
            for dim, runs in self.dealt.get(name, {}).items():
                own *= self._neurons(runs, old, unit).view([-1 if d == dim else 1 for d in range(old.dim())])
            total += own * tensor.where(own != 0, 0)
            weight += own
        return torch.where(weight != 0, total / weight, old)

    def join_momenta(self, model: nn.Module, momenta: dict[Tensor, Tensor], optimizers: Sequence[Optimizer]) -> None:
        """Join those of dealt models' optimizers.  momenta: what came of that in the round before."""
        for name, p in model.named_parameters():
            if isinstance(optimizers[0].state[p].get("momentum_buffer"), Tensor):
                trained = [optimizer.state[p]["momentum_buffer"] for optimizer in optimizers]
                momenta[p] = self.join(name, momenta.get(p, torch.zeros_like(p)), trained)
                for optimizer in optimizers:
                    optimizer.state[p]["momentum_buffer"] = momenta[p].clone()


class Outer:
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


def shared(model: nn.Module) -> set[str]:
    """What units have alike at the beginning of a round: parameters, and statistics of normalisations."""
    norms = [path for path, module in model.named_modules() if isinstance(module, _NormBase)]
    statistics = {f"{path}.{name}" for path in norms for name in STATISTICS}
    return statistics | {name for name, _ in model.named_parameters(remove_duplicate=False)}
