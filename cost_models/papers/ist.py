"""What a step of Independent Subnet Training costs, and of data parallelism (Yuan et al., section 3.4).

A feed-forward network of layers with N_0 (the input), N_1, ..., N_t neurons trains on n sites; B examples are a batch,
J the steps of a site between two exchanges.  Numbers that flow into the sites, all together, in one gradient step:

    data parallel   sum_{i=1..t} n N_{i-1} N_i                                                      (traffic)
    IST             (N_0 N_1 + N_{t-1} N_t) / J + sum_{i=2..t-1} N_{i-1} N_i / (n J)

and FLOPs of matrix products forward and backward, of all sites together:

    data parallel   4 sum_{i=1..t} B N_{i-1} N_i                                                    (flops)
    IST             4 B N_0 N_1 + 4 B N_{t-1} N_t + 4 B sum_{i=2..t-1} N_{i-1} N_i / n

B is the global batch of data parallelism and the batch of each site of IST.

The paper writes the sums of IST from 1 to l.  Its text gives the first and the last matrix terms of their own, since
all sites have all inputs and all outputs; so the sums here run over the matrices between them, each of whose sites has
1/n^2.  Its factor 4 is twice the FLOPs of forward; backward computes two products a layer besides the forward one, the
gradients of weights and inputs, so that a framework takes 6, and 4 for the first layer only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from splitc.errors import CostError


@dataclass(frozen=True)
class Symbols:
    """N: neurons of each layer, the input's first.  B: examples of a batch.  J: local steps.  itemsize: of a number."""

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
    """Bytes that flow into the n sites in a step: every site gets all parameters."""
    return s.itemsize * n * sum(_matrices(s))


def ist_nbytes(s: Symbols, n: int) -> float:
    """Bytes that flow into the n sites in a step, on average: all get their part once in J steps."""
    first, *between, last = _matrices(s)
    return s.itemsize * (first + last + sum(between) / n) / s.J


def data_parallel_flops(s: Symbols) -> float:
    """FLOPs of a step; n sites share them."""
    return 4.0 * s.B * sum(_matrices(s))


def ist_flops(s: Symbols, n: int) -> float:
    """FLOPs of a step of all n sites, each with a batch and a subnet of its own."""
    first, *between, last = _matrices(s)
    return 4.0 * s.B * (first + last + sum(between) / n)


def _matrices(s: Symbols) -> list[int]:
    """The weights of each layer."""
    return [before * after for before, after in pairwise(s.N)]
