"""Compare what several ranks hold: parameters, buffers that they keep alike, the state of optimizers.

Replicas begin alike, add the same sums, and multiply alike by themselves what need not travel; nothing else keeps them
so.  Of each tensor a rank computes one number on its device:

    h = sum over k  (2k + 1) s_k,   s_k = sum over i  w_i (2i + 1)

of its bits as whole numbers w, 2^20 of them in each part k, all modulo 2^32 or 2^64.  The ranks compare the largest
and the smallest h by one all-reduce for all that the same ranks hold, and one of whether any differ.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn, optim

from .errors import LaunchError, ReplicasDiffer
from .moments import Feature
from .optimizers import state_of
from .rank import Rank
from .stage_state import StageState

_PART = 1 << 20
_WORDS = {1: torch.uint8, 2: torch.int16}

Held = tuple[tuple[int, ...], str, Tensor]
"""The ranks that hold a tensor, its name, and its fingerprint on this one."""


class Replicas:
    """Checks every so many steps.

    In rounds those of other units are compared when a round has ended.  What a step writes of a rank's own examples,
    the statistics of normalisations that are not synchronised say, is not compared.
    """

    def __init__(
        self,
        every: int,
        rank: Rank,
        state: StageState,
        optimizers: Mapping[str, optim.Optimizer],
        features: Sequence[Feature],
    ) -> None:
        if type(every) is not int or every < 1:
            raise LaunchError(f"check_replicas={every!r}: give a whole number of steps, at least 1")
        self._every, self._rank, self._state, self._optimizers = every, rank, state, optimizers
        self._features, self._is_due = features, False
        self._before: dict[str, tuple[Tensor, int]] = {}
        self._written: set[str] = set()
        self._holders = state.holders()
        rank.transport.connect([*self._holders.values(), *map(self._within, self._holders.values())])

    def begin(self) -> None:
        """Before a step: note the buffers, to see which of them it writes."""
        self._before = {name: (each, each._version) for name, each in self._state.stage.named_buffers()}

    def end(self, step: int) -> None:
        """After a step: compare, if it is time.  Collective.  Raises ReplicasDiffer, on every rank."""
        norms = {norm for comm in self._rank.comms for norm in comm.shared.synchronised}
        alike = {id(buffer) for norm in norms for buffer in norm.buffers()}
        for name, each in self._state.stage.named_buffers():
            if (each, each._version) != self._before.get(name) and id(each) not in alike:
                self._written.add(name)
        everywhere = all(feature.is_alike for feature in self._features)
        self._is_due |= step % self._every == 0
        if self._is_due and (everywhere or step % self._every == 0):
            self._is_due = not everywhere
            self._compare(step, everywhere)

    def _within(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if rank in self._state.together)
