"""The tensors of a rank's stage: which of them it holds, in which part, and which other ranks hold the same."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .comm.role import Part
from .errors import LaunchError
from .features import FEATURES
from .parameter_groups import gather_likes
from .rank import Rank
from .spec import Shard
from .transport.agreement import agreed
from .weights import build, named_tensors, part_of
from .whole_state import Room, gather_holders, gather_state

Weights = Mapping[str, Tensor]


class StageState:
    """A stage, filled with this rank's part of the weights.

    first: key of the model's state_dict -> the first key of the same tensor.
    shards: parameter -> the part of it that this rank holds or serves; the whole of all others.
    together: the ranks that train together, which are all without rounds.
    added: parameters that the user added to a stage, which `weights` do not have -> the ranks that hold them.
    unheld: on rank 0, tensors of the model that no rank holds.
    whole: all parameters of the model by first name, in its order, those that were added last.

    Constructing it is collective.  What servers hold is theirs: a server holds its rows of a parameter, and a worker
    has copies of what it pulled.
    """

    def __init__(self, rank: Rank, stage_class: type[nn.Module], weights: Weights, first: Mapping[str, str]) -> None:
        self.transport = transport = rank.transport
        self.built = {name: shard for role in rank.spec.roles for name, shard in role.shards.items()}
        parts = rank.parts(Part)
        self._own_rows = {name: rows for part in parts for name, rows in part.rows.items()}
        self.shards: dict[str, Shard] = {**self.built, **self._own_rows}
        with agreed(transport, "make its stage"):
            self.stage = build(stage_class, weights, transport.device, self.built)
        self._rank, self.everyone = rank.index, rank.everyone
        self.together = rank.spec.roles[0].unit or rank.everyone
        self._updated = {name: p for part in parts for name, p in part.updated(self.stage).items()}
        copies = {parameter for part in parts for parameter in part.copies(self.stage)}
        self._copies = {name for name, parameter in self._named_parameters() if parameter in copies}
        held = {name: self.shards.get(name) for name in named_tensors(self.stage) if name not in self._copies}
        self._holders = gather_holders(transport, held)
        first = self._with_added(rank, weights, first)
        self.first_names = first
        self._own_names, self._buffers = held.keys(), dict(self.stage.named_buffers(remove_duplicate=False)).keys()
        self._alias: dict[str, str] = {}  # first name of a tensor -> the first of its names under which ranks hold it
        for name in [*(each for each in first if each in self._holders), *self._holders]:
            self._alias.setdefault(self.first_name(name), name)
        done = {first[key] for key in self._holders if key in first} if rank.index == 0 else set(first.values())
        unheld = {key: weights[key] for key, name in first.items() if key in weights and name not in done}
        self.unheld = {key: tensor.detach() for key, tensor in unheld.items()}
        own = {self.first_name(name): (p, self.shards.get(name)) for name, p in self.trained}
        own |= {name: (tensor, None) for name, tensor in unheld.items() if isinstance(tensor, nn.Parameter)}
        found = gather_likes(transport, own)
        self.whole = {name: found[name] for name in (*(key for key in first if key in found), *found)}
        transport.connect([*self.buffer_holders().values(), *self.holders().values(), *self.added.values()])

    def _with_added(self, rank: Rank, weights: Weights, first: Mapping[str, str]) -> Mapping[str, str]:
        """Find what the user added to stages; returns `first` with its keys.  Collective.

        Raises LaunchError, on every rank, where it cannot be known over which ranks its gradients are to be summed.
        """
        own = [name for name in self.stage.state_dict() if name not in weights]
        others = [feature for feature in FEATURES if feature.name]
        grouped = any(len(role.group) > 1 for role in rank.spec.roles)
        whole = not grouped and not any(feature.concerns(rank.spec) for feature in others)
        stage = "_".join(role.role for role in rank.spec.roles)
        names = [feature.name for feature in others]
        tables = self.transport.all_gather_objects((own, whole, stage))
        if wrong := sorted({f"{name} of {stage}.py" for names, whole, stage in tables for name in names if not whole}):
            raise LaunchError(
                f"weights.pt has no {', '.join(wrong)}; a layer may be added by hand where ranks hold whole layers and "
                f"train together, but not to {' or '.join(['groups', *names]).replace(' or ', ', ', len(names) - 1)}: "
                f"add it to the model, and compile that again"
            )
        self.added = {n: self._holders[n][None] for n, _ in self.stage.named_parameters() if n in own}
        keys = {name: stage for names, _, stage in tables for name in names}
        if keys and rank.index == 0:
            listed = ", ".join(f"{name} of {stage}.py" for name, stage in keys.items())
            warnings.warn(f"weights.pt has no {listed}: initialised by reset_parameters()", stacklevel=2)
        return {**first, **{name: name for name in keys if name not in first}}

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under each of their names."""
        return self.stage.named_parameters(remove_duplicate=False)

    @property
    def leaves(self) -> list[nn.Parameter]:
        """Every parameter that can have a gradient."""
        return [*self.stage.parameters(), *self._updated.values()]

    @property
    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """The named parameters of this rank's optimizer: of what servers hold, the rows that this rank holds."""
        named = self.stage.named_parameters()
        return [(name, self._updated.get(name, p)) for name, p in named if name not in self._copies]

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
        """The gradients of this rank's optimizer, a tied parameter's once, and of a sparse one its rows."""
        found = ((name, p.grad) for name, p in self.trained if p.grad is not None)
        return [(name, gradient._values() if gradient.is_sparse else gradient) for name, gradient in found]

    def is_first_holder(self, key: str, among: Collection[int]) -> bool:
        """Whether this rank is the lowest of those `among` that hold this part of a tensor: the one that counts."""
        holders = self._holders[key][self.shards.get(key)] if key not in self._copies else ()
        return min((rank for rank in holders if rank in among), default=None) == self._rank

    def first_name(self, name: str) -> str:
        """The first of all names that a tensor has in the model."""
        return self.first_names.get(name, name)

    def part(self, name: str, built: bool = False) -> tuple[Shard | None, int]:
        """The part of a tensor that this rank updates (built: has), and the size of the whole along its dim."""
        shard = (self.built if built else self.shards).get(name)
        return shard, max((each.last for each in self._holders.get(name, ()) if each is not None), default=0)

    def own_part(self, name: str, tensor: Tensor) -> Tensor:
        """The rows that this rank serves of a tensor of its stage, the tensor where it serves none."""
        return part_of(tensor, self._own_rows.get(name))

    def is_writer(self, name: str) -> bool:
        """Whether this rank is the one that writes its part of a tensor into a checkpoint."""
        return self.writers(name)[:1] == (self._rank,)

    def writers(self, name: str, disks: Sequence[int] = ()) -> tuple[int, ...]:
        """The ranks that write this rank's part of a tensor into a checkpoint: one, and one with it on another disk.

        Of the names of tied tensors the first that any rank holds counts; of buffers, which replicas may have unlike,
        the first replica's.  disks: that of each rank.
        """
        first = self.first_name(name)
        alias = self._alias[first]
        if name in self._copies or alias not in self._own_names:
            return ()
        ranks = self._holders[alias][self.shards.get(alias)]
        if name in self._buffers:
            return ranks[:1]
        which = zlib.crc32(first.encode()) % len(ranks)
        writer, *others = ranks[which:] + ranks[:which]
        return writer, *[rank for rank in others if disks and disks[rank] != disks[writer]][:1]

    def buffer_holders(self) -> dict[str, tuple[int, ...]]:
        """Buffer -> all ranks that hold it."""
        return {key: self._holders[key][self.shards.get(key)] for key, _ in self.stage.named_buffers()}

    def holders(self) -> dict[str, tuple[int, ...]]:
        """What this rank updates, and its buffers -> all ranks that hold the same part of it, under any name."""
        every: dict[tuple[str, Shard | None], set[int]] = {}
        for name, parts in self._holders.items():
            for shard, ranks in parts.items():
                every.setdefault((self.first_name(name), shard), set()).update(ranks)
        names = [*(name for name, _ in self.trained), *(name for name, _ in self.stage.named_buffers())]
        return {name: tuple(sorted(every[self.first_name(name), self.shards.get(name)])) for name in names}

    def gather(self, room: Room) -> Any:
        """The whole model's state under its own keys on rank 0, in `room`; None elsewhere.  Collective."""
        first, state = self.first_names, self.stage.state_dict()
        counted = {key: part_of(tensor, self._own_rows.get(key)) for key, tensor in state.items() if key in first}
        own = {first[key]: tensor for key, tensor in counted.items() if self.is_first_holder(key, self.everyone)}
        shards = {first[key]: shard for key, shard in self.shards.items() if key in first}
        tensors = {**{first[key]: tensor for key, tensor in self.unheld.items()}, **own}
        return gather_state(self.transport, tensors, shards, lambda likes: room({k: likes[first[k]] for k in first}))
