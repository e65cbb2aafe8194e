"""The tensors of a rank's stage: which of them it holds, in which part, and which other ranks hold the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from .checkpoint import gather_holders, gather_state
from .optimizers import load_by_name, state_by_name
from .rank import Rank
from .spec import Shard
from .weights import build, named_tensors, part_of

Weights = Mapping[str, Tensor]


class StageState:
    """A stage, filled with this rank's part of the weights.

    first: key of the model's state_dict -> the first key of the same tensor.
    shards: parameter -> the part of it that this rank holds or serves; the whole of all others.
    together: the ranks that train together, which are all without rounds.
    unheld: on rank 0, tensors of the model that no rank holds.

    Constructing it is collective.  What servers hold is theirs: a server holds its rows of a parameter, and a worker
    has copies of what it pulled.
    """

    def __init__(self, rank: Rank, stage_class: type[nn.Module], weights: Weights, first: Mapping[str, str]) -> None:
        self.transport = transport = rank.transport
        self.built = {name: shard for role in rank.spec.roles for name, shard in role.shards.items()}
        self._served = {name: rows for role in rank.spec.roles for name, rows in role.served_rows.items()}
        self.shards: dict[str, Shard] = {**self.built, **self._served}
        self.stage = build(stage_class, weights, transport.device, self.built)
        self._rank, self._world = rank.index, rank.everyone
        self.together = rank.spec.roles[0].unit or rank.everyone
        self._rows = {name: p for comm in rank.comms for name, p in comm.served_parameters(self.stage).items()}
        self._copies = self._pulled_copies(rank)
        held = {name: self.shards.get(name) for name in named_tensors(self.stage) if name not in self._copies}
        self._holders = gather_holders(transport, held)
        self.first_names = first
        done = {first[key] for key in self._holders if key in first} if rank.index == 0 else set(first.values())
        self.unheld = {key: weights[key] for key, name in first.items() if key in weights and name not in done}
        transport.connect([*self.buffer_holders().values()])

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under each of their names."""
        return self.stage.named_parameters(remove_duplicate=False)

    def _pulled_copies(self, rank: Rank) -> set[str]:
        """All names of the parameters that servers hold, and this rank no row of them."""
        parameters = dict(self._named_parameters())
        served = (each for buckets in rank.spec.served.values() for bucket in buckets for each in bucket.items())
        elsewhere = (name for name, parts in served if rank.index not in {rows.server for rows in parts})
        copies = {parameters[name] for name in elsewhere if name in parameters}
        return {name for name, parameter in parameters.items() if parameter in copies}

    @property
    def leaves(self) -> list[nn.Parameter]:
        """Every parameter that can have a gradient."""
        return [*self.stage.parameters(), *self._rows.values()]

    @property
    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """The named parameters of this rank's optimizer: of what servers hold, the rows that this rank holds."""
        named = self.stage.named_parameters()
        return [(name, self._rows.get(name, p)) for name, p in named if name not in self._copies]

    @property
    def divided(self) -> list[str]:
        """The parameters of which this rank updates a part only."""
        whole = dict(self.stage.named_parameters())
        rows = {name for name, p in self.trained if name in whole and p.shape != whole[name].shape}
        return sorted({*self.shards, *rows})

    @property
    def is_whole(self) -> bool:
        """Whether this rank updates every tensor that any rank holds, whole."""
        return not self._copies and all(self._rank in parts.get(None, ()) for parts in self._holders.values())

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the parameters, or parts of them, that this rank updates, under each of their names."""
        own, first = dict(self.trained), {parameter: name for name, parameter in self.stage.named_parameters()}
        named = ((name, own.get(first[parameter], parameter)) for name, parameter in self._named_parameters())
        return {name: p.grad for name, p in named if p.grad is not None}

    def trained_gradients(self) -> list[tuple[str, Tensor]]:
        """The gradients of this rank's optimizer, a tied parameter's once."""
        return [(name, p.grad) for name, p in self.trained if p.grad is not None]

    def is_first_holder(self, key: str, among: Collection[int]) -> bool:
        """Whether this rank is the lowest of those `among` that hold this part of a tensor: the one that counts."""
        holders = self._holders[key][self.shards.get(key)] if key not in self._copies else ()
        return min((rank for rank in holders if rank in among), default=None) == self._rank

    def buffer_holders(self) -> dict[str, tuple[int, ...]]:
        """Buffer -> all ranks that hold it."""
        return {key: self._holders[key][self.shards.get(key)] for key, _ in self.stage.named_buffers()}

    def gather(self, room: Callable[[dict[str, Tensor]], Any]) -> Any:
        """The whole model's state under its own keys on rank 0, in `room`; None elsewhere.  Collective."""
        first, state = self.first_names, self.stage.state_dict()
        counted = {key: part_of(tensor, self._served.get(key)) for key, tensor in state.items() if key in first}
        own = {first[key]: tensor for key, tensor in counted.items() if self.is_first_holder(key, self._world)}
        shards = {first[key]: shard for key, shard in self.shards.items() if key in first}
        tensors = {**{first[key]: tensor for key, tensor in self.unheld.items()}, **own}
        return gather_state(self.transport, tensors, shards, lambda likes: room({k: likes[first[k]] for k in first}))

    def run(self, optimizers: Mapping[str, optim.Optimizer], accumulating: bool) -> dict[str, Any]:
        """What the next steps depend on, by name: tensors, the optimizers' state, and gradients that accumulate."""
        own = named_tensors(self.stage)
        return {
            "tensors": {name: tensor.detach() for name, tensor in {**self.unheld, **own}.items()},
            "shards": {name: tuple(shard) for name, shard in self.built.items()},
            "gradients": {name: t.grad for name, t in own.items() if accumulating and t.grad is not None},
            "optimizers": {role: state_by_name(each, self.trained) for role, each in optimizers.items()},
        }

    def restore(self, run: Mapping[str, Any], optimizers: Mapping[str, optim.Optimizer]) -> None:
        """Go on where another `run` was."""
        with torch.no_grad():
            for name, tensor in named_tensors(self.stage).items():
                tensor.copy_(run["tensors"][name])
                tensor.grad = run["gradients"].get(name)
        self.unheld = {name: run["tensors"][name] for name in self.unheld}
        for role, optimizer in optimizers.items():
            load_by_name(optimizer, self.trained, run["optimizers"][role])
