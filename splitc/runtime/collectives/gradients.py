"""Sum gradients over replicas, bucket by bucket, while backward is still running."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..transport import doubling
from ..transport.base import Transport, Work

Buckets = Sequence[Sequence[str]]


class GradientSum:
    """The all-reduces of one stage's gradient buckets.

    Buckets start strictly in their order, even when a later one fills first, so that all ranks have one order on the
    wire.  A parameter that the loss does not reach counts as zero on the wire and keeps `.grad` None, so that an
    optimizer skips it as in one process; its replicas run the same program and do not reach it either.
    """

    def __init__(self, stage: nn.Module, buckets: Buckets, algorithm: str = "backend") -> None:
        self._algorithm = algorithm
        parameters = dict(stage.named_parameters(remove_duplicate=False))
        self._buckets = [[parameters[name] for name in bucket] for bucket in buckets]
        self.parameters = {parameter for bucket in self._buckets for parameter in bucket}
        self._awaited: list[set[nn.Parameter]] = []
        self._started: list[tuple[Tensor, Work]] = []
        self._call: tuple[Transport, Sequence[tuple[int, ...]]] | None = None
        for k, bucket in enumerate(self._buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda parameter, k=k: self._arrived(parameter, k))

    @contextmanager
    def while_backward(
        self, transport: Transport, ranks: Sequence[tuple[int, ...]], later: bool = False
    ) -> Iterator[None]:
        """Start all-reduces as the backward inside fills buckets; on leaving, or `later`, `finish` waits for them.

        ranks: of each bucket, those over which it is summed.
        """
        self._awaited = [set(bucket) for bucket in self._buckets]
        self._started, self._call = [], (transport, ranks)
        try:
            yield
        finally:
            self._call = None
        while len(self._started) < len(self._buckets):  # parameters that the loss does not reach
            self._start(transport, ranks)
        if not later:
            self.finish()

    def finish(self) -> None:
        """Let every gradient be the sum, a view of its bucket's: no second copy is kept."""
        for (total, work), bucket in zip(self._started, self._buckets, strict=True):
            work.wait()
            for parameter, part in zip(bucket, total.split([p.numel() for p in bucket]), strict=True):
                if parameter.grad is not None:
                    parameter.grad = part.view_as(parameter)
        self._started = []

    def _arrived(self, parameter: nn.Parameter, k: int) -> None:
        if self._call is None:
            return
        if k < len(self._started):
            raise RuntimeError(
                f"a gradient of bucket {k} changed after its sum had started: one backward a step, please"
            )
        self._awaited[k].discard(parameter)
        while len(self._started) < len(self._buckets) and not self._awaited[len(self._started)]:
            self._start(*self._call)

    def _start(self, transport: Transport, ranks: Sequence[tuple[int, ...]]) -> None:
        bucket, own = self._buckets[len(self._started)], ranks[len(self._started)]
        parts = [(torch.zeros_like(p) if p.grad is None else p.grad.detach()).reshape(-1) for p in bucket]
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]  # one alone is summed where it is
        sum_up = doubling.all_reduce if self._algorithm == "recursive_doubling" else Transport.all_reduce
        self._started.append((flat, sum_up(transport, flat, own)))


def all_reduce_tied(transport: Transport, stage: nn.Module, tied: Mapping[str, tuple[int, ...]]) -> None:
    """Sum the gradients of tied parameters over the ranks that hold a copy of them.  tied: parameter -> its ranks."""
    parameters = dict(stage.named_parameters(remove_duplicate=False))
    under_way = []
    for name, ranks in tied.items():
        parameter = parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        total = parameter.grad.contiguous()
        under_way.append((parameter, total, transport.all_reduce(total, ranks)))
    for parameter, total, work in under_way:
        work.wait()
        parameter.grad = total
