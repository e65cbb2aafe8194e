"""How the layers of a plan are placed: who runs them, how parameters are held, and how gradients are summed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from splitc.ir.decode import at_least, one_of, typed_fields

HOLDINGS = ("replicated", "sharded", "subnet")
SYNCS = ("all_reduce", "late_multiply", "parameter_server", "average", "none")
SYNCS_OF_A_LAYER = ("all_reduce", "late_multiply", "none")
SPLITS = ("columns", "rows")
STATES = ("batch", "features", "replicate")
SCHEMES = ("BK", "B", "B/K")
UPDATES = ("once", "every")
SCHEDULES = ("all_forward", "1f1b")
ALL_REDUCES = ("backend", "recursive_doubling")


@dataclass(frozen=True)
class Placement:
    """A pin: where a user wants a layer to run (role), how parameters are held and how gradients are summed (sync).

    The planner chooses the parts that are None.  group: the size of a model-parallel group.  split: how a sharded
    linear layer is divided, by "columns" (its output features) or "rows" (its input features).
    state: of a layer in groups, how their ranks hold its result: each rank its own examples ("batch"), its slice of
    the "features", or everything ("replicate").  None: features of columns, replicate of all others.
    arrives: how they receive what it reads of other roles: their own examples ("batch"), which the group then moves, or
    at once as the layer needs it.  None: features at once, and targets whole; all else by examples.
    """

    role: str | None = None
    holding: Annotated[str, one_of(*HOLDINGS)] | None = None
    sync: Annotated[str, one_of(*SYNCS)] | None = None
    group: Annotated[int, at_least(1)] | None = None
    split: Annotated[str, one_of(*SPLITS)] | None = None
    state: Annotated[str, one_of(*STATES)] | None = None
    arrives: Annotated[str, one_of(*STATES)] | None = None


@dataclass(frozen=True)
class LayerPlacement(Placement):
    """Where a plan runs a layer, how its parameters are held and how its gradients are summed.

    group, split: of a sharded layer, None for others.
    """

    role: str = field()
    holding: Annotated[str, one_of(*HOLDINGS)] = field()
    sync: Annotated[str, one_of(*SYNCS)] = field()

    @property
    def num_shards(self) -> int:
        """Into how many parts its parameters are divided."""
        return self.group if self.holding == "sharded" and self.group else 1


@typed_fields
@dataclass(frozen=True)
class Grouping:
    """The model-parallel groups of a role (SplitBrain 3): `size` ranks work on the examples of all of them.

    scheme: which of them make a microbatch (Krizhevsky 2014): "BK" all examples of all members; "B" one member's
    examples; "B/K" a part of each member's.  Gradients of all microbatches add up.
    updates: "once" after all microbatches (exact), or "every" microbatch one (the paper's K updates, approximate).
    """

    size: Annotated[int, at_least(1)]
    scheme: Annotated[str, one_of(*SCHEMES)] = "B/K"
    updates: Annotated[str, one_of(*UPDATES)] = "once"

    @property
    def turns(self) -> int:
        return 1 if self.scheme == "BK" else self.size
