"""Subnets in training: what generated code calls at the ends of a round, and the statistics that evaluation reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.role import Part
from ..errors import LaunchError
from ..moments import Batch, Feature
from ..parameter_groups import Named, OptimizerFactory, Whole, call
from ..spec import DealtDims, RankSpec, StepContext
from .subnets import Subnets

_SAMPLE = 8
"""Batches that are kept for a sample at most."""


@dataclass
class SubnetComm(Part):
    """The dealt tensors of a role's stages."""

    subnets: dict[nn.Module, Subnets] = field(default_factory=dict)

    def deal(self, stage: nn.Module, dealt: Mapping[str, DealtDims]) -> None:
        """Gather this rank's slices of dealt tensors from the ranks that own them."""
        if stage not in self.subnets:
            self.subnets[stage] = Subnets(self.role, stage, dealt)
        self.subnets[stage].gather(self.role.context.seed, self.role.context.round)

    def fetch_ahead(self, stage: nn.Module, dealt: Mapping[str, DealtDims]) -> None:
        """Start to gather what the slices of the next round have and no rank trains in this one."""
        self.subnets[stage].fetch_ahead(self.role.context.seed, self.role.context.round + 1)

    def collect(self, stage: nn.Module, dealt: Mapping[str, DealtDims]) -> None:
        """Return the slices of dealt tensors to the ranks that own them."""
        self.subnets[stage].give_back(self.role.context.shares[0])


@dataclass
class Subnetworks(Feature):
    """Ranks that train slices of the model.

    A rank keeps the last batches that it trained on: it knows the statistics of its own neurons alone, so those of the
    whole model are computed anew of a sample of training data (IST 3.3).
    """

    comm = SubnetComm

    def __post_init__(self) -> None:
        self._norms: list[Any] = [self.training.stage.get_submodule(path) for path in self.training.spec.recomputed]
        self._sample: deque[Batch] = deque(maxlen=_SAMPLE)

    @staticmethod
    def concerns(spec: RankSpec) -> bool:
        return bool(spec.evaluated)

    @staticmethod
    def check_optimizer(factory: OptimizerFactory, whole: Whole, named: Named) -> None:
        require_zero_start(factory, whole, named)

    def after_update(self, batch: Batch) -> None:
        tensors, context = batch
        if self._norms:
            self._sample.append((tensors, replace(context, training=False)))

    def end(self, context: StepContext, waiting: int) -> None:
        subnets = (each for part in self.training.parts(SubnetComm) for each in part.subnets.values())
        if waiting and any(each.owned for each in subnets):
            raise LaunchError(
                f"{waiting} accumulated batches wait for their update, and a round of subnets that ends now would lose "
                f"their gradients; save, load and evaluate after an update"
            )

    def settle(self, sample: Sequence[Batch] | None) -> None:
        """Compute statistics of a sample, by default of the batches kept since the last time; none: leave them.

        Layer by layer: a normalisation sees the whole sample when those before it have their new statistics.
        """
        sample = list(self._sample) if sample is None else sample
        self._sample.clear()
        for norm in self._norms if sample else ():
            seen: list[Tensor] = []
            with norm.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(_moments(inputs[0]))):
                for batch, context in sample:
                    self.training.loss(batch, context)
            if not seen:  # a layer of training alone
                continue
            number, total, squares = torch.stack(seen).sum(0)
            norm.running_mean.copy_(mean := total / number)
            spread = (squares - number * mean.square()).clamp(min=0)
            norm.running_var.copy_(spread / (number - 1).clamp(min=1))  # unbiased, as in training

    def forget(self) -> None:
        """Forget what was fetched ahead, since the shards change."""
        for part in self.training.parts(SubnetComm):
            for subnets in part.subnets.values():
                subnets.ahead = None


def require_zero_start(factory: OptimizerFactory, whole: Whole, named: Named) -> None:
    """Raise LaunchError when the state of an optimizer begins with other values than zero.

    Those that no rank has trained yet, of parameters whose state other ranks made, would differ.
    """
    values = [(name, nn.Parameter(torch.zeros(2))) for name, parameter in named if parameter.requires_grad]
    if not values:
        return
    optimizer, _ = call(factory, whole, values)
    for _, value in values:
        value.grad = torch.zeros(2)
    optimizer.step()
    for state in optimizer.state.values():
        for key, tensor in state.items():
            if isinstance(tensor, Tensor) and tensor.shape == (2,) and (tensor.abs() > 1e-6).any():
                raise LaunchError(
                    f"{type(optimizer).__name__} begins with {key} = {float(tensor[0]):g}, and subnets begin with 0 "
                    f"where no rank has trained; use SGD, Adam, RMSprop or another one whose state begins with 0"
                )


def _moments(values: Tensor) -> Tensor:
    """Number, sum and sum of squares of a normalisation's inputs over examples, (3, C) in float64."""
    flat = values.detach().double().transpose(0, 1).flatten(1)
    return torch.stack([flat.new_full((len(flat),), flat.shape[1]), flat.sum(1), flat.square().sum(1)])
