"""Plain descriptions: of a rank, as a generated `rankN.py` gives it, and of a step."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from .transport.formats import AS_COMPUTED, Wire

if TYPE_CHECKING:
    from torch import Tensor


class Route(NamedTuple):
    """A rank of another role, and the examples of the compiled batch that both ranks work on."""

    peer: int
    first: int
    last: int

    @property
    def examples(self) -> tuple[int, int]:
        return self.first, self.last


class Shard(NamedTuple):
    """A contiguous part of a tensor along `dim`: indices `first` to `last - 1`."""

    dim: int
    first: int
    last: int


class Neurons(NamedTuple):
    """`width` features along a dim of a tensor: the neurons of `layer`, dealt to ranks; "": every rank has them."""

    layer: str
    width: int


DealtDims = Mapping[int, tuple[Neurons, ...]]
"""Dim of a tensor -> whose neurons its features are, in order; all ranks have the whole of other dims."""


class Rows(NamedTuple):
    """The rows `first` to `last - 1` of a parameter, which one server holds."""

    server: int
    first: int
    last: int


class Input(NamedTuple):
    """A tensor that a reader reads.

    shape: -1 is the batch, -2 a size that follows from the data.
    high: bound of synthetic numbers, of floats None: normal ones; nested lists broadcast against the tensor.
    path: where it is in a nested argument.  low: the least synthetic number, if it is not 0.
    """

    shape: tuple[int, ...]
    dtype: str
    high: float | list[Any] | None = None
    path: tuple[str, ...] | None = None
    low: int | None = None


class BatchGuard(NamedTuple):
    """Ranges of batch sizes, first and last (None: no end), for which a branch is the traced one.  source: its line."""

    ranges: tuple[tuple[int, int | None], ...]
    source: str

    def allows(self, batch: int) -> bool:
        """Whether the branch is the traced one at this batch size."""
        return any(first <= batch <= (batch if last is None else last) for first, last in self.ranges)

    def __str__(self) -> str:
        return " or ".join(f"{a} or more" if b is None else f"{a} to {b}" if b > a else f"{a}" for a, b in self.ranges)


def refused_batch(guards: Sequence[BatchGuard], batches: Mapping[int, str]) -> str | None:
    """Why the batches (size -> who runs it) do not all take the traced branches; None where they do."""
    for guard in guards:
        for batch, who in batches.items():
            if not guard.allows(batch):
                return (
                    f"{guard.source}: what this line computes from the batch size was traced for batches of {guard}, "
                    f"and {who} runs {batch} examples"
                )
    return None


@dataclass(frozen=True)
class Rounds:
    """Training in rounds, which is approximate: each unit of ranks trains by itself, then all of them average.

    steps: updates in a round.  unit: consecutive ranks that train together, as one process does.
    outer_lr, outer_momentum, nesterov: of the SGD to which the averaged change of a round is a gradient (DiLoCo); with
    1 and 0 parameters are averaged.
    fragments: parts of the parameters, which are averaged in turns.  delay: updates during which one travels.
    mixing: how much of its own parameters a rank keeps when a fragment arrives (streaming DiLoCo); None: what it
    trained meanwhile is added to what arrives.
    through: "peers" sum by an all-reduce; a "server", the first unit, receives from all others and sends them the sum.
    patience: seconds that units wait for each other before they go on without who is late; None: as long as it takes.
    """

    steps: int
    unit: int = 1
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = False
    fragments: int = 1
    delay: int = 0
    mixing: float | None = None
    through: str = "peers"
    patience: float | None = None

    @property
    def has_outer(self) -> bool:
        """Whether an outer optimizer takes the averaged change."""
        return (self.outer_lr, self.outer_momentum) != (1, 0)

    @property
    def in_turns(self) -> bool:
        """Whether averages happen within a round, not all at its end."""
        return self.fragments > 1 or self.delay > 0

    def departure(self, fragment: int) -> int | None:
        """After which update of a round a fragment leaves; None: at its end, with all others."""
        return (fragment + 1) * self.steps // self.fragments if self.in_turns else None

    def arrival(self, fragment: int) -> int | None:
        """After which update of this round or the next one it arrives; None where it is waited for at once."""
        leaves = self.departure(fragment)
        return (leaves + self.delay - 1) % self.steps + 1 if leaves and self.delay else None


Bucket = Mapping[str, Sequence[Rows]]
"""Parameter -> the servers' rows of it."""

Served = Mapping[str, Sequence[Bucket]]
"""Role of the workers -> its buckets, in the order in which backward fills them."""


@dataclass(frozen=True)
class RoleSpec:
    """What a rank does in one of its roles.

    examples: its examples of the global batch, first and one past the last.
    replicas: the ranks that hold the same parameters, this one among them.
    ranks: all ranks of the role; own_sums: parameters whose gradients are summed over these, since each uses them on
    its own examples, not on its group's.
    routes: role -> the examples exchanged with each of its ranks.
    group_routes: likewise, of values that the one of both roles which receives them has for its whole group: by slices
    of the features, or whole.  The ranks of a group share their examples.
    group: the ranks of its model-parallel group; none where it has no group.
    scheme: Krizhevsky's scheme, which makes microbatches of a group's examples: "BK" takes all of them at once, "B" one
    member's in each microbatch, "B/K" an equal part of each member's.
    microbatches: parts of every reader's examples that go through all roles one after another.
    updated_every_microbatch: parameters that the optimizer updates after every microbatch, not once a step.
    shards: parameter -> the part of it that this rank holds; the whole of all others.
    all_reduce: how gradients are summed, by the "backend" or by "recursive_doubling".
    served_rows: of a worker that is a server too: parameter -> the rows that it holds for all workers.
    workers: of a server that is no worker: role -> the ranks that it serves.
    unit: the ranks that train together in a round, this one among them; none where there are no rounds.
    averaged: those of other units that hold the same parameters, and this one: they average them after a round,
    through_server: by the first of them, to which the others send theirs.
    """

    role: str
    examples: tuple[int, int] = (0, 0)
    replicas: tuple[int, ...] = ()
    routes: Mapping[str, Sequence[Route]] = field(default_factory=dict)
    group: tuple[int, ...] = ()
    scheme: str = "BK"
    microbatches: int = 1
    updated_every_microbatch: tuple[str, ...] = ()
    shards: Mapping[str, Shard] = field(default_factory=dict)
    all_reduce: str = "backend"
    served_rows: Mapping[str, Shard] = field(default_factory=dict)
    workers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unit: tuple[int, ...] = ()
    averaged: tuple[int, ...] = ()
    through_server: bool = False
    ranks: tuple[int, ...] = ()
    own_sums: tuple[str, ...] = ()
    group_routes: Mapping[str, Sequence[Route]] = field(default_factory=dict)


