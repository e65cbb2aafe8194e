"""Compare what several ranks hold: parameters, the state of optimizers, and buffers that are kept alike.

Replicas begin alike, add the same sums, and compute alike by themselves what does not travel; nothing else keeps them
so.  Of each tensor a rank computes one number on its device, of its bits as whole numbers w in parts of 2^20:

    s_k = sum over i  (2i + 1) w_i  (each product mod 2^32),    h = sum over k  (2k + 1) s_k  (mod 2^62)

The largest and the smallest h are compared, for all that the same ranks hold at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

import torch
from torch import Tensor, optim

from .errors import LaunchError, ReplicaError
from .moments import Feature
from .optimizers import state_of
from .rank import Rank
from .stage_state import StageState
from .transport.base import Ranks

_PART = 1 << 20
_WORDS = {1: torch.uint8, 2: torch.int16}


class Replicas:
    """Compares them every so many steps; in rounds with other units when a round has ended.

    Left out are buffers that have changed on all ranks, but for those of synchronised normalisations: they are of each
    rank's own examples.  Constructing it is collective.
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
        self._features, self._is_due, self._holders = features, False, state.holders()
        self._device = rank.transport.device
        self._within = {name: tuple(r for r in own if r in state.together) for name, own in self._holders.items()}
        self._begun = {name: fingerprint([each], self._device) for name, each in state.stage.named_buffers()}
        rank.transport.connect([*self._holders.values(), *self._within.values()])

    def after(self, step: int) -> None:
        """After a step: compare, if it is time.  Collective.  Raises ReplicaError, on every rank."""
        is_alike, is_turn = all(feature.is_alike for feature in self._features), step % self._every == 0
        self._is_due |= is_turn
        if self._is_due and (is_alike or is_turn):
            self._is_due = not is_alike
            self._compare(step, self._holders if is_alike else self._within)

    def _held(self, of_all: Mapping[str, Ranks]) -> Iterator[tuple[Ranks, str, Sequence[Tensor], Tensor]]:
        """Which ranks hold something, its name, the tensors, and whether they count.  of_all: parameter -> ranks."""
        state, counts = self._state, torch.ones((), dtype=torch.bool, device=self._device)
        for name, parameter in sorted(state.trained):
            first, own = state.first_name(name), sorted(state_of(self._optimizers, parameter).items())
            yield of_all[name], first, [parameter], counts
            tensors = [value for _, value in own if isinstance(value, Tensor)]
            yield self._within[name], f"the optimizer's state of {first}", tensors, counts
        norms = {norm for comm in self._rank.comms for norm in comm.shared.synchronised}
        summed = {id(buffer) for norm in norms for buffer in norm.buffers()}
        for name, buffer in sorted(state.stage.named_buffers(), key=itemgetter(0)):
            is_begun = fingerprint([buffer], self._device) == self._begun[name]
            yield self._within[name], state.first_name(name), [buffer], counts if id(buffer) in summed else is_begun

    def _compare(self, step: int, of_all: Mapping[str, Ranks]) -> None:
        transport, groups = self._rank.transport, defaultdict[Ranks, list[tuple[str, Tensor, Tensor]]](list)
        for ranks, name, tensors, counts in self._held(of_all):
            if len(ranks) > 1:
                groups[ranks].append((name, fingerprint(tensors, self._device), counts.long()))
        unlike, found = torch.zeros(1, dtype=torch.int32, device=self._device), list[tuple[str, Tensor, Tensor]]()
        for ranks, group in sorted(groups.items(), key=itemgetter(0)):
            names, values, compared = zip(*group, strict=True)
            own = torch.stack(values)
            most = torch.stack([own, -own, torch.stack(compared)])
            transport.all_reduce(most, ranks, maximum=True).wait()
            differs = (most[0] != -most[1]) & (most[2] > 0)
            unlike |= differs.any()
            found += zip(names, own, differs, strict=True)
        transport.all_reduce(unlike, self._rank.everyone, maximum=True).wait()
        if any(transport.decided(unlike)):
            raise self._error(step, {name: int(value) for name, value, differs in found if differs})

    def _error(self, step: int, own: Mapping[str, int]) -> ReplicaError:
        """What differs, of all ranks.  own: what does on this one.  Collective."""
        every = self._rank.transport.all_gather_objects(own)
        name, *more = dict.fromkeys(name for values in every for name in values)
        by_rank = {rank: values[name] for rank, values in enumerate(every) if name in values}
        common = Counter(by_rank.values()).most_common(1)[0][0]
        same = ", ".join(str(rank) for rank, value in by_rank.items() if value == common)
        others = ", ".join(str(rank) for rank, value in by_rank.items() if value != common)
        return ReplicaError(
            f"step {step}: {name} has other values on rank {others} than on rank {same}"
            f"{f', as have {len(more)} more' if more else ''}. What ranks hold alike drifts apart where GPUs are "
            f"unlike, by kernels that are not deterministic (torch.use_deterministic_algorithms(True) finds them), and "
            f"by code that changes values on one rank; go on from an earlier checkpoint"
        )


def fingerprint(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """One number of the bits of tensors, int64 on `device`, without a read by the host."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for k, tensor in enumerate(tensors):
        values = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
        flat = values.resolve_conj().resolve_neg().contiguous().reshape(-1)
        words = flat.view(_WORDS.get(flat.element_size(), torch.int32))
        size = max(1, min(words.numel(), _PART))
        weights = torch.arange(1, 2 * size, 2, dtype=torch.int32, device=words.device)
        sums = torch.stack([(part * weights[: len(part)]).sum() for part in words.split(size)])
        total += (2 * k + 1) * (sums * torch.arange(1, 2 * len(sums), 2, device=words.device)).sum().to(device)
    return total & (2**62 - 1)
