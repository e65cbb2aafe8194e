"""Price the methods of Practical Lessons of Distributed Deep Learning (Yang et al.), sections 2.1 and 2.2, and table 2.

Late-multiply (2.1).  A layer of N bottom and K top neurons trains on n workers, each with a batch of M: X is M x N, E
M x K, W K x N.

    algorithm 1    W_i = E_i^T X_i on each; Reduce W_i to worker 0; Broadcast W_avg
    algorithm 2    Allgather X_i and E_i; every worker computes E_i^T X_i of all n

The paper names the operations; the numbers that all workers together receive in them are

    algorithm 1    (n - 1) K N in Reduce, as many in Broadcast                        (1)
    algorithm 2    n (n - 1) M (N + K) in Allgather                                   (2)

so late-multiply moves less where n M (N + K) < 2 K N; each worker multiplies n times as much.

Hybrid-parallelism (2.2).  Conv layers with P_c of the P parameters on n devices, the fc layers on one.  Table 2 counts

    data parallel  2 n P                a gradient and a weight for each device       (3)
    hybrid         2 n P_c + 2 b A      b: the global batch; A: activations of one    (4)
                                        example that enter the fc layers

(4) counts the device with the fc layers like the others, though its own activations are not sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitc.errors import CostError


@dataclass(frozen=True)
class Layer:
    """A fully connected layer of N bottom and K top neurons on n workers, each with a batch of M."""

    M: int
    N: int
    K: int
    n: int
    itemsize: int = 4

    def __post_init__(self) -> None:
        if min(self.M, self.N, self.K, self.n) < 1:
            raise CostError(
                f"a layer of {self.N} x {self.K} on {self.n} workers with {self.M} examples: all must be >= 1"
            )


def reduce_broadcast_nbytes(layer: Layer) -> int:
    """Bytes that all workers receive in algorithm 1, equation (1)."""
    return 2 * (layer.n - 1) * layer.K * layer.N * layer.itemsize


def late_multiply_nbytes(layer: Layer) -> int:
    """Bytes that all workers receive in algorithm 2, equation (2)."""
    return layer.n * (layer.n - 1) * layer.M * (layer.N + layer.K) * layer.itemsize


def late_multiply_moves_less(layer: Layer) -> bool:
    """n M (N + K) < 2 K N."""
    return layer.n * layer.M * (layer.N + layer.K) < 2 * layer.K * layer.N


def weight_gradient_flops(layer: Layer, late: bool = False) -> int:
    """FLOPs of E^T X on one worker, a multiply-add as two; n times as many with late-multiply."""
    return 2 * layer.M * layer.N * layer.K * (layer.n if late else 1)


def data_parallel_nbytes(P: float, n: int, itemsize: int = 4) -> float:
    """Bytes exchanged in a step, equation (3); 0 on one device."""
    return 2 * n * P * itemsize if n > 1 else 0.0


def hybrid_nbytes(P_c: float, A: float, batch: int, n: int, itemsize: int = 4) -> float:
    """Bytes exchanged in a step, equation (4); 0 on one device.  batch: global batch size."""
    return (2 * n * P_c + 2 * batch * A) * itemsize if n > 1 else 0.0
