"""Parameters on servers, as passes, checks, prices and reports know them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import ClassVar

from splitc.ir.features import Feature
from splitc.ir.layers import Layer
from splitc.ir.placements import LayerPlacement
from splitc.ir.plan import SERVER, Plan
from splitc.ir.program import LoweredProgram, PlacedProgram
from splitc.ir.schedule.actions import Action, RankProgram
from splitc.ir.servers.wire import pieces, server_ops, worker_ops

SYNC = "parameter_server"


class Servers(Feature):
    """Layers whose gradients go to servers, and whose parameters come back."""

    reads = "world servers placements"
    ops: ClassVar = {
        "pull": worker_ops,
        "push": worker_ops,
        "send_parameters": server_ops,
        "reduce_gradients": server_ops,
    }

    def concerns(self, plan: Plan) -> bool:
        return bool(plan.servers)

    def problems(self, plan: Plan) -> Iterator[str]:
        world, servers = plan.world, plan.servers
        for rank in servers:
            if not 0 <= rank < world:
                yield f"servers: there is no rank {rank}, the world has ranks 0 to {world - 1}"
        if len(set(servers)) < len(servers):
            yield "servers: a rank is there twice"
        for layer, place in plan.placements.items() if not servers else ():
            if place.sync == SYNC:
                yield f"placements: {layer} has sync {SYNC!r}, but servers is empty"

    def misplaced(self, program: PlacedProgram) -> Iterator[str]:
        """Servers serve whole replicas; a server on a worker's rank is in every served role."""
        plan = program.plan
        served = {name: place.role for name, place in plan.placements.items() if place.sync == SYNC}
        for name, role in served.items():
            if role in plan.groups:
                yield f"layer {name} is served, but its role {role} has model-parallel groups"
        for rank in plan.servers:
            for role in dict.fromkeys(served.values()):
                if (own := plan.roles_of(rank)) and role not in own:
                    yield (
                        f"rank {rank} is a server and in role {' and '.join(own)}, but not in role {role}, whose "
                        f"parameters it serves"
                    )

    def begins(self, program: LoweredProgram, rank_program: RankProgram) -> Iterator[Action]:
        if rank_program.roles == (SERVER,):  # a rank that is a worker too serves while it pulls and pushes
            yield Action("send_parameters", role=SERVER)
            yield from [Action("reduce_gradients", role=SERVER)] * _in_pieces(program)
        for stage in program.stages_of(rank_program):
            if stage.served:
                yield Action("pull", role=stage.role)

    def ends(self, program: LoweredProgram, rank_program: RankProgram) -> Iterator[Action]:
        if rank_program.roles == (SERVER,) and not _in_pieces(program):
            yield Action("reduce_gradients", role=SERVER)

    def updated(self, program: LoweredProgram, rank: int) -> tuple[float, Collection[str]]:
        served, servers = served_names(program), program.plan.servers
        return sum(program.tensors[name].nbytes for name in served) / len(servers) if rank in servers else 0.0, served

    def holds(self, program: LoweredProgram, rank: int) -> Iterator[tuple[tuple[int, ...], int]]:
        for stage in program.stages:
            for bucket in stage.served:
                held = (piece for piece in pieces(program, bucket, program.plan.servers) if piece.server == rank)
                yield from ((piece.shape, piece.nbytes) for piece in held)

    def sent_bytes(self, program: LoweredProgram, layer: Layer) -> float:
        if program.plan.placements[layer.name].sync != SYNC:
            return 0.0
        held = (program.tensors[name] for name in layer.tensors)
        return sum(tensor.nbytes for tensor in held if tensor.trainable) / program.plan.accumulate

    def why(self, plan: Plan, place: LayerPlacement) -> str:
        return "its gradient goes to the servers and its parameters come back" if place.sync == SYNC else ""


FEATURE = Servers()


def served_names(program: LoweredProgram) -> set[str]:
    """The parameters that servers hold."""
    return {name for stage in program.stages for bucket in stage.served for name in bucket}


def _in_pieces(program: LoweredProgram) -> bool:
    """Whether the loss is known after the last push."""
    return any(program.turns(stage) > 1 for stage in program.stages)
