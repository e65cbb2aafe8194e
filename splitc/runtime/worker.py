"""One rank's part of training: its stage, its optimizer, and the step that its generated program defines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from . import data
from .checkpoint import Share, agree, gather_state, spread_state
from .collectives.parameter_server import Bucket
from .errors import LaunchError
from .rank import Rank
from .transport.base import Transport
from .weights import build, part_of

OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]


class GeneratedModule(Protocol):
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
    optimizer: called with this rank's named parameters, frozen ones too, but not at all where nothing trains.  What
    servers hold is theirs to train: a server has its rows of a parameter, under its name, and a worker nothing of it.
    clip_norm: largest global norm of all gradients, each parameter counted once.
    accumulate: batches to an update; gradients are the mean of theirs, as in one process that divides each loss by it.
    drops: whether dropout drops in training; `verify` turns it off.
    """

    def __init__(
        self,
        part: GeneratedModule,
        transport: Transport,
        weights: Mapping[str, Tensor],
        keys: Mapping[str, str] | Iterable[str],
        optimizer: OptimizerFactory | None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        seed: int = 0,
    ) -> None:
        if type(accumulate) is not int or accumulate < 1:
            raise LaunchError(f"accumulate={accumulate!r}: give a whole number of batches, at least 1")
        self.rank = part.rank
        self.rank.connect(transport, seed)
        self._part, self._transport = part, transport
        self._built: dict[str, Share] = {k: v for seat in self.rank.comms for k, v in seat.shares.items()}
        self._served: dict[str, Share] = {k: v for seat in self.rank.comms for k, v in seat.serves.items()}
        self.shares = {**self._built, **self._served}
        self.stage = build(part.Stage, weights, transport.device, self._built)
        self._rows = {name: p for seat in self.rank.comms for name, p in seat.own_rows(self.stage).items()}
        self._elsewhere = self._held_elsewhere()
        self._first_names = dict(keys) if isinstance(keys, Mapping) else {key: key for key in keys}
        own = self.stage.state_dict()
        self._holders = agree(transport, {key: self.shares.get(key) for key in self._tensors() if self._holds(key)})
        transport.connect([ranks for ranks in self._sharing().values() if len(ranks) > 1])
        self._others = {
            k: weights[k] for k in self._first_names if k in weights and k not in own and transport.rank == 0
        }
        self._clip_norm, self._accumulate = clip_norm, accumulate
        self._calls = 0
        self._sizes: tuple[int, ...] | None = None
        self.drops = True
        self._optimizers = self._make_all(optimizer) if optimizer is not None else {}
        self.rank.update = self._update

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of this rank's parameters; None where nothing trains."""
        return self._optimizers.get("")

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
        first, last = self._calls % self._accumulate == 0, (self._calls + 1) % self._accumulate == 0
        if first:
            for parameter in (*self.stage.parameters(), *self._rows.values()):
                parameter.grad = None
        self.rank.training, self.rank.pulls_now, self.rank.updates_now = self.drops, first, last
        with self.rank.one_step():
            loss: Tensor = self._part.step(*self.rank.views, self.stage, *self._on_device(batch))
            if last:
                self._average()
                if self._clip_norm is not None:
                    self._clip(self._clip_norm)
        self._calls += 1
        self.rank.step_number += 1
        if last and self.optimizer is not None:
            self.optimizer.step()
        return loss

    def evaluate(self, *batch: Tensor) -> Tensor:
        """The global loss of one batch in evaluation mode, forward only; buffers are the first replica's.  Collective.

        Training goes on as if it had not been called, but that the other replicas now have those buffers too.
        """
        self._check(batch)
        self.stage.eval()
        self.rank.training, self.rank.pulls_now = False, True
        try:
            with torch.no_grad(), self.rank.one_step():
                self._share_buffers()
                loss: Tensor = self._part.evaluate(*self.rank.views, self.stage, *self._on_device(batch))
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

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the last update, of the parameters or their parts (`shares`) that this rank updates.

        A tied parameter's stands there under each of its names.
        """
        named = (*self.stage.named_parameters(remove_duplicate=False), *self._trained())
        return {name: p.grad for name, p in named if p.grad is not None}

    def use_sizes(self, sizes: Sequence[int] | None) -> None:
        """Say how many examples each reader gives to the next steps; None: as compiled.  The same on every rank."""
        self._sizes = None if sizes is None else tuple(sizes)

    def state_dict(self) -> dict[str, Tensor] | None:
        """The whole model's state under its own keys, as copies on rank 0's CPU; None elsewhere.  Collective."""
        held = self.stage.state_dict()
        own = {key: part_of(tensor, self._served.get(key)) for key, tensor in held.items() if self._owns(key)}
        whole = gather_state(self._transport, own, self.shares)
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
        self._others.update(spread_state(self._transport, self.stage, state, self._first_names, self._built))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _make_all(self, factory: OptimizerFactory) -> dict[str, torch.optim.Optimizer]:
        """The optimizer under "", and those of roles whose parameters are updated every turn under their names."""
        named = self._trained()
        every: Mapping[str, Sequence[str]] = getattr(self._part, "EVERY_TURN", {})
        if every and (self._accumulate > 1 or self._clip_norm is not None):
            raise LaunchError("updates in every turn leave nothing to accumulate, and no global norm to clip")
        apart = {name: role for role, names in every.items() for name in names}
        found = {}
        for role in ("", *every):
            mine = [(name, parameter) for name, parameter in named if apart.get(name, "") == role]
            if (made := self._make(factory, mine)) is not None:
                found[role] = made
        return found

    def _make(self, factory: OptimizerFactory, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer | None:
        if not any(parameter.requires_grad for _, parameter in named):
            return None
        optimizer = factory(named)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise LaunchError(
                "LBFGS evaluates the loss several times a step and over all parameters at once; use another optimizer"
            )
        name = type(optimizer).__name__
        if name in ("Adafactor", "Muon") and (parts := self._in_parts()):
            raise LaunchError(
                f"{name} looks at whole tensors, and this rank has a part of {', '.join(parts[:3])}"
                f"{', ...' if len(parts) > 3 else ''}; use an optimizer that works element by element, "
                f"or a plan without sharded layers and servers"
            )
        return optimizer

    def _in_parts(self) -> list[str]:
        """The parameters of which this rank updates a part only."""
        whole = dict(self.stage.named_parameters())
        served = {n for n, parameter in self._trained() if n in whole and parameter.shape != whole[n].shape}
        return sorted({*self.shares, *served})

    def _update(self, role: str) -> None:
        """Step on the parameters of a role that is updated in every turn."""
        if (optimizer := self._optimizers.get(role)) is not None:
            optimizer.step()
            optimizer.zero_grad()

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        """The named parameters of this rank's optimizer: of what servers hold, the rows that are its own."""
        return [(name, self._rows.get(name, p)) for name, p in self.stage.named_parameters() if self._holds(name)]

    def _held_elsewhere(self) -> set[str]:
        """All names of the parameters here that servers hold, but this rank no row of them."""
        served: Mapping[str, Sequence[Bucket]] = getattr(self._part, "SERVED", {})
        parameters = dict(self.stage.named_parameters(remove_duplicate=False))
        rows = {name: parts for buckets in served.values() for bucket in buckets for name, parts in bucket.items()}
        elsewhere = {
            parameters[name]
            for name, parts in rows.items()
            if name in parameters and self.rank.index not in {server for server, _, _ in parts}
        }
        return {name for name, parameter in parameters.items() if parameter in elsewhere}

    def _holds(self, key: str) -> bool:
        """Whether a tensor, or a part of it, is this rank's own, not a copy of what servers hold."""
        return key not in self._elsewhere

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of the stage, under each of their names."""
        stage = self.stage
        return dict([*stage.named_parameters(remove_duplicate=False), *stage.named_buffers(remove_duplicate=False)])

    def _owns(self, key: str) -> bool:
        """Whether this rank is the first of those that hold the same part of a tensor: the one that counts."""
        return self._holds(key) and self._holders[key][self.shares.get(key)][0] == self.rank.index

    def _sharing(self) -> dict[str, tuple[int, ...]]:
        """Buffer -> all ranks that hold it."""
        return {key: self._holders[key][self.shares.get(key)] for key, _ in self.stage.named_buffers()}

    def _each(self, parts: Iterable[tuple[tuple[Tensor, ...], tuple[int, ...]]]) -> Iterator[tuple[Tensor, ...]]:
        before = self._sizes
        try:
            for batch, self._sizes in parts:
                yield batch
        finally:
            self._sizes = before  # of a loop around this one

    def _check(self, batch: tuple[Tensor, ...]) -> None:
        if any(torch.is_autocast_enabled(device) for device in {self._transport.device.type, "cpu"}):
            raise LaunchError(
                "worker.step is called inside torch.autocast, where ranks would exchange other dtypes than they were "
                "compiled for; call it outside, and compile with autocast=torch.bfloat16 for mixed precision"
            )
        self.rank.begin(self._sizes)
        expected = self.rank.inputs
        if len(batch) != len(expected):
            raise LaunchError(
                f"rank {self.rank.index} ({self.rank.role}) takes {len(expected)} tensors "
                f"({', '.join(expected) or 'it reads no data'}), got {len(batch)}"
            )
        reader = self.rank.data_rank or 0
        first, last = self.rank.step_offsets[reader : reader + 2] if expected else (0, 0)
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

    def _own_gradients(self) -> list[tuple[str, Tensor]]:
        """The gradients of this rank's optimizer, a tied parameter's once."""
        return [(name, parameter.grad) for name, parameter in self._trained() if parameter.grad is not None]

    def _average(self) -> None:
        if self._accumulate > 1:
            for _, gradient in self._own_gradients():
                gradient /= self._accumulate

    def _clip(self, limit: float) -> None:
        grads = self._own_gradients()
        square = torch.zeros((), dtype=torch.float64, device=self._transport.device)
        for name, grad in grads:
            if self._owns(name):
                square += grad.double().square().sum()
        self._transport.all_reduce(square, self.rank.everyone).wait()
        scale = (limit / (square.sqrt() + 1e-6)).clamp(max=1.0)
        for _, grad in grads:
            grad.mul_(scale.to(grad.dtype))

    def _share_buffers(self) -> None:
        buffers = dict(self.stage.named_buffers())
        sharing = self._sharing()
        for work in [self._transport.broadcast(buffers[key], ranks[0], ranks) for key, ranks in sharing.items()]:
            work.wait()
