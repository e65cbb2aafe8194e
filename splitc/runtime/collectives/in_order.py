"""Buckets of gradients that start to travel in one order on every rank, each once backward has filled it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn


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
