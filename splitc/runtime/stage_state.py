"""The tensors of a rank's stage: which of them it holds, in which part, and which other ranks hold the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor, nn

from .checkpoint import gather_holders
from .rank import Rank
from .spec import Shard
from .weights import build, part_of


class StageState:
    """A stage, filled with this rank's part of the weights.

    shards: parameter -> the part of it that this rank holds or serves; the whole of all others.

    Constructing it is collective.  What servers hold is theirs: a server holds its rows of a parameter, and a worker
    has copies of what it pulled.
    """

    def __init__(self, rank: Rank, stage_class: type[nn.Module], weights: Mapping[str, Tensor]) -> None:
        transport = rank.transport
        self.built = {name: shard for role in rank.spec.roles for name, shard in role.shards.items()}
        self._served = {name: rows for role in rank.spec.roles for name, rows in role.served_rows.items()}
        self.shards: dict[str, Shard] = {**self.built, **self._served}
        self.stage = build(stage_class, weights, transport.device, self.built)
        self._rank, self._world = rank.index, rank.everyone
        self._rows = {name: p for comm in rank.comms for name, p in comm.served_parameters(self.stage).items()}
        self._copies = self._pulled_copies(rank)
        names = [name for name, _ in (*self._named_parameters(), *self.stage.named_buffers(remove_duplicate=False))]
        held = {name: self.shards.get(name) for name in names if name not in self._copies}
        self._holders = gather_holders(transport, held)
        transport.connect([ranks for ranks in self.buffer_holders().values() if len(ranks) > 1])

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under each of their names."""
        return self.stage.named_parameters(remove_duplicate=False)

    def _pulled_copies(self, rank: Rank) -> set[str]:
        """All names of the parameters that servers hold, and this rank no row of them."""
        parameters = dict(self._named_parameters())
        copies = {
            parameters[name]
            for buckets in rank.spec.served.values()
            for bucket in buckets
            for name, parts in bucket.items()
            if name in parameters and rank.index not in {rows.server for rows in parts}
        }
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

    def counted_tensors(self) -> dict[str, Tensor]:
        """What this rank contributes to a whole state_dict."""
        state = self.stage.state_dict()
        return {
            key: part_of(t, self._served.get(key)) for key, t in state.items() if self.is_first_holder(key, self._world)
        }
