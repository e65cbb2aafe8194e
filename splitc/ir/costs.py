"""What a layer costs: the FLOPs, bytes and kernel launches of its ops at any batch size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class OpCost:
    """One kind of op of a layer, as torch runs it in a step; `kernel_launches` equal ones together.

    op_class: selects the rate at which a device runs it, see `Device.efficiency_of`.
    flops: a multiply-add counts as two.  padding_flops: extra FLOPs spent on padded channels.
    bytes_accessed: bytes read and written in memory.
    unknown: it has no FLOP formula and is not known to be memory-bound, so it is priced by its bytes alone.
    """

    name: str
    op_class: str
    backward: bool
    flops: float
    bytes_accessed: float
    kernel_launches: float = 1.0
    padding_flops: float = 0.0
    unknown: bool = False

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        return self.flops, self.bytes_accessed, self.kernel_launches, self.padding_flops

    def with_numbers(self, numbers: Iterable[float]) -> OpCost:
        """The same kind of op with other `numbers`."""
        flops, nbytes, launches, padding = numbers
        return replace(self, flops=flops, bytes_accessed=nbytes, kernel_launches=launches, padding_flops=padding)

    def along(self, other: OpCost, t: float) -> OpCost:
        """Interpolate from this op (t = 0) to `other` (t = 1), or extrapolate; no number falls below 0."""
        pairs = zip(self.numbers, other.numbers, strict=True)
        return self.with_numbers(max((1 - t) * a + t * b, 0.0) for a, b in pairs)


@dataclass(frozen=True)
class LayerCost:
    """What one layer does in one step of `batch` examples on one rank, forward and backward.

    saved_bytes: bytes of activations that autograd keeps until backward.
    """

    batch: int
    ops: tuple[OpCost, ...]
    saved_bytes: float

    @cached_property
    def forward_ops(self) -> tuple[OpCost, ...]:
        return tuple(op for op in self.ops if not op.backward)

    @cached_property
    def backward_ops(self) -> tuple[OpCost, ...]:
        return tuple(op for op in self.ops if op.backward)

    @property
    def flops(self) -> float:
        return sum(op.flops for op in self.ops)

    @property
    def unknown_ops(self) -> tuple[str, ...]:
        """Names of the ops that are priced by their bytes alone."""
        return tuple(dict.fromkeys(op.name for op in self.ops if op.unknown))


@dataclass(frozen=True)
class CostLine:
    """A layer's cost at any batch: the line, op by op, through the costs counted at two batch sizes.

    It is exact for work that is linear in the batch.
    """

    small: LayerCost
    large: LayerCost

    def at(self, batch: int) -> LayerCost:
        """The cost of `batch` examples."""
        small, large = self.small, self.large
        t = (batch - small.batch) / (large.batch - small.batch)
        ops = tuple(a.along(b, t) for a, b in zip(small.ops, large.ops, strict=True))
        return LayerCost(batch, ops, self.saved_bytes_at(batch))

    def saved_bytes_at(self, batch: int) -> float:
        """Bytes of the activations of `batch` examples that autograd keeps until backward."""
        small, large = self.small, self.large
        t = (batch - small.batch) / (large.batch - small.batch)
        return max(small.saved_bytes + t * (large.saved_bytes - small.saved_bytes), 0.0)
