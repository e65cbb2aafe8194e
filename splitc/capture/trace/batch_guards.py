"""Find for which batch sizes a number, or the outcome of a comparison, is what it was in the trace.

`if x.size(0) > 50` takes one branch in the trace, and a graph keeps that branch; `x.size(0) // 100` is 0 in it.  Sizes
are linear in the batch and Python's numbers are made of sizes, so both are computed for all batches at once.  A mean
divides by the batch size, and what a rank divides by is a share of it; `x.size(0) // 4` is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import fx

from splitc.capture.trace.calls import Call, is_plain
from splitc.capture.trace.evaluate import computed, execute
from splitc.capture.trace.proxy import is_proxy, map_tree
from splitc.runtime.spec import BatchGuard

_EVERY = 1 << 16  # batches up to here are all tried, then powers of two
_FAR = [1 << k for k in range(17, 41)]
_MOST_RANGES = 8
_TRIED = (1, 2, 3, 5, 8, 12, 100, 1001, 65536)


class BatchGuards:
    """Collects the guards of a trace.

    values: of each node, at the batch sizes `batches` first, of which the first is that of the traced branches.
    """

    def __init__(self, values: Mapping[fx.Node, tuple[Any, ...]], batches: tuple[int, int]) -> None:
        self._values, self._batches = values, batches
        self.found: dict[BatchGuard, None] = {}

    def fixes(self, call: Call, values: tuple[Any, ...], source: Callable[[], str]) -> bool:
        """Whether a call on numbers is a constant of the trace: a comparison, or a number that is equal at all probes.

        Then batches are required for which it is that.  source: gives the user's line.
        """
        is_number = isinstance(values[0], (bool, int, float)) and (isinstance(values[0], bool) or is_plain(values))
        if not is_number or not call.inputs or any(isinstance(each, torch.Tensor) for each in call.inputs):
            return False

        def at(batch: Any) -> Any:
            known: dict[fx.Node, Any] = {}

            def pick(value: Any) -> Any:
                return self._number(value._node, batch, known) if is_proxy(value) else value

            return execute(call.op, call.target, map_tree(call.args, pick), map_tree(dict(call.kwargs), pick))

        ranges = ranges_of(at, self._batches[0])
        if ranges != ((1, None),):
            self.found[BatchGuard(ranges, source())] = None
        return True

    def is_linear(self, node: fx.Node) -> bool | None:
        """Whether a number is a linear function of the batch size; None for what is no number."""
        if not isinstance(self._values.get(node, (None,))[0], (int, float)):
            return None
        try:
            first, *others = (self._number(node, batch, {}) for batch in _TRIED)
        except ArithmeticError:  # n / (n - 1)
            return False
        slopes = [(value - first) / (batch - _TRIED[0]) for batch, value in zip(_TRIED[1:], others, strict=True)]
        return bool(max(slopes) - min(slopes) <= 1e-9 * max(map(abs, slopes)))

    def _number(self, node: fx.Node, batch: Any, known: dict[fx.Node, Any]) -> Any:
        """The number of a node at a batch, or at an array of them.  known: those of other nodes there."""
        if node not in known:
            first, second = self._values[node][:2]
            if any(isinstance(self._values[each][0], torch.Tensor) for each in node.all_input_nodes):
                step = (second - first) // (self._batches[1] - self._batches[0])
                known[node] = first + step * (batch - self._batches[0])
            else:
                known[node] = computed(node, lambda each: self._number(each, batch, known))
        return known[node]


def ranges_of(at: Callable[[Any], Any], traced: int) -> tuple[tuple[int, int | None], ...]:
    """The ranges of batches with the outcome of the traced one; where there are many, the one around it."""
    wanted = at(traced)
    same = _same(at, wanted)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(int), [0])))).tolist()
    ranges: list[tuple[int, int | None]] = [(a + 1, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    if same[-1] and all(at(batch) == wanted for batch in _FAR):
        ranges[-1] = ranges[-1][0], None
    if len(ranges) > _MOST_RANGES:
        ranges = [each for each in ranges if each[0] <= traced <= (each[1] or traced)]
    return tuple(ranges)


def _same(at: Callable[[Any], Any], wanted: Any) -> Any:
    """For every batch, whether the outcome is the wanted one."""
    batches = np.arange(1, _EVERY + 1)
    try:
        with np.errstate(all="ignore"):
            return np.broadcast_to(at(batches) == wanted, batches.shape)
    except Exception:  # a method of Python's numbers that arrays have not
        return np.array([at(int(batch)) == wanted for batch in batches])
