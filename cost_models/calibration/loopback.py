"""The links of one machine without starting a process: gloo between two threads, and copies between GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from splitc.cost_models.calibration.link_fit import LinkFit, fit_links
from splitc.cost_models.calibration.links import MESSAGES, growing, measure_links
from splitc.cost_models.calibration.rank_timer import RankTimer
from splitc.cost_models.calibration.samples import LinkSamples, Sample
from splitc.runtime.transport.base import AllOf, Transport, Work
from splitc.runtime.transport.messages import Arriving
from splitc.runtime.transport.recorder import Forwarding
from splitc.runtime.transport.simulated import run_ranks

_TAG = 1  # of the messages that a reduce-scatter is made of
_TIMEOUT = timedelta(seconds=30)


def loopback_link(budget: float) -> LinkFit:
    """What two ranks of this machine talk over: gloo on the loopback device."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    return fit_links(run_ranks(2, lambda simulated: measure_links(Loopback(simulated, store), budget))[0], alike=True)


class Loopback(Forwarding):
    """The transport of one of two threads: tensors travel by gloo, objects over the simulated transport."""

    def __init__(self, simulated: Transport, store: Any) -> None:
        super().__init__(simulated)
        gloo = dist.ProcessGroupGloo(store, self.rank, self.world, _TIMEOUT)
        self._group = cast(dist.ProcessGroup, gloo)  # whose operations it has

    def _isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        return self._group.send([tensor], dst, tag)

    def _irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        return self._group.recv([tensor], src, tag)

    def _all_reduce(self, tensor: Tensor, ranks: tuple[int, ...], maximum: bool = False) -> Work:
        return self._group.allreduce([tensor])

    def _broadcast(self, tensor: Tensor, src: int, ranks: tuple[int, ...]) -> Work:
        return self._group.broadcast([tensor], src)

    def _all_gather(self, outputs: list[Tensor], tensor: Tensor, ranks: tuple[int, ...]) -> Work:
        return self._group.allgather([outputs], [tensor])

    def _reduce_scatter(self, output: Tensor, pieces: Sequence[Tensor], ranks: tuple[int, ...]) -> Work:
        """By messages straight to their rank, as the transport of processes does it."""
        others = [rank for rank in ranks if rank != self.rank]
        arriving = {rank: torch.empty_like(output) for rank in others}
        works = [self._irecv(arriving[rank], rank, _TAG) for rank in others]
        works += [self._isend(pieces[rank], rank, _TAG) for rank in others]
        parts = [pieces[self.rank], *arriving.values()]
        return Arriving(AllOf(works), lambda: output.copy_(torch.stack(parts).sum(0)))


def gpu_link(budget: float, first: torch.device, second: torch.device) -> LinkFit:
    """Copies from a GPU to another."""

    def copies(alone: Transport) -> list[Sample]:
        timer = RankTimer(alone, device=first)
        return growing(timer, "message", (0,), MESSAGES, lambda here: here.to(second, copy=True), budget)

    return fit_links(LinkSamples(1, tuple(run_ranks(1, copies)[0])), alike=True)
