"""What trains a task on one rank: torch's DistributedDataParallel, or the worker of a build of splitc."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.approximate.data import Data
from benchmarks.approximate.tasks import Task
from benchmarks.by_hand.ddp import Ddp
from splitc.runtime.launch.main import load_worker
from splitc.runtime.transport.base import Transport


class Trainer(Protocol):
    """Trains on global batches; every method is collective."""

    def step(self, indices: Tensor) -> None:
        """Train on the examples of a global batch, of which this rank takes its part."""

    def state(self) -> dict[str, Tensor] | None:
        """The whole model's weights on rank 0, None elsewhere."""


class ByDdp:
    """DistributedDataParallel with its default buckets."""

    def __init__(self, task: Task, examples: Data, rate: float, seed: int) -> None:
        self._examples = examples
        self._ddp = Ddp(task.model(seed), lambda params: torch.optim.SGD(params, lr=rate))

    def step(self, indices: Tensor) -> None:
        """Train on a global batch, of which every rank takes an equal part."""
        own = indices.tensor_split(dist.get_world_size())[dist.get_rank()]
        self._ddp.step(self._examples.inputs[own], self._examples.labels[own])

    def state(self) -> dict[str, Tensor] | None:
        """Rank 0's replica."""
        return self._ddp.state() if dist.get_rank() == 0 else None


class BySplitc:
    """The worker of the build in `folder`, from the weights of a seed."""

    def __init__(self, task: Task, examples: Data, folder: Path, transport: Transport, rate: float, seed: int) -> None:
        self._examples = examples
        self._worker = load_worker(folder, transport, lambda params: torch.optim.SGD(params, lr=rate), seed)
        self._worker.load_state_dict(task.model(seed).state_dict() if transport.rank == 0 else None)

    def step(self, indices: Tensor) -> None:
        """Train on a global batch, of which every reader takes the part that it was compiled for."""
        reader, offsets = self._worker.data_rank, self._worker.batch_offsets
        if reader is None:
            self._worker.step()
            return
        own = indices[offsets[reader] : offsets[reader + 1]]
        self._worker.step(self._examples.inputs[own], self._examples.labels[own])

    def state(self) -> dict[str, Tensor] | None:
        """The weights that the ranks hold between them."""
        return self._worker.state_dict()
