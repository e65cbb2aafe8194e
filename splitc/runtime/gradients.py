"""Sum gradients over replicas, bucket by bucket, while backward is still running."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .transport import Transport, Work

Buckets = Sequence[Sequence[str]]


class GradientSum:
    """The buckets of one stage.

    Buckets start strictly in their order, also when a later one fills first: every rank has one order on the wire.
    A parameter without gradient in a step counts as zero.
    """

    def __init__(self, stage: nn.Module, buckets: Buckets) -> None:
        parameters = dict(stage.named_parameters())
        self._buckets = [[parameters[name] for name in bucket] for bucket in buckets]
        self._missing = [0] * len(buckets)
        self._works: list[tuple[Tensor, Work]] = []
        self._call: tuple[Transport, tuple[int, ...]] | None = None
        for k, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, k=k: self._arrived(k))

    def sent_bytes(self, ranks: int) -> int:
        """Payload bytes that one rank sends for all buckets on a ring."""
        return sum(2 * (ranks - 1) * p.nbytes // ranks for bucket in self._buckets for p in bucket)

    @contextmanager
    def while_backward(self, transport: Transport, ranks: tuple[int, ...]) -> Iterator[None]:
        """Start sums as the backward inside fills buckets; on leaving, every gradient is the sum over `ranks`."""
        self._missing = [len(bucket) for bucket in self._buckets]
        self._works, self._call = [], (transport, ranks)
        try:
            yield
        finally:
            self._call, call = None, self._call
        while len(self._works) < len(self._buckets):  # parameters that this step did not use
            self._start(call)
        for (total, work), bucket in zip(self._works, self._buckets, strict=True):
            work.wait()
            for parameter, part in zip(bucket, total.split([p.numel() for p in bucket]), strict=True):
                if parameter.grad is None:
                    parameter.grad = part.view_as(parameter).clone()
                else:
                    parameter.grad.copy_(part.view_as(parameter))
        self._works = []

    def _arrived(self, k: int) -> None:
        if self._call is None:
            return
        self._missing[k] -= 1
        while len(self._works) < len(self._buckets) and self._missing[len(self._works)] == 0:
            self._start(self._call)

    def _start(self, call: tuple[Transport, tuple[int, ...]]) -> None:
        transport, ranks = call
        bucket = self._buckets[len(self._works)]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
        self._works.append((flat, transport.all_reduce(flat, ranks)))
