"""Rounds of local updates in one process: what a unit of ranks trains of the whole model, and what units make of it.

Independent subnets by masks on the whole model (IST 3, algorithms 1 and 2), apart from the runtime, which cuts slices:

    y = W x + b  ->  y = W (m x) + b      m: 1 for the unit's neurons of the layer before, else 0

Then no loss depends on other units' neurons, and what belongs to them has no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from splitc.runtime.rounds.deal import indices
from splitc.runtime.seeded.draws import Label
from splitc.runtime.spec import DealtDims, Neurons

State = dict[str, Tensor]
STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class Subnet:
    """What a unit has of a dealt model.

    inputs: weight -> what the inputs of its linear layers are multiplied by.  drawn: dropout -> its features.
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
        weights = {name: p for name, p in model.named_parameters() if 1 in self.dealt.get(name, {})}
        drawn = {label: torch.tensor(self._indices(runs, unit)) for label, runs in self.drawn.items()}
        return Subnet({p: self._neurons(name, 1, p.detach(), unit) for name, p in weights.items()}, drawn)

    def _indices(self, runs: Sequence[Neurons], unit: int) -> list[int]:
        return indices(0, self.number, runs, unit, len(self.shares))

    def _neurons(self, name: str, dim: int, like: Tensor, unit: int) -> Tensor:
        """1 for the indices along a dim of a tensor that `unit` has, 0 for others."""
        own = like.new_zeros(like.shape[dim])
        own[self._indices(self.dealt[name][dim], unit)] = 1
        return own

    def join(self, name: str, old: Tensor, trained: Sequence[Tensor]) -> Tensor:
        """What units make of a tensor: each element is the mean over those that have it, or what it was before."""
        old = old.to(trained[0].dtype)
        total, weight = torch.zeros_like(old), torch.zeros_like(old)
        for unit, tensor in enumerate(trained):
            own = torch.full_like(old, self.shares[unit])
            for dim in self.dealt.get(name, {}):
                own *= self._neurons(name, dim, old, unit).view([-1 if d == dim else 1 for d in range(old.dim())])
            total += own * tensor.where(own != 0, 0)
            weight += own
        return torch.where(weight != 0, total / weight, old)

    def join_optimizers(self, model: nn.Module, old: Mapping[Tensor, State], optimizers: Sequence[Optimizer]) -> None:
        """Join the state of dealt subnets' optimizers, that of other parameters too."""
        for name, p in model.named_parameters():
            states = [optimizer.state.get(p, {}) for optimizer in optimizers]
            for key in [
                key for key, value in states[0].items() if isinstance(value, Tensor) and value.shape == p.shape
            ]:
                before = old.get(p, {}).get(key, torch.zeros_like(p))
                joined = self.join(name, before, [state[key] for state in states])
                for state in states:
                    state[key] = joined.clone()


def shared(model: nn.Module) -> set[str]:
    """What units have alike at the beginning of a round: parameters, and statistics of normalisations."""
    norms = [(path, module) for path, module in model.named_modules() if isinstance(module, _NormBase)]
    statistics = {f"{path}.{name}" for path, _ in norms for name in STATISTICS}
    return statistics | {name for name, _ in model.named_parameters(remove_duplicate=False)}
