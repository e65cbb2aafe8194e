"""Times of layers, updates and transfers on a cluster, each computed once."""

from __future__ import annotations

from collections.abc import Iterable

from splitc.cost_models.compute.dtypes import layer_dtypes
from splitc.cost_models.compute.roofline import layer_seconds
from splitc.cost_models.simulation.operations import Begin, Compute, Operation, Transfer
from splitc.cost_models.simulation.paths import Paths
from splitc.cost_models.simulation.stage_layers import Walk
from splitc.ir.cluster import Cluster
from splitc.ir.device import Device
from splitc.ir.program import LoweredProgram
from splitc.ir.wire_op import Payload, WireOp

UPDATE = 8
"""Bytes read and written in an update by SGD with momentum, as a multiple of the parameters' bytes."""


class Prices:
    """Cached times of layers and transfers on a cluster.

    ranks: those simulated.  walks: role -> what a step meets along its stage.  travelling: what ranks begin in one step
    and wait for in another, by rank, role and bucket.
    """

    def __init__(self, program: LoweredProgram, cluster: Cluster, ranks: Iterable[int] | None = None) -> None:
        self.program, self.cluster = program, cluster
        self.ranks = frozenset(range(program.plan.world) if ranks is None else ranks)
        self.walks = {stage.role: Walk.of(stage) for stage in program.stages}
        self._paths = Paths(cluster, program.plan.world, self.ranks)
        self._dtypes = layer_dtypes(program, cluster.device)
        self._seconds: dict[tuple[str, int, int], tuple[float, float]] = {}
        self._transfers: dict[tuple[Payload, int, int, int], Transfer] = {}
        self._counts: dict[tuple[int, str, Payload, int, int], int] = {}
        self._times = 1
        self.travelling: dict[tuple[int, str, int | None], list[tuple[Transfer, float]]] = {}

    def begin_step(self, times: int = 1) -> None:
        """Make new transfers from now on.  times: that the step to come is repeated."""
        self._transfers, self._counts, self._times = {}, {}, times

    def repeated(self, operation: Operation) -> Operation:
        """Return an operation that stands for as many as the step is repeated."""
        if self._times > 1 and isinstance(operation, Compute):
            return Compute(f"{self._times} x {operation.name}", self._times * operation.seconds)
        if self._times > 1 and isinstance(operation, Begin):
            return Begin(operation.transfer, self._times * operation.nbytes)
        return operation

    def layer(self, layer: str, batch: int, device: Device) -> tuple[float, float]:
        """Return the forward and backward time of a whole layer (s)."""
        key = layer, batch, id(device)
        if key not in self._seconds:
            self._seconds[key] = layer_seconds(self.program.costs[layer].at(batch), device, self._dtypes[layer])
        return self._seconds[key]

    def transfer(self, rank: int, op: WireOp) -> Transfer:
        """Return the transfer that the next operation of `rank` with this payload and these ranks is an end of."""
        ends = {"send": (rank, op.ranks[0]), "recv": (op.ranks[0], rank)}.get(op.kind, op.ranks)
        own = rank, op.kind, op.payload, op.ranks[0], op.ranks[-1]
        nth = self._counts[own] = self._counts.get(own, -1) + 1
        key = op.payload, ends[0], ends[-1], nth
        if key not in self._transfers:
            self._transfers[key] = self._paths.transfer(op, ends, self._times)
        return self._transfers[key]
