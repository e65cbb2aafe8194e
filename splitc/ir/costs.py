"""What a layer costs: FLOPs, bytes and seconds of its ops at any batch size."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class OpCost:
    """One kind of op of a layer, as torch runs it in a step; `launches` equal ones together.

    op_class: at what rate a device computes or moves it, as of `Device.reached`.  flops: a multiply-add is two.
    bytes_accessed: bytes read and written in memory.  padding_flops: extra FLOPs spent on padded
    channels.
    """

    name: str
    op_class: str
    backward: bool
    flops: float
    bytes_accessed: float
    kernel_launches: float = 1.0
    padding_flops: float = 0.0

    def along(self, other: OpCost, t: float) -> OpCost:
        """What lies at part `t` of the way from this op to `other`, or beyond; never less than nothing."""
        flops, moved, launches, filling = (
            max((1 - t) * a + t * b, 0.0) for a, b in zip(self.numbers, other.numbers, strict=True)
        )
        return replace(self, flops=flops, bytes_accessed=moved, kernel_launches=launches, padding_flops=filling)

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        return self.flops, self.bytes_accessed, self.kernel_launches, self.padding_flops


@dataclass(frozen=True)
class Measured:
    """Seconds that a layer took on this machine, when float32 matrix products reached `flop_rate` FLOP/s on it."""

    forward: float
    backward: float
    flop_rate: float


@dataclass(frozen=True)
class LayerCost:
    """What one layer does in one step of `batch` examples on one rank, forward and backward.

    seconds: compute time (s).  flops: a multiply-add is two.  moved: bytes read and written in memory.
    saved_bytes: bytes of activations that stay until backward.
    measured: what it took where its layers were measured; it then counts instead of flops and moved.
    ops: the same op by op; a cost without them is priced as one matrix product forward and one backward.
    by_bytes: ops among them that may compute more than their bytes tell: nothing is known of them.
    """

    batch: int
    forward_flops: float
    backward_flops: float
    forward_bytes_accessed: float
    backward_bytes_accessed: float
    saved_bytes: float
    kernel_launches: float
    seconds: float = 0.0
    measured: Measured | None = None
    ops: tuple[OpCost, ...] = ()
    by_bytes: tuple[str, ...] = ()

    @classmethod
    def of_ops(cls, batch: int, ops: tuple[OpCost, ...], kept: float, by_bytes: tuple[str, ...] = ()) -> LayerCost:
        """The cost that is the sum of `ops`."""
        forward, backward = ([op for op in ops if op.backward == back] for back in (False, True))
        return cls(
            batch,
            sum(op.flops for op in forward),
            sum(op.flops for op in backward),
            sum(op.bytes_accessed for op in forward),
            sum(op.bytes_accessed for op in backward),
            kept,
            sum(op.kernel_launches for op in ops),
            ops=ops,
            by_bytes=by_bytes,
        )

    @property
    def flops(self) -> float:
        return self.forward_flops + self.backward_flops


@dataclass(frozen=True)
class CostLine:
    """A layer's cost at any batch: FLOPs, bytes and kept activations are a constant plus a slope per example.

    Measured at two batch sizes, op for op; `at` draws the lines through them (exact for work linear in the batch).
    """

    small: LayerCost
    large: LayerCost

    def at(self, batch: int) -> LayerCost:
        """The cost of `batch` examples, without seconds: they depend on a device."""
        t = (batch - self.small.batch) / (self.large.batch - self.small.batch)

        def line(a: float, b: float) -> float:
            return max(a + t * (b - a), 0.0)

        small, large = self.small, self.large
        if small.ops:
            ops = tuple(a.along(b, t) for a, b in zip(small.ops, large.ops, strict=True))
            return LayerCost.of_ops(batch, ops, line(small.saved_bytes, large.saved_bytes), small.by_bytes)
        return LayerCost(
            batch,
            line(small.forward_flops, large.forward_flops),
            line(small.backward_flops, large.backward_flops),
            line(small.forward_bytes_accessed, large.forward_bytes_accessed),
            line(small.backward_bytes_accessed, large.backward_bytes_accessed),
            line(small.saved_bytes, large.saved_bytes),
            small.kernel_launches,
        )
