"""What generated code calls to sum the gradients of a stage, and to update it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from ..collectives import gradients
from ..collectives.gradients import Buckets, GradientSum
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
