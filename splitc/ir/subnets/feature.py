"""Independent subnets, as passes, checks, wire, prices and reports know them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from splitc.ir.features import Feature
from splitc.ir.layers import Layer, StateTensor
from splitc.ir.placements import LayerPlacement
from splitc.ir.plan import Plan
from splitc.ir.program import LoweredProgram, PlacedProgram, Program, Stage
from splitc.ir.schedule.actions import Action, RankProgram
from splitc.ir.subnets.neurons import dealing_of
from splitc.ir.subnets.slices import dealt_ops, exchanged_nbytes, fetches_ahead, share_of, slice_numel
from splitc.ir.transitions import Collective
from splitc.runtime.spec import Rounds


class Subnets(Feature):
    """Every rank trains its neurons of the layers that have holding "subnet"."""

    reads = "roles rounds placements"
    ops: ClassVar = dict.fromkeys(("deal", "fetch_ahead", "collect"), dealt_ops)

    def concerns(self, plan: Plan) -> bool:
        return plan.deals

    def problems(self, plan: Plan) -> Iterator[str]:
        """Yield where subnets are not trained by one rank each, in plain rounds, or not all in one role."""
        subnets = {name: place for name, place in plan.placements.items() if place.holding == "subnet"}
        rounds, roles = plan.rounds, {place.role for place in subnets.values()}
        if subnets and rounds and rounds != Rounds(rounds.steps):
            yield "rounds: subnets have no outer optimizer, fragments or server; give no more than steps"
        for layer, place in subnets.items():
            if rounds is None or rounds.unit != 1:
                yield f"placements: {layer} has holding 'subnet', which is trained in rounds by units of one rank"
            if place.split is None:
                wanted = "columns if its outputs are dealt, or rows"
                yield f"placements: {layer} has holding 'subnet' and needs a split: {wanted}"
        if len(roles) > 1:
            yield f"placements: subnets are in roles {', '.join(sorted(roles))}; they must be in one"

    def begins(self, program: LoweredProgram, rank_program: RankProgram) -> Iterator[Action]:
        stages = program.stages_of(rank_program)
        yield from (Action("deal", role=stage.role) for stage in stages if stage.dealt)
        yield from (Action("fetch_ahead", role=stage.role) for stage in stages if fetches_ahead(stage))

    def ends(self, program: LoweredProgram, rank_program: RankProgram) -> Iterator[Action]:
        yield from (Action("collect", role=stage.role) for stage in program.stages_of(rank_program) if stage.dealt)

    def numel(self, program: PlacedProgram, stage: Stage, name: str, rank: int) -> int | None:
        if name not in stage.dealt:
            return None
        return slice_numel(program.tensors[name], stage.dealt[name], program.plan.world, rank)

    def holds(self, program: LoweredProgram, rank: int) -> Iterator[tuple[tuple[int, ...], int]]:
        for stage in program.stages:  # that it owns
            owned = (program.tensors[name].nbytes for name in stage.dealt)
            yield from (((), -(-nbytes // program.plan.world)) for nbytes in owned)

    def part(
        self, program: Program, plan: Plan, place: LayerPlacement, held: Sequence[StateTensor]
    ) -> tuple[float, float]:
        if place.holding != "subnet":
            return 1.0, 0.0
        return share_of(held, dealing_of(program, plan.world).tensors, plan.world), 1 / plan.world

    def share(self, program: LoweredProgram, stage: Stage, layer: str, rank: int) -> float:
        if program.plan.placements[layer].holding != "subnet":
            return 1.0
        tensors = (program.tensors[name] for name in program.layer(layer).tensors)
        return share_of(tensors, stage.dealt, program.plan.world, rank)

    def sent_bytes(self, program: LoweredProgram, layer: Layer) -> float:
        """A slice travels there and back, as many bytes as in a ring."""
        plan, place = program.plan, program.plan.placements[layer.name]
        if place.holding != "subnet":
            return 0.0
        n, dealt = len(plan.averaged(place.role, plan.roles[place.role][0])), program.stage(place.role).dealt
        own = sum(exchanged_nbytes(program.tensors[name], dealt.get(name, {}), n) for name in layer.tensors)
        return Collective.ALL_REDUCE.sent(own, own, n) / (plan.period * plan.accumulate)

    def text(self, plan: Plan) -> str:
        updates = f"{plan.period} update{'s' * (plan.period > 1)}"
        return f"rounds of {updates} by each rank on its own subnet, then dealt again" if plan.deals else ""

    def why(self, plan: Plan, place: LayerPlacement) -> str:
        part = "its neurons" if place.split == "columns" else "the neurons it reads"
        how = f"each rank trains 1/{plan.world} of {part}, dealt again after every round"
        return how if place.holding == "subnet" else ""


FEATURE = Subnets()
