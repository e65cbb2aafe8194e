"""What generated code calls for sums over ranks: of gradients, and of statistics, denominators and the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..collectives import gradients
from ..collectives.gradients import Buckets, GradientSum
from ..collectives.loss import start_sum, target_weight
from ..collectives.sync_batch_norm import batch_norm
from ..transport.messages import Arriving
from .role import Part


@dataclass
class GradientComm(Part):
    """The gradients of a role's stages.  sums: stage -> its all-reduces."""

    sums: dict[nn.Module, GradientSum] = field(default_factory=dict)

    @contextmanager
    def all_reduce(self, stage: nn.Module, buckets: Buckets, flags: bool = False, early: bool = True) -> Iterator[None]:
        """Sum the gradients of `stage` over the replicas; each bucket starts once the backward inside has filled it.

        Over microbatches and accumulated batches gradients add up, and are summed over the replicas in the last one.
        flags: of parameters that some replicas may not reach, since own code branches on data.  early: False where
        the backward has other collectives, which would then come in another order on some ranks.
        """
        role, spec = self.role, self.role.spec
        if not self.examples.sums_gradients:
            yield
            return
        if stage not in self.sums:
            self.sums[stage] = GradientSum(stage, buckets, spec.all_reduce, flags)
        ranks = [role.among(bucket[0] in spec.own_sums).ranks for bucket in buckets]
        transport = role.transport if flags else role.carrying("gradients")  # which would round the flags too
        with self.sums[stage].while_backward(transport, ranks, self.examples.go_on, early):
            yield
            role.deferred.finish()
        if self.examples.go_on:  # ranks may wait for what this one sends next before they join
            role.messages.at_end(self.sums[stage].finish)

    def summed(self, stage: nn.Module) -> set[nn.Parameter]:
        """The parameters whose gradients buckets sum."""
        return self.sums[stage].parameters if stage in self.sums else set()

    def all_reduce_tied(self, stage: nn.Module, tied: Mapping[str, tuple[int, ...]]) -> None:
        """Sum the gradients of parameters that several roles use over all ranks that hold a copy of them."""
        if self.role.context.is_last:
            gradients.all_reduce_tied(self.role.carrying("gradients"), stage, tied)

    def linear(self, value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer whose weight's gradient is computed while gradients of values travel."""
        return self.role.deferred.linear(value, weight, bias)

    def update(self) -> None:
        """Let the optimizer update this role's parameters now, before the next microbatch."""
        self.role.deferred.finish()
        self.role.update(self.role.spec.role)


class LossComm(Part):
    """A role's sums over the examples of several ranks.

    own: of this rank's own examples, not of its group's; the sum is over all ranks of the role.
    """

    def batch_norm(self, value: Tensor, module: nn.modules.batchnorm._BatchNorm, own: bool = False) -> Tensor:
        """BatchNorm `module` over the examples of all replicas."""
        self.role.synchronised.add(module)
        return batch_norm(self.role.among(own), value, module)

    def all_reduce_scalar(self, value: Tensor, own: bool = False) -> Tensor:
        """A scalar without gradient, summed over the replicas: the denominator of a weighted mean."""
        return self.role.among(own).all_reduce_scalar(value)

    def global_weight(
        self, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100, own: bool = False
    ) -> Arriving:
        """Start to sum the weights of all replicas' targets: what a weighted mean over the global batch divides by."""
        total = target_weight(target, weight, ignore_index)
        return start_sum(self.role.transport, total, self.role.among(own).ranks, total.dtype)

    def scale_by_share(self, value: Tensor, own: bool = False) -> Tensor:
        """`value` times the fraction of the batch that it was computed from: the means then sum to the mean.

        The batch is that of all ranks that train together.
        """
        rows = self.examples.group_rows()
        share = (rows[self.role.group.index] if own else sum(rows)) / max(self.role.unit_examples, 1)
        return value * share if share else value.nan_to_num() * 0.0  # the mean of no examples is not a number

    def store_buffer(self, buffer: Tensor, value: Tensor) -> None:
        """Let a buffer have `value` after the step; all microbatches and roles of a rank compute the same one."""
        self.role.context.stored.append((buffer, value.detach()))

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss that backward begins with, in float16."""
        return loss * self.role.context.loss_scale

    def autocast(self, dtype: torch.dtype) -> torch.autocast:
        """Around a stage's forward: the mixed precision that the program was captured with."""
        return torch.autocast(self.role.transport.device.type, dtype)

    def sum_loss(self, contribution: Tensor, own: bool = False) -> Arriving:
        """Start to sum the loss over all ranks; that of a group, which all its ranks have, counts once.

        Within a round over those that train together, at its end the mean of theirs, weighted by examples; where units
        may be late that of a unit.
        """
        role, rounds = self.role, self.role.rank.rounds
        counted = contribution if role.group.index == 0 or own else torch.zeros_like(contribution)
        joined = role.context.ends_round and rounds is not None and rounds.patience is None
        if role.spec.unit and role.context.training and not joined:
            return start_sum(role.transport, counted, role.spec.unit)
        return start_sum(role.transport, counted * (role.unit_examples / role.context.offsets[-1]))
