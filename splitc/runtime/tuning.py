"""Run finalists, builds of different plans, in turns on the ranks that are there, to find the fastest.

Successive halving: every finalist runs for some steps, the better half goes on, in an order drawn anew each time, until
one is faster than the rest by more than the noise, or time is up.  One finalist is in memory at a time.  Each trial has
connections of its own on gloo, so that one that fails leaves the others as they were.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from .errors import LaunchError
from .generators import same_generators
from .spec import RankSpec
from .transport.base import PeerLost, Transport
from .transport.recorder import Recorder, Step
from .worker import Worker

Make = Callable[[int, Transport], tuple[Worker, tuple[Tensor, ...]]]
"""Makes this rank's worker of a finalist, and its part of the batch.  Collective."""

_SLOTS = 18  # turns that the time allows at least: three of six finalists
_FEWEST, _MOST = 2, 50  # periods of a turn that count
_GRACE = 1.0  # of the budget, by which the first turns of all may exceed it
_KEPT = 2  # recorded steps
_USUAL, _BELIEF = 0.02, 2  # relative deviation of a turn, and how many turns that counts as
_SURE = 2.0  # standard errors of a difference that is none of chance


@dataclass
class Finalist:
    """A plan that may be the fastest, and how it ran.

    examples: of a step.  predicted: seconds of a step.  period: steps that are alike in sum, of an update or a round.
    seconds: of a step, the mean of each turn.  cost: seconds of its last turn, with all around it.  why: it is out.
    steps: of the last turn, those that were recorded, by rank.
    """

    name: str
    examples: int
    predicted: float
    period: int = 1
    seconds: list[float] = field(default_factory=list)
    cost: float = 0.0
    why: str = ""
    steps: list[list[Step]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Examples per second, by the median turn; 0 where it did not run."""
        return self.examples / statistics.median(self.seconds) if self.seconds and not self.why else 0.0

    @property
    def error(self) -> float:
        """The standard error of `rate`, relative to it; of few turns with what is usual."""
        number, usual = len(self.seconds), _BELIEF * _USUAL**2
        around = statistics.mean(self.seconds) if number else 1.0
        variance = (usual + sum((each / around - 1) ** 2 for each in self.seconds)) / (_BELIEF + max(0, number - 1))
        return math.sqrt(variance / max(1, number))


def fastest(finalists: Sequence[Finalist]) -> int:
    """The position of the one that ran fastest.  Raises LaunchError where none ran."""
    best = max(range(len(finalists)), key=lambda k: finalists[k].rate)
    if not finalists[best].rate:
        raise LaunchError("\n  ".join(["no plan could be run:", *(f"{each.name}: {each.why}" for each in finalists)]))
    return best


def turns(
    finalists: Sequence[Finalist], budget: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[int, float]]:
    """Whose turn it is and for how many seconds, while it is not known which is the fastest and time is left.

    The caller notes what came of each turn before it asks for the next.
    """
    deadline, slot = clock() + budget, budget / max(_SLOTS, 3 * len(finalists))
    alive = [k for k, each in enumerate(finalists) if not each.why]
    for number in count():
        for k in random.Random(number).sample(alive, len(alive)) if number else alive:
            each, ran = finalists[k], sum(bool(one.rate) for one in finalists)
            if ran > 1 and clock() + each.cost > deadline + (0 if number else _GRACE * budget):
                return
            yield k, slot
        alive = _left(finalists, alive, len(alive) if number else -(-len(alive) // 2))
        if len(alive) < 2:
            return


def _left(finalists: Sequence[Finalist], alive: Sequence[int], most: int) -> list[int]:
    """Those that may be the fastest: the best `most` of those not slower than the best by more than chance."""
    ranked = sorted((k for k in alive if finalists[k].rate), key=lambda k: -finalists[k].rate)
    if not ranked:
        return []
    best = finalists[ranked[0]]

    def may_win(each: Finalist) -> bool:
        return each is best or 1 - each.rate / best.rate <= _SURE * math.hypot(each.error, best.error)

    return [k for k in ranked if may_win(finalists[k])][: max(2, most)]


def tune(
    transport: Transport,
    finalists: Sequence[Finalist],
    make: Make,
    budget: float,
    note: Callable[[int, Finalist | None], None] = lambda k, each: None,
) -> None:
    """Run the finalists, and note in each what came of it.  Collective: rank 0 says whose turn it is.

    budget: seconds, about.  note: called on rank 0 before a turn, with its position, and after it with the finalist.
    A finalist that fails is out, and the others go on; on NCCL, whose other ranks would wait for it, one that fails in
    a step ends the tuning with its error.
    """
    trials, plan, is_first = _Trials(transport, make), turns(finalists, budget), transport.rank == 0
    try:
        while (turn := transport.broadcast_object(next(plan, None) if is_first else None)) is not None:
            k, seconds = turn
            each, begin = finalists[k], time.monotonic()
            if is_first:
                note(k, None)
            told = trials.run(k, seconds, each.period)
            each.cost = time.monotonic() - begin
            if errors := [error for _, error in told if error]:
                each.why = next((error for error in errors if PeerLost.__name__ not in error), errors[0])
            else:
                each.seconds.append(max(seconds for seconds, _ in told))
                each.steps = transport.gather_objects(trials.recorded) or []
            if is_first:
                note(k, each)
    finally:
        trials.close()


class _Trials:
    """Runs finalists on connections that are given up where one fails."""

    def __init__(self, transport: Transport, make: Make) -> None:
        self._transport, self._make = transport, make
        self._side: Transport | None = None
        self._recorder: Recorder | None = None
        self.recorded: list[Step] = []  # the last steps of the last turn

    def run(self, k: int, slot: float, period: int) -> list[tuple[float, str]]:
        """What each rank says of a turn: seconds of a step, or its error.  Collective."""
        error, seconds = "", 0.0
        if self._recorder is None:
            self._side = self._transport.apart()
            self._recorder = Recorder(self._side or self._transport)
        try:
            with same_generators():
                seconds = _run(self._recorder, *self._make(k, self._recorder), slot, period)
            self.recorded = self._recorder.steps[-_KEPT:]
        except Exception as failure:
            if self._side is None and self._transport.world > 1:
                raise
            error = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
            traceback.clear_frames(failure.__traceback__)
            failure.__traceback__ = None
            self.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        told = self._transport.all_gather_objects((seconds, error))
        if any(error for _, error in told):
            self.close()
        return told

    def close(self) -> None:
        """Give the connections of trials up, so that ranks which wait for this one learn that it has left."""
        if self._side is not None:
            self._side.close()
        self._side = self._recorder = None


def _run(recorder: Recorder, worker: Worker, batch: tuple[Tensor, ...], slot: float, period: int) -> float:
    """Seconds of a step of all ranks, which are recorded, in about `slot` seconds."""
    worker.step(*batch)  # it allocates, and TCP finds the rate of the links
    begin = time.monotonic()
    for _ in range(period):
        worker.step(*batch)
    periods = slot / (time.monotonic() - begin)
    steps: int = recorder.broadcast_object(period * min(_MOST, max(_FEWEST, round(periods))))
    recorder.steps.clear()
    recorder.align()
    begin = time.monotonic()
    for _ in range(steps):
        with recorder.step():
            worker.step(*batch)
    recorder.barrier()
    return (time.monotonic() - begin) / steps


def rows_of(spec: RankSpec, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """This rank's part of a global batch that repeats the examples of a reader's batch; () where it reads none.

    Raises LaunchError where a function divides batches, whose examples cannot be repeated.
    """
    if spec.data_rank is None:
        return ()
    if any(-2 in each.shape for each in spec.inputs.values()):
        raise LaunchError("a function divides the model's batches, which tuning cannot repeat: leave tune out")
    first, last = spec.batch_offsets[spec.data_rank : spec.data_rank + 2]

    def part(tensor: Tensor, shape: Sequence[int]) -> Tensor:
        if -1 not in shape:
            return tensor
        rows = torch.arange(first, last) % tensor.shape[dim := shape.index(-1)]
        return tensor.index_select(dim, rows.to(tensor.device))

    return tuple(part(tensors[name], each.shape) for name, each in spec.inputs.items())


def outcome(each: Finalist) -> dict[str, Any]:
    """What is kept of how a finalist ran, as plain values."""
    spread = each.error * math.sqrt(len(each.seconds)) if len(each.seconds) > 1 else 0.0
    seconds = statistics.median(each.seconds) if each.seconds else 0.0
    return {"measured": seconds, "spread": spread, "turns": len(each.seconds), "failed": each.why}
