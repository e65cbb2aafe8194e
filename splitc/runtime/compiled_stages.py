"""Run the stages of a rank's training steps under torch.compile, where that is faster."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from .compiled_parts import Part, compiled_methods
from .moments import Batch, Feature, Training
from .spec import StepContext
from .transport.base import Transport

WARM_UP = 3  # steps in which parts are compiled, and again for batches of other sizes
TRIED = 20  # steps after them, half of which run compiled


class CompiledStages(Feature):
    """Compiles what stages compute in training, between communication; evaluation and outputs stay as they are.

    After the warm-up some steps run compiled and some do not, in turn, and all later ones as the median was faster;
    where compiling fails none does.  All ranks do alike, so that what several of them compute by themselves stays
    equal, and rank 0 says in a line what was decided.

    backend: of torch.compile, which is then used throughout; True: its default, where that is faster.
    """

    def __init__(self, training: Training, transport: Transport, backend: str | bool) -> None:
        super().__init__(training)
        self._transport, self._backend = transport, "inductor" if backend is True else str(backend)
        self._last = WARM_UP + TRIED * (backend is True)
        self._seconds: list[float] = []  # of the slowest rank in each step up to the last one of these
        self._is_on, self._why, self._begun, self._ended = True, "", 0.0, 0.0
        tables = (table for name, table in training.program.step.__globals__.items() if name.endswith("BUCKETS"))
        paths = {f"self.{name}": k for table in tables for k, bucket in enumerate(table) for name in bucket}
        owners = {path.rpartition(".")[0]: k for path, k in paths.items()}
        self._methods = compiled_methods(training.stage, {**owners, "self": 0, **paths}, self._compiled)

    def begin(self, comms: Sequence[Any]) -> None:
        if self._is_on:
            vars(self.training.stage).update(self._methods)
        self._begun = self._now()

    def after_backward(self, context: StepContext) -> None:
        self._ended = self._now()
        for name in self._methods:
            vars(self.training.stage).pop(name, None)

    def after_update(self, batch: Batch) -> None:
        if len(self._seconds) == self._last:
            return
        every = self._transport.all_gather_objects((self._ended - self._begun, self._why))
        self._seconds.append(max(seconds for seconds, _ in every))
        self._why = next((why for _, why in every if why), "")
        tried, text = self._seconds[WARM_UP:], ""
        self._is_on = not self._why and len(tried) % 4 in (0, 3)
        if self._why:
            self._last, text = len(self._seconds), f"without torch.compile, which failed: {self._why}"
        elif len(tried) == TRIED:
            with_it = statistics.median([*tried[0::4], *tried[3::4]])
            without = statistics.median([*tried[1::4], *tried[2::4]])
            self._is_on = with_it < without
            text = f"under torch.compile: {with_it:.3g} s a step, without it {without:.3g} s"
            if not self._is_on:
                text = f"without torch.compile: {without:.3g} s a step, with it {with_it:.3g} s"
        if text and self._transport.rank == 0:
            self._say(f"run {text}")

    def _say(self, text: str) -> None:
        print(f"splitc: stages {text}", file=sys.stderr, flush=True)

    def _now(self) -> float:
        """The host's clock; in steps that are compared, once the device has done all before."""
        if len(self._seconds) < self._last and self._transport.device.type == "cuda":
            torch.cuda.synchronize(self._transport.device)
        return time.perf_counter()

    def _compiled(self, part: Part) -> Part:
        """A part under torch.compile; as it is from where that fails on."""
        fast = cache(lambda: torch.compile(part, backend=self._backend))

        def run(*arguments: Any) -> Any:
            if not self._why:
                try:
                    return fast()(*arguments)
                except Exception as error:  # an error of the part's own is raised again below
                    self._why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                    if len(self._seconds) == self._last:  # the others are not told any more
                        self._say(f"of rank {self._transport.rank} run on without torch.compile: {self._why}")
            return part(*arguments)

        return run
