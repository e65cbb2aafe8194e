"""What a feature of training says of itself to passes, checks, wire, prices and reports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from splitc.features import parts
from splitc.ir.layers import Layer, StateTensor
from splitc.ir.placements import LayerPlacement
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram, PlacedProgram, Program, Stage
from splitc.ir.schedule.actions import Action, RankProgram
from splitc.ir.wire_op import WireOp

Ops = Callable[[LoweredProgram, int, Action], Iterator[WireOp]]
"""What a rank communicates in an action."""


class Feature:
    """A feature of training; what it leaves out does not concern it.

    reads: the keys of plan.json that `problems` reads.  ops: of its verbs among ranks that no other verb knows.
    """

    reads: ClassVar[str] = ""
    ops: ClassVar[Mapping[str, Ops]] = {}

    def concerns(self, plan: Plan) -> bool:
        """Whether a plan has it."""
        return False

    # -- what is wrong -------------------------------------------------------------------------------------------------

    def problems(self, plan: Plan) -> Iterator[str]:
        """Yield what contradicts itself in a plan."""
        yield from ()

    def misplaced(self, program: PlacedProgram) -> Iterator[str]:
        """Yield the layers of a model that a plan cannot place so."""
        yield from ()

    def unfit(self, program: Program, plan: Plan) -> Iterator[str]:
        """Yield why a model cannot train so."""
        yield from ()

    def misfits(self, program: Program, plan: Plan) -> Iterator[str]:
        """Yield why the placements of a plan that was given do not fit a model."""
        yield from ()

    # -- a step --------------------------------------------------------------------------------------------------------

    def begins(self, program: LoweredProgram, rank_program: RankProgram) -> Iterator[Action]:
        """Yield what a rank does before it computes."""
        yield from ()

    def ends(self, program: LoweredProgram, rank_program: RankProgram) -> Iterator[Action]:
        """Yield what a rank does after it has computed."""
        yield from ()

    # -- prices --------------------------------------------------------------------------------------------------------

    def is_first(self, plan: Plan, role: str, rank: int) -> bool:
        """Whether a rank of a role adds up what others send it."""
        return False

    def numel(self, program: PlacedProgram, stage: Stage, name: str, rank: int) -> int | None:
        """Return the elements that a rank has of a tensor that it holds a part of; None for others."""
        return None

    def part(
        self, program: Program, plan: Plan, place: LayerPlacement, held: Sequence[StateTensor]
    ) -> tuple[float, float]:
        """Return how much of a layer a rank computes at most, and how much of it it holds beside that."""
        return 1.0, 0.0

    def share(self, program: LoweredProgram, stage: Stage, layer: str, rank: int) -> float:
        """Return how much of a layer a rank computes."""
        return 1.0

    def updated(self, program: LoweredProgram, rank: int) -> tuple[float, Collection[str]]:
        """Return the bytes that a rank updates for others, and the parameters that others update for it."""
        return 0.0, ()

    def holds(self, program: LoweredProgram, rank: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield shape and bytes of what a rank holds beside its stages' tensors."""
        yield from ()

    # -- reports -------------------------------------------------------------------------------------------------------

    def text(self, plan: Plan) -> str:
        """How a plan trains approximately by it."""
        return ""

    def figures(self, plan: Plan) -> dict[str, Any]:
        """What it adds to the figures of a plan."""
        return {}

    def sent_bytes(self, program: LoweredProgram, layer: Layer) -> float:
        """Bytes that the busiest rank sends in a step for the parameters of a layer."""
        return 0.0

    def why(self, plan: Plan, place: LayerPlacement) -> str:
        """How a layer is trained that is placed by it; "" for others."""
        return ""


def approximation(plan: Plan) -> str:
    """How a plan trains approximately; "" where it does so by no feature."""
    return next(filter(None, (feature.text(plan) for feature in features())), "")


@cache
def features() -> tuple[Feature, ...]:
    """Those of the registry."""
    return tuple(part.FEATURE for part in parts("splitc.ir", "feature"))
