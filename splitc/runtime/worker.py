"""One rank's part of training: its stage, its optimizer, and the step that its generated program defines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from . import data
from .checkpoint import gather_state, spread_state
from .errors import LaunchError
from .rank import Rank
from .transport import Transport
from .weights import build

OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class Part(Protocol):
    """A generated `rankN.py`."""

    rank: Rank
    Stage: Any
    step: Any
    evaluate: Any


class Worker:
    """Trains one rank.  Every method that is said to be collective is called by all ranks, in the same order.

    part: the rank's generated module.  weights: whole-model tensors by name, of which this rank copies its own; on rank
    0 also those that no rank holds, for a whole state_dict.
    keys: the keys of the model's state_dict; a mapping also tells the first key of the same tensor (`first_names`).
    optimizer: called with this rank's named parameters, frozen ones too, but not at all where nothing trains.
    clip_norm: largest global norm of all gradients, each parameter counted once.
    drops: whether dropout drops in training; `verify` turns it off.
    """

    def __init__(
        self,
        part: Part,
        transport: Transport,
        weights: Mapping[str, Tensor],
        keys: Mapping[str, str] | Iterable[str],
        optimizer: OptimizerFactory | None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        seed: int = 0,
    ) -> None:
        if accumulate != 1:
            raise LaunchError(f"accumulate={accumulate}: gradient accumulation is not there yet; give larger batches")
        self.rank = part.rank
        self.rank.connect(transport, seed)
        self._part, self._transport = part, transport
        self.stage = build(part.Stage, weights, transport.device)
        self._first_names = dict(keys) if isinstance(keys, Mapping) else {key: key for key in keys}
        own = self.stage.state_dict()
        self._others = {
            k: weights[k] for k in self._first_names if k in weights and k not in own and transport.rank == 0
        }
        self._clip_norm = clip_norm
        self._sizes: tuple[int, ...] | None = None
        self.drops = True
        self.optimizer = self._make(optimizer) if optimizer is not None else None

    @property
    def data_rank(self) -> int | None:
        """Which part of the global batch this rank reads; None: none."""
        return self.rank.data_rank

    @property
    def data_world(self) -> int:
        """How many ranks read data."""
        return len(self.rank.readers)

    def step(self, *batch: Tensor) -> Tensor:
        """Train on one global batch.  batch: this rank's part, inputs, then targets; nothing where no data is read.

        Returns the global loss, the same on every rank.  Collective.
        Raises LaunchError when the batch does not fit; then nothing has been sent, and a right batch may follow.
        """
        self._check(batch)
        for parameter in self.stage.parameters():
            parameter.grad = None
        self.rank.training = self.drops
        with self.rank.one_step():
            loss: Tensor = self._part.step(self.rank, self.stage, *self._on_device(batch))
            if self._clip_norm is not None:
                self._clip(self._clip_norm)
        self.rank.step_number += 1
        if self.optimizer is not None:
            self.optimizer.step()
        return loss

    def evaluate(self, *batch: Tensor) -> Tensor:
        """The global loss of one batch in evaluation mode, forward only; buffers are the first replica's.  Collective.

        Training goes on as if it had not been called, but that the other replicas now have those buffers too.
        """
        self._check(batch)
        self.stage.eval()
        self.rank.training = False
        try:
            with torch.no_grad(), self.rank.one_step():
                self._share_buffers()
                loss: Tensor = self._part.evaluate(self.rank, self.stage, *self._on_device(batch))
        finally:
            self.stage.train()
        return loss

    def shard(
        self,
        dataset: Any,
        batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        epoch: int = 0,
        drop_last: bool = True,
        **loader: Any,
    ) -> Iterator[tuple[Tensor, ...]]:
        """This rank's part of every global batch of one epoch: inputs, then targets; () on ranks that read no data.

        The readers' parts, in the order of `data_rank`, are the batches of one process that reads the whole dataset.
        Each batch's step comes before the next batch.

        batch_size: examples for each reader; None: as compiled.
        drop_last: False shares a smaller last batch out too, if every rank gets an example of it.
        loader: options of torch's DataLoader (num_workers, collate_fn, pin_memory).
        """
        bounds = self.rank.bounds
        if batch_size is not None:
            if batch_size < 1:
                raise LaunchError(f"batch_size={batch_size}: give at least one example to each reader")
            bounds = tuple(batch_size * k for k in range(self.data_world + 1))
        parts = data.shard(
            dataset,
            bounds,
            self.data_rank,
            list(self.rank.inputs),
            lambda now: not self.rank.without_examples(now),
            shuffle=shuffle,
            seed=seed,
            epoch=epoch,
            drop_last=drop_last,
            **loader,
        )
        return self._each(parts)

    def use_sizes(self, sizes: Sequence[int] | None) -> None:
        """Say how many examples each reader gives to the next steps; None: as compiled.  The same on every rank."""
        self._sizes = None if sizes is None else tuple(sizes)

    def state_dict(self) -> dict[str, Tensor] | None:
        """The whole model's state under its own keys, as copies on rank 0's CPU; None elsewhere.  Collective."""
        whole = gather_state(self._transport, self.stage.state_dict() if self.rank.owns_its_role else {})
        if whole is None:
            return None
        by_first = {self._first_names[key]: tensor for key, tensor in whole.items() if key in self._first_names}
        return {
            key: by_first[first] if first in by_first else self._others[key].to("cpu", copy=True)
            for key, first in self._first_names.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor] | None) -> None:
        """Take this rank's part of a whole state, which rank 0 gives; others' is ignored, None will do.  Collective.

        Raises LaunchError, on every rank and before anything is changed, when keys or shapes are not the model's.
        """
        self._others.update(spread_state(self._transport, self.stage, state, self._first_names))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _make(self, factory: OptimizerFactory) -> torch.optim.Optimizer | None:
        named = list(self.stage.named_parameters())
        if not any(parameter.requires_grad for _, parameter in named):
            return None
        optimizer = factory(named)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise LaunchError(
                "LBFGS evaluates the loss several times a step and over all parameters at once; use another optimizer"
            )
        return optimizer

    def _each(self, parts: Iterable[tuple[tuple[Tensor, ...], tuple[int, ...]]]) -> Iterator[tuple[Tensor, ...]]:
        before = self._sizes
        try:
            for batch, self._sizes in parts:
                yield batch
        finally:
            self._sizes = before  # of a loop around this one

    def _check(self, batch: tuple[Tensor, ...]) -> None:
        self.rank.begin(self._sizes)
        expected = self.rank.inputs
        if len(batch) != len(expected):
            raise LaunchError(
                f"rank {self.rank.index} ({self.rank.role}) takes {len(expected)} tensors "
                f"({', '.join(expected) or 'it reads no data'}), got {len(batch)}"
            )
        first, last = self.rank.examples
        for tensor, (name, (shape, dtype, _)) in zip(batch, expected.items(), strict=True):
            wanted = tuple(last - first if n == -1 else n for n in shape)
            is_tensor = isinstance(tensor, Tensor)
            if not is_tensor or tuple(tensor.shape) != wanted or str(tensor.dtype) != f"torch.{dtype}":
                got = f"{tuple(tensor.shape)} {tensor.dtype}" if is_tensor else f"a {type(tensor).__name__}"
                raise LaunchError(
                    f"rank {self.rank.index}: {name} is {got}, this step needs {wanted} torch.{dtype}; batches of "
                    f"other sizes come from worker.shard, or after worker.use_sizes"
                )

    def _on_device(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        device = self._transport.device
        return tuple(tensor.to(device, non_blocking=device.type == "cuda") for tensor in batch)

    def _clip(self, limit: float) -> None:
        grads = [p.grad for p in self.stage.parameters() if p.grad is not None]
        square = torch.zeros((), dtype=torch.float64, device=self._transport.device)
        if self.rank.owns_its_role:
            for grad in grads:
                square += grad.double().square().sum()
        self._transport.all_reduce(square, self.rank.everyone).wait()
        scale = (limit / (square.sqrt() + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale.to(grad.dtype))

    def _share_buffers(self) -> None:
        ranks = self.rank.replicas
        for work in [self._transport.broadcast(buffer, ranks[0], ranks) for buffer in self.stage.buffers()]:
            work.wait()
