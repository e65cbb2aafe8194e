"""Average the parameters that units of ranks have trained by themselves (local SGD; SplitBrain 4; DiLoCo).

theta: a unit's parameters.  kept: as all units had them after the last average, where there is an outer optimizer.

    mean    = sum over units  share theta                                                local SGD
    kept    = SGD(kept, gradient = kept - mean),  mean = kept                            DiLoCo, algorithm 1
    theta   = mixing theta + (1 - mixing) mean                                           streaming DiLoCo
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..transport import doubling
from ..transport.base import Transport, Work


class Averages:
    """What a rank averages in one role with other units, in fragments, each by itself.

    ranks: of all units, those that hold the same part of the model.  through_server: the first of them sums.
    outer: the optimizer to which the averaged change is a gradient.  kept: parameter -> its parameter.
    """

    def __init__(self, transport: Transport, ranks: tuple[int, ...], through_server: bool) -> None:
        self._transport, self._ranks = transport, ranks
        by_server = partial(doubling.all_reduce, rounds=_through_server)
        self._all_reduce = by_server if through_server else Transport.all_reduce
        self._travelling: dict[int, tuple[float, list[tuple[Sequence[Tensor], Tensor, Work]]]] = {}
        self.kept: dict[Tensor, nn.Parameter] = {}
        self.outer: torch.optim.SGD | None = None
        self._restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any] | None:
        """The state of the outer optimizer, if there is one, between rounds."""
        return self._restored if self.outer is None else self.outer.state_dict()

    def restore(self, outer: dict[str, Any] | None) -> None:
        """Let the outer optimizer have this state from the next round on."""
        self.outer, self._restored = None, outer

    def keep(self, tensors: Sequence[Tensor], lr: float, momentum: float, nesterov: bool) -> None:
        """Keep the parameters, which all units have alike now."""
        if self.outer is None:
            self.kept = {p: nn.Parameter(p.detach().clone()) for p in tensors if isinstance(p, nn.Parameter)}
            self.outer = torch.optim.SGD(self.kept.values() or [{"params": []}], lr, momentum, nesterov=nesterov)
            if self._restored:
                self.outer.load_state_dict(self._restored)
        for parameter, kept in self.kept.items():
            kept.data.copy_(parameter.data)

    def start(self, buckets: Sequence[Sequence[Tensor]], fragment: int, share: float, mixing: float = 0.0) -> None:
        """Start to average a fragment, of which this rank has the weight `share`; those of all units sum to 1.

        buckets: what travels together, of one dtype.
        """
        under_way = []
        for bucket in buckets:
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket]).mul_(share)
            under_way.append((bucket, flat, self._all_reduce(self._transport, flat, self._ranks)))
        self._travelling[fragment] = mixing, under_way

    @torch.no_grad()
    def arrive(self, fragment: int, whole: bool = False) -> None:
        """Wait for a fragment, if it travels, and mix it with what was trained meanwhile; `whole`: take it as it is."""
        mixing, under_way = self._travelling.pop(fragment, (0.0, []))
        found: dict[Tensor, Tensor] = {}
        for bucket, flat, work in under_way:
            work.wait()
            parts = flat.split([tensor.numel() for tensor in bucket])
            found.update((tensor, part.view_as(tensor)) for tensor, part in zip(bucket, parts, strict=True))
        for parameter in self.kept.keys() & found.keys():
            self.kept[parameter].grad = self.kept[parameter] - found[parameter]
            found[parameter] = self.kept[parameter]
        if self.outer is not None:
            self.outer.step()
            self.outer.zero_grad()
        for tensor, mean in found.items():
            tensor.copy_(mean if whole or not mixing else torch.lerp(mean, tensor, mixing))


def _through_server(transport: Transport, tensor: Tensor, ranks: tuple[int, ...]) -> Iterator[Work]:
    """The messages of this rank to and from the first one, or of that one to and from all others."""
    server, *others = ranks
    if transport.rank != server:
        yield transport.exchange([(tensor, server)], [], ranks, doubling.TAG)
        yield transport.exchange([], [(tensor, server)], ranks, doubling.TAG)
        return
    given = [torch.empty_like(tensor) for _ in others]
    yield transport.exchange([], list(zip(given, others, strict=True)), ranks, doubling.TAG)
    for each in given:
        tensor.add_(each)
    yield transport.exchange([(tensor, rank) for rank in others], [], ranks, doubling.TAG)
