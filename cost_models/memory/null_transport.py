"""A transport without peers, to run one rank's step on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from splitc.ir.plan import Plan
from splitc.runtime.transport.base import Transport, Work


class NullTransport(Transport):
    """Drop what is sent, and complete every receive at once.

    Allocates the buffers that `TorchTransport` allocates on the rank's device, and frees them at the same point.
    travels: called with the tensors of each operation.
    """

    def __init__(self, rank: int, plan: Plan, travels: Callable[[Sequence[Tensor]], None]) -> None:
        self.rank, self.world, self.device = rank, plan.world, torch.device("cpu")
        self._travels = travels
        self._examples = [{(r, role): plan.interval(role, r) for role, ranks in plan.roles.items() for r in ranks}]

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        return value

    def gather_objects(self, value: Any, dst: int = 0) -> list[Any] | None:
        """Return this rank's value only; for the first dict, its batch bounds, those of all ranks, from the plan."""
        return [self._examples.pop()] if self._examples and isinstance(value, dict) else [value]

    def barrier(self) -> None:
        return

    def decided(self, numbers: Tensor) -> list[bool]:
        """All: fake tensors have no values."""
        return [True] * numbers.numel()

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        return self._flight(tensor.contiguous())

    def _irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        return self._flight(_buffer(tensor))

    def _all_reduce(self, tensor: Tensor, ranks: tuple[int, ...], maximum: bool = False) -> Work:
        return self._flight(tensor.contiguous())

    def _broadcast(self, tensor: Tensor, src: int, ranks: tuple[int, ...]) -> Work:
        return self._flight(tensor.contiguous() if src == self.rank else _buffer(tensor))

    def _all_gather(self, outputs: list[Tensor], tensor: Tensor, ranks: tuple[int, ...]) -> Work:
        return self._flight(*map(_buffer, outputs), tensor.contiguous())

    def _reduce_scatter(self, output: Tensor, pieces: Sequence[Tensor], ranks: tuple[int, ...]) -> Work:
        leaving = [piece.contiguous() for piece in pieces]
        summands = [leaving[ranks.index(self.rank)], *(output.new_empty(output.shape) for _ in ranks[1:])]
        output.copy_(reduce(torch.add, summands))
        return self._flight(output, *leaving, *summands)

    def _flight(self, *tensors: Tensor) -> Work:
        self._travels(tensors)
        return _Flight(tensors)


def _buffer(tensor: Tensor) -> Tensor:
    """Return the contiguous buffer that receives `tensor`."""
    return tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)


class _Flight:
    """An operation in flight: keeps its tensors alive until waited for."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._tensors = tensors

    def wait(self) -> None:
        self._tensors = ()
