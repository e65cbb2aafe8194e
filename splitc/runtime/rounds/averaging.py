"""Average the parameters that units of ranks have trained by themselves (local SGD; SplitBrain 4; DiLoCo).

theta: a unit's parameters.  kept: as all units had them after the last average, where there is an outer optimizer or
what travels is rounded.

    mean    = sum over units  share theta                                                local SGD
    kept    = SGD(kept, gradient = sum over units  share (kept - theta)),  mean = kept   DiLoCo, algorithm 1
    theta   = mixing theta + (1 - mixing) mean                                           streaming DiLoCo
    theta   = mean + (theta - theta when the fragment left)                              without mixing

Of parameters, which the copies of a unit have alike, each copy averages a slice, and they gather the means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.role import Role
from ..transport import doubling
from ..transport.base import Ranks, Transport, Work

Bucket = Sequence[Tensor]
"""What travels together, of one dtype: parameters, or what copies may have unlike."""


class Meanwhile:
    """What a rank trains of a bucket from now until its mean arrives: `mixing` of that, or None: all of the change."""

    def __init__(self, bucket: Bucket, mixing: float | None) -> None:
        self._bucket, self._mixing = bucket, mixing
        self.nothing = [tensor.detach().clone() for tensor in bucket] if mixing is None else bucket

    def joined(self, means: Sequence[Tensor]) -> list[Tensor]:
        """The means that have arrived, joined with it; `nothing`, joined with it, is what the rank has."""
        pairs = list(zip(means, self._bucket, strict=True))
        if self._mixing is None:
            return [mean + (own - old) for (mean, own), old in zip(pairs, self.nothing, strict=True)]
        return [torch.lerp(mean, own, self._mixing) if self._mixing else mean for mean, own in pairs]


class Averages:
    """What a rank averages in one role with other units, in fragments, each by itself.

    outer: the optimizer to which the averaged change is a gradient.  kept: first parameter of a bucket -> this rank's
    slice of it.
    """

    def __init__(self, role: Role) -> None:
        spec = role.spec
        self._transport, self._ranks, self._copies = role.transport, spec.averaged, spec.replicas
        self._short = role.short.get("averages")
        by_server = partial(doubling.all_reduce, rounds=_through_server)
        self._all_reduce = by_server if spec.through_server else Transport.all_reduce
        self._travelling: dict[int, list[tuple[Bucket, Tensor, Work, Meanwhile]]] = {}
        self.kept: dict[Tensor, nn.Parameter] = {}
        self.outer: torch.optim.SGD | None = None
        self._restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any] | None:
        """The state of the outer optimizer, if there is one, between rounds."""
        return self._restored if self.outer is None else self.outer.state_dict()

    def restore(self, outer: dict[str, Any] | None) -> None:
        """Let the outer optimizer have this state from the next round on."""
        self.outer, self._restored = None, outer

    def keep(self, buckets: Sequence[Bucket], lr: float, momentum: float, nesterov: bool) -> None:
        """Keep what all units have alike now.  The rates are of parameters; statistics take their mean."""
        if self.outer is None:
            self.kept = {bucket[0]: nn.Parameter(self._own(bucket)) for bucket in buckets}
            trained = [kept for first, kept in self.kept.items() if isinstance(first, nn.Parameter)]
            others = [kept for first, kept in self.kept.items() if not isinstance(first, nn.Parameter)]
            means: dict[str, Any] = {"params": others, "lr": 1.0, "momentum": 0.0, "nesterov": False}
            self.outer = torch.optim.SGD([{"params": trained}, means], lr, momentum, nesterov=nesterov)
            if self._restored:
                self.outer.load_state_dict(self._restored)
        for bucket in buckets:
            self.kept[bucket[0]].data.copy_(self._own(bucket))

    @torch.no_grad()
    def start(self, buckets: Sequence[Bucket], fragment: int, share: float, mixing: float | None = None) -> None:
        """Start to average a fragment, of which this rank has the weight `share`; those of all units sum to 1."""
        under_way = []
        for k, bucket in enumerate(buckets):
            own = self._change(bucket).mul_(share)
            if self._short is not None and bucket[0] in self.kept and isinstance(bucket[0], nn.Parameter):
                work = self._short.summed(own, self._ranks, f"{fragment}.{k}")
            else:
                work = self._all_reduce(self._transport, own, self._ranks)
            under_way.append((bucket, own, work, Meanwhile(bucket, mixing)))
        self._travelling[fragment] = under_way

    @torch.no_grad()
    def arrive(self, fragment: int, whole: bool = False) -> None:
        """Wait for a fragment, if it travels, and and join it with what was trained meanwhile unless `whole`."""
        under_way = self._travelling.pop(fragment, [])
        for bucket, own, work, _ in under_way:
            work.wait()
            if bucket[0] in self.kept:
                self.kept[bucket[0]].grad = own.neg_()
        self._step()
        for bucket, own, _, meanwhile in under_way:
            self._put(bucket, self.kept.get(bucket[0], own).detach(), None if whole else meanwhile)

    def join(self, buckets: Sequence[Bucket], fragment: int, share: float) -> None:
        """Average a fragment now, after one that travels has arrived; what was not trained since is not averaged."""
        self.arrive(fragment, whole=not share)
        if share:
            self.start(buckets, fragment, share, mixing=0.0)
            self.arrive(fragment)

    def _step(self) -> None:
        if self.outer is not None:
            self.outer.step()
            self.outer.zero_grad()

    def _own(self, bucket: Bucket, values: Sequence[Tensor] = ()) -> Tensor:
        """A copy of this rank's slice of a bucket, or of values in its place."""
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in values or bucket])
        if (number := self._slices(bucket)) == 1:
            return flat
        return flat.tensor_split(number)[self._copies.index(self._transport.rank)].clone()

    def _change(self, bucket: Bucket) -> Tensor:
        """What its slice is more than what was kept of it, if that was kept."""
        own = self._own(bucket)
        return own.sub_(self.kept[bucket[0]].detach()) if bucket[0] in self.kept else own

    def _put(self, bucket: Bucket, own: Tensor, meanwhile: Meanwhile | None = None) -> None:
        """Give a bucket the means of all slices, `own` among them, joined with what this rank trained meanwhile."""
        if (number := self._slices(bucket)) > 1:
            whole = own.new_empty(sum(tensor.numel() for tensor in bucket))
            self._transport.all_gather([*whole.tensor_split(number)], own, self._copies).wait()
            own = whole
        parts = own.split([tensor.numel() for tensor in bucket])
        means = [part.view_as(tensor) for tensor, part in zip(bucket, parts, strict=True)]
        for tensor, mean in zip(bucket, means if meanwhile is None else meanwhile.joined(means), strict=True):
            tensor.copy_(mean)

    def _slices(self, bucket: Bucket) -> int:
        """How many slices a bucket has: one for each copy, of parameters."""
        return len(self._copies) if isinstance(bucket[0], nn.Parameter) else 1


def _through_server(transport: Transport, tensor: Tensor, ranks: Ranks) -> Iterator[Work]:
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