@dataclass(frozen=True)
class RankSpec:
    """A rank's place in the plan.

    roles: at least one; a rank without work has the role "idle", a server that is no worker the role "server".
    readers: the ranks that read data.  batch_offsets: where the examples of each reader begin, and where the last end.
    inputs: what a reader reads, by name.  guards: the batches for which the traced branches hold.
    served: the buckets of parameters that servers hold.
    no_evaluation: why there is no evaluation, if there is none.
    rounds: how long the units of a round train before they average; None: all ranks train together.
    evaluated: what the rank does in each of its roles in evaluation, where that is not what it does in training.
    recomputed: normalisations whose statistics are computed anew, of a sample of batches, before they are read.
    accumulate: batches to an update.
    predicts: the inputs that its `predict` takes.  no_outputs: why the ranks cannot predict, if they cannot.
    scales_loss: whether backward begins with the scaled loss, since the program runs in float16.
    reader: what it does as one of the readers, to which the model's output travels; None where it does not.
    wire: the formats in which numbers travel in training.
    sum_shares: rank -> its part of what is summed, in proportion to those of the others; none where they are equal.
    """

    index: int
    world: int
    roles: tuple[RoleSpec, ...]
    readers: tuple[int, ...] = ()
    batch_offsets: tuple[int, ...] = (0,)
    inputs: Mapping[str, Input] = field(default_factory=dict)
    served: Served = field(default_factory=dict)
    guards: tuple[BatchGuard, ...] = ()
    no_evaluation: str = ""
    rounds: Rounds | None = None
    evaluated: tuple[RoleSpec, ...] = ()
    recomputed: tuple[str, ...] = ()
    accumulate: int = 1
    predicts: tuple[str, ...] = ()
    no_outputs: str = ""
    reader: RoleSpec | None = None
    scales_loss: bool = False
    wire: Wire = AS_COMPUTED
    sum_shares: tuple[int, ...] = ()

    @property
    def role(self) -> str:
        """The names of all its roles."""
        return " and ".join(role.role for role in self.roles)

    @property
    def paths(self) -> dict[str, tuple[str, ...]]:
        """Where each input is in a batch as the model takes it, from the name of its argument."""
        return {name: each.path or (name,) for name, each in self.inputs.items()}

    @property
    def data_rank(self) -> int | None:
        """The position of this rank among the readers; None where it reads no data."""
        return self.readers.index(self.index) if self.index in self.readers else None


@dataclass(frozen=True)
class StepContext:
    """One step, as all communication of it sees it.

    compiled_offsets, offsets: where each reader's examples begin, in the compiled batch and in this step's batch.
    seed, number: of the run and of the update; random numbers depend on them.
    first_example: how many examples the batches before had that are accumulated to the same update.
    training: False makes dropout the identity.
    is_first, is_last: whether this is the first, and the last, of the batches that are accumulated to an update.
    Parameters are pulled from servers in the first one, gradients are summed over ranks in the last one.
    stored: buffers, and their values from the next training step on.
    copies: region and microbatch -> see `own_code.with_copies`.
    round: its number.  ends_round: whether it ends after this step.
    shares: for each fragment of what is averaged, the fraction of the examples since it last was that this rank's unit
    had; 0 where there were none.
    loss_scale: what the loss is multiplied by before backward.
    """

    compiled_offsets: tuple[int, ...]
    offsets: tuple[int, ...]
    seed: int = 0
    number: int = 0
    training: bool = True
    is_first: bool = True
    is_last: bool = True
    first_example: int = 0
    stored: list[tuple[Tensor, Tensor]] = field(default_factory=list, compare=False)
    copies: dict[tuple[int, int | None], dict[int, Tensor]] = field(default_factory=dict, compare=False)
    round: int = 0
    ends_round: bool = False
    shares: tuple[float, ...] = (1.0,)
    loss_scale: float = 1.0

    def interval(self, examples: tuple[int, int]) -> tuple[int, int]:
        """Where an interval of the compiled batch lies in this step's batch."""
        first, last = examples
        return self.moved(first), self.moved(last)

    def moved(self, position: int) -> int:
        """A boundary of the compiled batch in this step's batch.

        It moves with its reader's; one between two readers' divides the reader's examples in the same proportion,
        rounded down.
        """
        compiled, step = self.compiled_offsets, self.offsets
        if position == compiled[-1]:
            return step[-1]
        k = bisect.bisect_right(compiled, position) - 1
        return step[k] + (position - compiled[k]) * (step[k + 1] - step[k]) // (compiled[k + 1] - compiled[k])
