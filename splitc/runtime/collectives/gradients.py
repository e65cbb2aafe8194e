"""Sum gradients over replicas, bucket by bucket, while backward is still running."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..memory_format import flat, shaped
from ..transport import doubling
from ..transport.base import Ranks, Transport, Work

Buckets = Sequence[Sequence[str]]


class InOrder:
    """Calls `start` with the number of each bucket, strictly in their order, even when a later one fills first.

    begun: what `start` begins, for messages.
    """

    def __init__(self, buckets: Sequence[Sequence[nn.Parameter]], start: Callable[[int], None], begun: str) -> None:
        self._buckets, self._start, self._begun = buckets, start, begun
        self._awaited: list[set[nn.Parameter]] = []
        self._next, self._in_backward = 0, False
        for k, bucket in enumerate(buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda parameter, k=k: self._arrived(parameter, k))

    @contextmanager
    def while_backward(self, early: bool = True) -> Iterator[None]:
        """Start buckets as the backward inside fills them, if `early`, and on leaving those that it did not reach."""
        self._awaited, self._next, self._in_backward = [set(bucket) for bucket in self._buckets], 0, early
        try:
            yield
        finally:
            self._in_backward = False
        self.start_all()

    def start_all(self) -> None:
        """Start the remaining buckets; the first one is the next again."""
        for k in range(self._next, len(self._buckets)):
            self._start(k)
        self._next = 0

    def _arrived(self, parameter: nn.Parameter, k: int) -> None:
        if not self._in_backward:
            return
        if k < self._next:
            raise RuntimeError(f"a gradient of bucket {k} changed after {self._begun}: one backward a step, please")
        self._awaited[k].discard(parameter)
        while self._next < len(self._buckets) and not self._awaited[self._next]:
            self._next += 1
            self._start(self._next - 1)


class GradientSum:
    """The all-reduces of one stage's gradient buckets.

    A parameter that the loss does not reach counts as zero on the wire and keeps `.grad` None, so that an
    optimizer skips it as in one process; its replicas run the same program and do not reach it either.
    flags: but for own code, whose branches on data may reach it on some of them.  Then a bucket has a number more
    for each of its parameters, of how many ranks reached it.
    """

    def __init__(self, stage: nn.Module, buckets: Buckets, algorithm: str = "backend", flags: bool = False) -> None:
        self._algorithm, self._flags = algorithm, flags
        parameters = dict(stage.named_parameters(remove_duplicate=False))
        self._names = [bucket[0] for bucket in buckets]
        self._buckets = [[parameters[name] for name in bucket] for bucket in buckets]
        self.parameters = {parameter for bucket in self._buckets for parameter in bucket}
        self._in_order = InOrder(self._buckets, self._start, "its sum had started")
        self._started: list[tuple[Tensor, Work]] = []

    @contextmanager
    def while_backward(
        self, transport: Transport, ranks: Sequence[Ranks], later: bool = False, early: bool = True
    ) -> Iterator[None]:
        """Start all-reduces as the backward inside fills buckets; on leaving, or `later`, `finish` waits for them.

        ranks: of each bucket, those over which it is summed.  early: False: all start when backward has ended.
        """
        self._started, self._call = [], (transport, ranks)
        with self._in_order.while_backward(early):
            yield
        if not later:
            self.finish()

    def finish(self) -> None:
        """Let every gradient be the sum, a view of its bucket's: no second copy is kept."""
        for (total, work), bucket in zip(self._started, self._buckets, strict=True):
            work.wait()
            sizes = [p.numel() for p in bucket]
            *parts, flags = total.split([*sizes, total.numel() - sum(sizes)])
            reached = self._call[0].decided(flags) if self._flags else [p.grad is not None for p in bucket]
            for parameter, part, somewhere in zip(bucket, parts, reached, strict=True):
                parameter.grad = shaped(part, parameter) if somewhere else None
        self._started = []

    def _start(self, k: int) -> None:
        (transport, ranks), bucket = self._call, self._buckets[k]
        parts = [flat(torch.zeros_like(p) if p.grad is None else p.grad.detach(), p) for p in bucket]
        if self._flags:
            parts.append(parts[0].new_tensor([p.grad is not None for p in bucket]))
        total = torch.cat(parts) if len(parts) > 1 else parts[0]  # one alone is summed where it is
        if self._algorithm == "recursive_doubling":
            work = doubling.all_reduce(transport, total, ranks[k])
        else:
            work = transport.summed(total, ranks[k], self._names[k])
        self._started.append((total, work))


def all_reduce_tied(transport: Transport, stage: nn.Module, tied: Mapping[str, Ranks]) -> None:
    """Sum the gradients of tied parameters over the ranks that hold a copy of them.  tied: parameter -> its ranks."""
    parameters = dict(stage.named_parameters(remove_duplicate=False))
    under_way = []
    for name, ranks in tied.items():
        parameter = parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        total = flat(parameter.grad, parameter)
        under_way.append((parameter, total, transport.summed(total, ranks, name)))
    for parameter, total, work in under_way:
        work.wait()
        parameter.grad = shaped(total, parameter)
