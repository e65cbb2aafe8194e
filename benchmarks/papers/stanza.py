"""Price a step by the performance model of Stanza (Wu et al. 2018), equations (2) to (7), in the paper's symbols.

It reproduces the paper's numbers, independently of splitc's own prices.  P, A and P_c count numbers
of `itemsize` bytes, B is in bytes/s and times are in seconds.

    t_s^c = T_c + (n_c / n_f) T_f                                                  (2)
    t_s   = t_s^c + 2 n_c A K / (n_f B) + P_c rounds(n_c) / B                      (3)
    throughput_s(n_c, n_f) = n_c K / t_s                                           (4)
    maximise throughput_s  subject to  N = n_c + n_f,  n_c > 0,  n_f > 0           (5)
    t_ps  = 2 n_w P / (n_s B) + T_ps                                               (6)
    throughput_ps(n_w, n_s) = n_w K / t_ps                                         (7)

Equation (3) writes ceil(log2 n_c) + 2 rounds for an n_c that is no power of two; section 4.1.2, and
equation (3) in an earlier version of the paper, floor(log2 n_c) + 2.  This module uses floor, the
number of rounds of the algorithm of section 4.1.2.

Footnotes 4 and 6 say that node assignment considers the memory of a GPU, without an equation.  Here
an assignment fits if

    3 P_c itemsize + conv_saved                                       <=  capacity    a CONV worker
    3 (P - P_c) itemsize + ceil(n_c / n_f) (fc_saved + 2 A K itemsize) <=  capacity    an FC worker

3: parameters, gradients and the momentum of the paper's SGD; 2 A K: received activations and their
gradients.  The busiest FC worker serves ceil(n_c / n_f) CONV workers (4.1.3).
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.papers.conv_fc_split import ConvFcSplit
from splitc import units
from splitc.cost_models.network.alpha_beta import recursive_doubling_rounds
from splitc.errors import CostError
from splitc.ir.device import Device

_COPIES = 3


@dataclass(frozen=True)
class Symbols:
    """Table 3.

    K: batch size of a worker.  P, P_c: parameters of the model and of its conv layers.  A: activations
    of the last conv layer for one example.  B: bandwidth of a node (bytes/s).  T_c, T_f: compute time of
    the conv layers, and of the fc layers, for one worker's batch (s).  T_ps: compute time of a
    parameter-server worker (s); None: T_c + T_f.
    """

    K: int
    P: float
    A: float
    P_c: float
    B: float
    T_c: float
    T_f: float
    T_ps: float | None = None
    itemsize: int = 4


@dataclass(frozen=True)
class Memory:
    """Bytes.  capacity: of a GPU.  conv_saved, fc_saved: activations saved by the conv and fc layers for K examples."""

    capacity: float
    conv_saved: float
    fc_saved: float


def symbols_of(split: ConvFcSplit, K: int, B: float, device: Device) -> Symbols:
    """Return the symbols of a captured model; times are by the roofline of `device` in float32."""
    return Symbols(
        K=K,
        P=split.P,
        A=split.A,
        P_c=split.P_c,
        B=B,
        T_c=split.seconds(split.conv, K, device),
        T_f=split.seconds(split.fc, K, device),
    )


def memory_of(split: ConvFcSplit, K: int, device: Device) -> Memory:
    """Return the memory limits of a captured model."""
    return Memory(device.memory, split.saved_nbytes(split.conv, K), split.saved_nbytes(split.fc, K))


def compute_seconds(s: Symbols, n_c: int, n_f: int) -> float:
    """t_s^c = T_c + (n_c / n_f) T_f   (2)."""
    return s.T_c + n_c / n_f * s.T_f


def step_seconds(s: Symbols, n_c: int, n_f: int) -> float:
    """t_s = t_s^c + 2 n_c A K / (n_f B) + P_c rounds(n_c) / B   (3).

    The fc ranks' gradient exchange overlaps that of the conv ranks and is left out, as in the paper.
    """
    exchange = 2 * n_c * s.A * s.K * s.itemsize / (n_f * s.B)
    conv_sync = s.P_c * s.itemsize * recursive_doubling_rounds(n_c) / s.B
    return compute_seconds(s, n_c, n_f) + exchange + conv_sync


def throughput(s: Symbols, n_c: int, n_f: int) -> float:
    """Samples per second, n_c K / t_s   (4)."""
    return n_c * s.K / step_seconds(s, n_c, n_f)


def conv_nbytes(s: Symbols, memory: Memory) -> float:
    """Bytes that a CONV worker needs."""
    return _COPIES * s.P_c * s.itemsize + memory.conv_saved


def fc_nbytes(s: Symbols, memory: Memory, n_c: int, n_f: int) -> float:
    """Bytes that the busiest FC worker needs."""
    served = -(-n_c // n_f)
    return _COPIES * (s.P - s.P_c) * s.itemsize + served * (memory.fc_saved + 2 * s.A * s.K * s.itemsize)


def fits(s: Symbols, memory: Memory, n_c: int, n_f: int) -> bool:
    """Return whether every worker of the assignment has enough memory."""
    return max(conv_nbytes(s, memory), fc_nbytes(s, memory, n_c, n_f)) <= memory.capacity


def assign_nodes(s: Symbols, nodes: int, memory: Memory | None = None) -> tuple[int, int]:
    """Return the (n_c, n_f) of largest throughput with n_c + n_f = nodes, by exhaustive search   (5).

    memory: excludes assignments that do not fit.  Raises CostError for fewer than two nodes, or if none fits.
    """
    divisions = [each for each in _divisions(nodes) if memory is None or fits(s, memory, *each)]
    if memory is not None and not divisions:
        raise CostError(
            f"no assignment of {nodes} nodes with {units.nbytes(memory.capacity)} each fits: a CONV worker needs "
            f"{units.nbytes(conv_nbytes(s, memory))}, an FC worker that serves one of them "
            f"{units.nbytes(fc_nbytes(s, memory, 1, 1))}; take a batch K smaller than {s.K}"
        )
    return max(divisions, key=lambda each: throughput(s, *each))


def ps_step_seconds(s: Symbols, n_w: int, n_s: int) -> float:
    """t_ps = 2 n_w P / (n_s B) + T_ps   (6): n_w workers, n_s parameter servers."""
    t_ps = s.T_c + s.T_f if s.T_ps is None else s.T_ps
    return 2 * n_w * s.P * s.itemsize / (n_s * s.B) + t_ps


def ps_throughput(s: Symbols, n_w: int, n_s: int) -> float:
    """Samples per second, n_w K / t_ps   (7)."""
    return n_w * s.K / ps_step_seconds(s, n_w, n_s)


def assign_ps_nodes(s: Symbols, nodes: int) -> tuple[int, int]:
    """Return the (n_w, n_s) of largest throughput with n_w + n_s = nodes, by exhaustive search (7.2).

    Doubling the nodes at least doubles the throughput, since (6) depends on n_w / n_s only.
    Raises CostError for fewer than two nodes.
    """
    return max(_divisions(nodes), key=lambda each: ps_throughput(s, *each))


def speedup(s: Symbols, nodes: int, memory: Memory | None = None) -> float:
    """Throughput of Stanza relative to the parameter server, each with its best assignment (figure 8)."""
    return throughput(s, *assign_nodes(s, nodes, memory)) / ps_throughput(s, *assign_ps_nodes(s, nodes))


def _divisions(nodes: int) -> list[tuple[int, int]]:
    """Return the assignments of all nodes to two roles, those with the most workers first, which win ties."""
    if nodes < 2:
        raise CostError(f"{nodes} nodes cannot be divided into two roles; there must be at least 2")
    return [(n, nodes - n) for n in range(nodes - 1, 0, -1)]
