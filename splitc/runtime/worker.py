"""One rank's part of training: its stage, its optimizer, and the step that its generated program defines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from . import data
from .rank import Rank
from .transport import LaunchError, Transport
from .weights import build, copy_into

OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class Part(Protocol):
    """A generated `rankN.py`."""

    rank: Rank
    Stage: Any
    step: Any
    evaluate: Any


class Worker:
    """Trains one rank.

    part: the rank's generated module.  weights: whole-model tensors by name, of which this rank takes its own; on rank 0
    also those that no rank trains, for a whole state_dict.  optimizer: called with this rank's named parameters, not at all
    where there are none.  clip_norm: largest global norm of all gradients, each parameter counted once.
    drops: whether dropout drops in training; `verify` turns it off.
    """

    def __init__(self, part: Part, transport: Transport, weights: Mapping[str, Tensor], keys: Sequence[str],
                 optimizer: OptimizerFactory | None, clip_norm: float | None = None, accumulate: int = 1,
                 seed: int = 0) -> None:
        if accumulate != 1:
            raise LaunchError(f"accumulate={accumulate}: gradient accumulation is not there yet; give larger batches")
        self.rank = part.rank
        self.rank.connect(transport, seed)
        self._part, self._transport = part, transport
        self.stage = build(part.Stage, weights, transport.device)
        self._weights, self._keys = (weights, list(keys)) if transport.rank == 0 else ({}, [])
        self._clip_norm = clip_norm
        self._sizes: tuple[int, ...] | None = None
        named = list(self.stage.named_parameters())
        self.drops = True
        self.optimizer = optimizer(named) if named and optimizer is not None else None

    @property
    def data_rank(self) -> int | None:
        """Which part of the global batch this rank reads; None: none."""
        return self.rank.data_rank

    @property
    def data_world(self) -> int:
        """How many ranks read data."""
        return len(self.rank.readers)

    def step(self, *batch: Tensor) -> Tensor:
        """Train on one global batch, of which `batch` is this rank's part (inputs, then targets; nothing if it reads none).

        Returns the global loss, the same on every rank.  Raises LaunchError when the batch does not fit.
        """
        self._begin(batch)
        for parameter in self.stage.parameters():
            parameter.grad = None
        self.rank.training = self.drops
        loss: Tensor = self._part.step(self.rank, self.stage, *self._on_device(batch))
        self.rank.finish()
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        if self.optimizer is not None:
            self.optimizer.step()
        return loss

    def evaluate(self, *batch: Tensor) -> Tensor:
        """The global loss of one batch in evaluation mode, forward only; buffers are the first replica's."""
        self._begin(batch)
        self._share_buffers()
        self.stage.eval()
        self.rank.training = False
        try:
            with torch.no_grad():
                loss: Tensor = self._part.evaluate(self.rank, self.stage, *self._on_device(batch))
        finally:
            self.stage.train()
        self.rank.finish()
        return loss

    def shard(self, dataset: Any, batch_size: int | None = None, shuffle: bool = True, seed: int = 0, epoch: int = 0,
              drop_last: bool = True, **loader: Any) -> Iterator[tuple[Tensor, ...]]:
        """This rank's part of every global batch of one epoch: inputs, then targets; () on ranks that read no data.

        batch_size: examples for each reader; None: as compiled.  drop_last=False: a smaller last batch is shared out too.
        The readers' parts, in the order of `data_rank`, are the batches of one process that reads the whole dataset.
        """
        bounds = self.rank.bounds
        if batch_size is not None:
            bounds = tuple(batch_size * k for k in range(self.data_world + 1))
        for batch, sizes in data.shard(dataset, bounds, self.data_rank, shuffle=shuffle, seed=seed, epoch=epoch,
                                       drop_last=drop_last, **loader):
            self._sizes = sizes
            yield batch
        self._sizes = None

    def use_sizes(self, sizes: Sequence[int] | None) -> None:
        """Say how many examples each reader gives to the next steps; None: as compiled.  The same on every rank."""
        self._sizes = None if sizes is None else tuple(sizes)

    def state_dict(self) -> dict[str, Tensor] | None:
        """The whole model's state under its own keys, on rank 0; None elsewhere.  Collective."""
        owner = self.rank.owners.get(self.rank.role) == self.rank.index
        own = {k: v.detach().cpu() for k, v in self.stage.state_dict().items()} if owner else {}
        gathered = self._transport.gather_objects(own)
        if gathered is None:
            return None
        merged = {key: value for part in gathered for key, value in part.items()}
        return {key: (merged[key] if key in merged else self._weights[key].cpu()).clone() for key in self._keys}

    def load_state_dict(self, state: Mapping[str, Tensor] | None) -> None:
        """Take this rank's part of a whole state, which rank 0 gives (others may pass None).  Collective."""
        state = self._transport.broadcast_object(None if state is None else dict(state))
        if state is None:
            raise LaunchError("load_state_dict: rank 0 must give the state")
        copy_into(self.stage, state)
        if self.rank.index == 0:
            self._weights = {**self._weights, **state}

    # -- inside --------------------------------------------------------------------------------------------------------

    def _begin(self, batch: tuple[Tensor, ...]) -> None:
        self.rank.begin(self._sizes)
        expected = self.rank.inputs
        if len(batch) != len(expected):
            raise LaunchError(f"rank {self.rank.index} ({self.rank.role}) takes {len(expected)} tensors "
                              f"({', '.join(expected) or 'it reads no data'}), got {len(batch)}")
        first, last = self.rank.examples
        for tensor, (name, (shape, dtype, _)) in zip(batch, expected.items(), strict=True):
            wanted = tuple(last - first if n == -1 else n for n in shape)
            if tuple(tensor.shape) != wanted or str(tensor.dtype) != f"torch.{dtype}":
                raise LaunchError(
                    f"rank {self.rank.index}: {name} is {tuple(tensor.shape)} {tensor.dtype}, this step needs {wanted} "
                    f"torch.{dtype}; batches of other sizes come from worker.shard, or after worker.use_sizes"
                )

    def _on_device(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tensor.to(self._transport.device, non_blocking=True) for tensor in batch)

    def _clip(self, limit: float) -> None:
        grads = [p.grad for p in self.stage.parameters() if p.grad is not None]
        counts = self.rank.owners.get(self.rank.role) == self.rank.index
        square = sum((g.double().square().sum() for g in grads), torch.zeros((), dtype=torch.float64)) if counts else 0.0
        total = torch.as_tensor(square, dtype=torch.float64, device=self._transport.device).clone()
        self._transport.all_reduce(total, self.rank.everyone).wait()
        scale = (limit / (total.sqrt() + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale.to(grad.dtype))

    def _share_buffers(self) -> None:
        ranks = self.rank.replicas
        if len(ranks) > 1:
            for buffer in self.stage.buffers():
                self._transport.broadcast(buffer, ranks[0], ranks).wait()
