"""The performance model of Stanza (Wu et al. 2018), equations (2) to (7), in the paper's symbols.

It is kept beside splitc's own prices to reproduce the paper's numbers.  P, A and P_c count numbers
of `itemsize` bytes, B is in bytes/s and times are in seconds.  Equation (3) writes ceil(log2 n_c) +
2 rounds for an n_c that is no power of two, section 4.1.2 floor(log2 n_c) + 2; here it is floor,
which is what the algorithm described there takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.alpha_beta import recursive_doubling_rounds
from splitc.errors import CostError


@dataclass(frozen=True)
class Symbols:
    """Table 3.

    K: examples of one worker.  P: parameters of the model; P_c: of its conv layers.  A: activations
    of the last conv layer for one example.  B: bandwidth of a node (bytes/s).  T_c, T_f: seconds
    that one worker's conv layers, and the fc layers on one worker's activations, take in a step.
    T_ps: seconds of a whole step on one parameter-server worker; T_c + T_f when it is left out.
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


def compute_seconds(s: Symbols, n_c: int, n_f: int) -> float:
    """t_s^c = T_c + (n_c / n_f) T_f   (2)."""
    return s.T_c + n_c / n_f * s.T_f


def step_seconds(s: Symbols, n_c: int, n_f: int) -> float:
    """t_s = t_s^c + 2 n_c A K / (n_f B) + P_c rounds(n_c) / B   (3).

    The fc ranks' own exchange overlaps the conv ranks' and is left out, as in the paper.
    """
    exchange = 2 * n_c * s.A * s.K * s.itemsize / (n_f * s.B)
    conv_sync = s.P_c * s.itemsize * recursive_doubling_rounds(n_c) / s.B
    return compute_seconds(s, n_c, n_f) + exchange + conv_sync


def throughput(s: Symbols, n_c: int, n_f: int) -> float:
    """Samples per second, n_c K / t_s   (4)."""
    return n_c * s.K / step_seconds(s, n_c, n_f)


def assign_nodes(s: Symbols, nodes: int) -> tuple[int, int]:
    """The (n_c, n_f) with n_c + n_f = nodes of the largest throughput, by trying all   (5).

    Raises CostError for fewer than two nodes.
    """
    _need_two(nodes)
    return max(((n, nodes - n) for n in range(nodes - 1, 0, -1)), key=lambda n: throughput(s, *n))


def ps_step_seconds(s: Symbols, n_w: int, n_s: int) -> float:
    """t_ps = 2 n_w P / (n_s B) + T_ps   (6): n_w workers, n_s parameter servers."""
    t_ps = s.T_c + s.T_f if s.T_ps is None else s.T_ps
    return 2 * n_w * s.P * s.itemsize / (n_s * s.B) + t_ps


def ps_throughput(s: Symbols, n_w: int, n_s: int) -> float:
    """Samples per second, n_w K / t_ps   (7)."""
    return n_w * s.K / ps_step_seconds(s, n_w, n_s)


def assign_ps_nodes(s: Symbols, nodes: int) -> tuple[int, int]:
    """The (n_w, n_s) with n_w + n_s = nodes of the largest throughput, by trying all (7.2).

    Raises CostError for fewer than two nodes.
    """
    _need_two(nodes)
    return max(((n, nodes - n) for n in range(nodes - 1, 0, -1)), key=lambda n: ps_throughput(s, *n))


def _need_two(nodes: int) -> None:
    if nodes < 2:
        raise CostError(f"{nodes} nodes cannot be divided into two roles; there must be at least 2")
