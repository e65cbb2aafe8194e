"""Price a step of Independent Subnet Training and of data parallelism (Yuan et al., section 3.4).

A feed-forward network of layers with N_0 (the input), N_1, ..., N_t neurons trains on n sites, with batches of B
examples and J local steps between two exchanges.  Parameters and gradients received by all sites in one gradient step:

    data parallel   sum_{i=1..t} n N_{i-1} N_i                                                      (traffic)
    IST             (N_0 N_1 + N_{t-1} N_t) / J + sum_{i=2..t-1} N_{i-1} N_i / (n J)

The appendix has no coordinator: each site owns 1/n of every matrix, sends the others what they need of it, and gets it
back.  So of 3.4's sum 1 - 1/n travels before the J steps and as much after them, with the optimizer's state; what every
site has whole is averaged by a ring.

FLOPs of the matrix products of forward and backward, over all sites:

    data parallel   4 sum_{i=1..t} B N_{i-1} N_i                                                    (flops)
    IST             4 B N_0 N_1 + 4 B N_{t-1} N_t + 4 B sum_{i=2..t-1} N_{i-1} N_i / n

B is the global batch of data parallelism and the batch of each site of IST.

The paper writes IST's sums from 1 to l.  Its text treats the first and the last matrix separately, since all sites have
all inputs and outputs; so the sums here run over the matrices between them, of which each site has 1/n^2.  Its factor 4
is twice the FLOPs of forward; a framework takes 6, since backward computes two more products for each layer (the
gradients of weights and inputs), and 4 for the first layer, whose input needs no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from splitc.errors import CostError


@dataclass(frozen=True)
class Symbols:
    """N: neurons of each layer, input first.  B: batch size.  J: local steps.  itemsize: bytes of a number."""

    N: tuple[int, ...]
    B: int
    J: int
    itemsize: int = 4

    def __post_init__(self) -> None:
        if len(self.N) < 3:
            raise CostError(f"IST divides hidden layers, and there are {max(len(self.N) - 2, 0)} in {self.N}")


FIGURE_2 = Symbols(N=(1000, 4000, 4000, 4000, 200), B=512, J=10)
"""Three hidden layers of 4000 neurons, 1000 features, 200 labels."""


def data_parallel_nbytes(s: Symbols, n: int) -> float:
    """Bytes received by all n sites in a step; every site receives all parameters."""
    return s.itemsize * n * sum(_matrices(s))


def ist_nbytes(s: Symbols, n: int) -> float:
    """Mean bytes received by all n sites in a step; each receives its subnet once in J steps."""
    first, *between, last = _matrices(s)
    return s.itemsize * (first + last + sum(between) / n) / s.J


def exchanged_nbytes(s: Symbols, n: int, states: int = 0, averaged: float = 0.0) -> float:
    """Mean bytes sent by all n sites in a step where each owns 1/n of every matrix, by what is written above.

    states: dealt tensors in the optimizer's state for each parameter.  averaged: bytes that every site has whole.
    """
    return (1 + states) * (2 * (1 - 1 / n) * ist_nbytes(s, n) + 2 * (n - 1) * averaged / s.J)


def data_parallel_flops(s: Symbols) -> float:
    """FLOPs of a step over all sites."""
    return 4.0 * s.B * sum(_matrices(s))


def ist_flops(s: Symbols, n: int) -> float:
    """FLOPs of a step over all n sites, each with its own batch and subnet."""
    first, *between, last = _matrices(s)
    return 4.0 * s.B * (first + last + sum(between) / n)


def _matrices(s: Symbols) -> list[int]:
    """Return the number of weights of each layer."""
    return [before * after for before, after in pairwise(s.N)]
