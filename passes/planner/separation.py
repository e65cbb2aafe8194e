"""The numbers of one division of the world into conv and fc ranks, and the cost of an assignment.

Plain numbers, no graph and no torch.  As in Stanza, conv stands for the role that reads the data and fc for the one
that has the loss, whatever their names in the plan.  `separation_ilp` finds the best assignment of these numbers and
has the equations that are cited here; an assignment is the set of the layers that are fc.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class LayerNumbers:
    """One layer on the busiest rank of each role: seconds, bytes of memory, bytes of its gradient.

    parameters: whether it has some.  may_be_conv, may_be_fc: the roles that it may run in.
    """

    name: str
    conv_seconds: float
    fc_seconds: float
    conv_memory: float
    fc_memory: float
    gradient: float
    parameters: bool
    may_be_conv: bool = True
    may_be_fc: bool = True


@dataclass(frozen=True)
class ValueNumbers:
    """One value that other layers read: seconds and bytes of memory if it crosses.

    layer: the layer that makes it; None for an input of the step.
    """

    name: str
    layer: str | None
    readers: tuple[str, ...]
    seconds: float
    conv_memory: float
    fc_memory: float


@dataclass(frozen=True)
class SyncLine:
    """Seconds of an all-reduce as a line in its bytes: `latency` + `seconds_per_byte` * bytes."""

    latency: float
    seconds_per_byte: float

    def seconds(self, nbytes: float) -> float:
        return self.latency + self.seconds_per_byte * nbytes if nbytes else 0.0


@dataclass(frozen=True)
class StepSeconds:
    """The terms of equation (1), in seconds."""

    conv: float
    fc: float
    exchange: float
    conv_sync: float
    fc_sync: float

    @property
    def total(self) -> float:
        return self.conv + self.fc + self.exchange + max(self.conv_sync, self.fc_sync)


@dataclass(frozen=True)
class Separation:
    """The numbers of equations (1) to (11).

    order: pairs (i, j) with fc[i] <= fc[j].  together: pairs that cannot be parted.  memory: bytes
    of a rank.  shared: the fc rank is a conv rank too, and needs the memory of both.
    """

    layers: tuple[LayerNumbers, ...]
    values: tuple[ValueNumbers, ...]
    order: tuple[tuple[str, str], ...]
    together: tuple[tuple[str, str], ...]
    conv_sync: SyncLine
    fc_sync: SyncLine
    memory: float
    shared: bool = False

    @cached_property
    def owners(self) -> frozenset[str]:
        """The layers with parameters."""
        return frozenset(layer.name for layer in self.layers if layer.parameters)

    def crosses(self, value: ValueNumbers, fc: Set[str]) -> bool:
        return value.layer not in fc and not fc.isdisjoint(value.readers)

    def step(self, fc: Set[str]) -> StepSeconds:
        """The seconds of a step when the layers `fc` are fc."""
        gradients = [sum(n.gradient for n in self.layers if (n.name in fc) == there) for there in (False, True)]
        return StepSeconds(
            conv=sum(n.conv_seconds for n in self.layers if n.name not in fc),
            fc=sum(n.fc_seconds for n in self.layers if n.name in fc),
            exchange=sum(v.seconds for v in self.values if self.crosses(v, fc)),
            conv_sync=self.conv_sync.seconds(gradients[0]),
            fc_sync=self.fc_sync.seconds(gradients[1]),
        )

    def memory_of(self, fc: Set[str]) -> tuple[float, float]:
        """Bytes that a conv and an fc rank need."""
        crossing = [v for v in self.values if self.crosses(v, fc)]
        conv = sum(n.conv_memory for n in self.layers if n.name not in fc)
        there = sum(n.fc_memory for n in self.layers if n.name in fc)
        conv += sum(v.conv_memory for v in crossing)
        there += sum(v.fc_memory for v in crossing)
        return conv, there + conv * self.shared

    def allowed(self, fc: Set[str]) -> bool:
        """Whether `fc` meets equations (6), (8), (9) and (11): all but the memory."""
        return (
            all(j in fc for i, j in self.order if i in fc)
            and all((i in fc) == (j in fc) for i, j in self.together)
            and 0 < len(self.owners & fc) < len(self.owners)
            and all(n.may_be_fc if n.name in fc else n.may_be_conv for n in self.layers)
        )

    def fits(self, fc: Set[str]) -> bool:
        """Whether `fc` meets equation (10)."""
        return max(self.memory_of(fc)) <= self.memory * (1 + 1e-9)

    def least_seconds(self) -> float:
        """A bound that needs no solver: every layer where it is faster, nothing crosses.

        The slower of two reductions that share the gradients is fastest when both take as long.
        """
        compute = 0.0
        for n in self.layers:
            conv = n.conv_seconds if n.may_be_conv else math.inf
            compute += min(conv, n.fc_seconds if n.may_be_fc else math.inf)
        a, b = self.conv_sync.seconds_per_byte, self.fc_sync.seconds_per_byte
        shared = a * b / (a + b) if a and b else 0.0
        return compute + shared * sum(n.gradient for n in self.layers)
