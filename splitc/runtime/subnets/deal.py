"""Deal the neurons of layers to the ranks of a round, at random and alike on every rank (IST 3, appendix).

Every rank computes the whole deal from the run's seed and the round's number, so no membership indicator is sent.
Layers are dealt independently of each other, so E[m_i m_j] = 1/n^2 for neurons of two layers; each rank gets 1/n of a
layer, the first ones a neuron more where n does not divide it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from ..collectives.model_parallel import feature_widths
from ..spec import Neurons

Dealt = tuple[tuple[int, ...], ...]
"""For each rank the numbers of its neurons, in order."""


@lru_cache(maxsize=256)
def deal(seed: int, round: int, layer: str, neurons: int, ranks: int) -> Dealt:
    """The neurons of `layer` that each of `ranks` has in a round: every one of them on one rank."""
    order = list(range(neurons))
    random.Random(f"{seed} {round} {layer}").shuffle(order)
    bounds = accumulate(feature_widths(neurons, ranks), initial=0)
    return tuple(tuple(sorted(order[first:last])) for first, last in pairwise(bounds))


def indices(seed: int, round: int, runs: Sequence[Neurons], rank: int, ranks: int) -> list[int]:
    """The indices that `rank` has along a dim whose features are those of `runs`, in order."""
    found, first = [], 0
    for layer, width in runs:
        own = deal(seed, round, layer, width, ranks)[rank] if layer else range(width)
        found += [first + neuron for neuron in own]
        first += width
    return found
