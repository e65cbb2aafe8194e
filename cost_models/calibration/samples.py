"""Timed messages and collectives, and which ranks they show to be connected best."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Ranks = tuple[int, ...]

LIKE = 1.15  # ranks are alike if their numbers differ by less than this factor
LARGE = 1 << 18  # bytes from which a message shows the bandwidth


@dataclass(frozen=True)
class Sample:
    """Seconds that an operation of `ranks` took.

    nbytes: of each message, or of the tensor of a collective as `splitc.cost_models.network.alpha_beta` counts it.
    """

    kind: str
    ranks: Ranks
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class Overlap:
    """Seconds of the same matrix products on a rank, alone and together with transfers.

    nbytes: bytes that the rank sent and received while it computed, in sums of `message` bytes.  messages: in how many.
    """

    rank: int
    message: int
    nbytes: float
    alone: float
    together: float
    messages: float = 0.0


@dataclass(frozen=True)
class LinkSamples:
    """All samples of a calibration.  ranks_per_host: None if every rank is a host of its own."""

    world: int
    samples: tuple[Sample, ...]
    overlaps: tuple[Overlap, ...] = ()
    ranks_per_host: int | None = None

    def local(self, ranks: Iterable[int]) -> bool:
        """Whether all of `ranks` are on one of several hosts."""
        per_host = self.ranks_per_host
        return per_host is not None and len({rank // per_host for rank in ranks}) == 1


def times(samples: Iterable[Sample]) -> dict[Ranks, tuple[float, ...]]:
    """Seconds of a small message of each pair and of the large ones, of those sizes that all pairs have.

    Of small ones, which take equally long, the shortest: a pause of a processor is longer than they are.
    """
    messages = [each for each in samples if each.kind == "message"]
    found: dict[Ranks, dict[float, float]] = {}
    for each in messages:
        found.setdefault(each.ranks, {})[each.nbytes] = each.seconds
    sizes = sorted(set.intersection(*(set(sizes) for sizes in found.values()))) if found else []
    small, large = [s for s in sizes if s < LARGE] or sizes[:1], [s for s in sizes if s >= LARGE] or sizes[-1:]
    return {
        pair: (min(seconds[size] for size in small), *(seconds[size] for size in large))
        for pair, seconds in found.items()
        if sizes
    }


def pairs_beside_one(samples: Iterable[Sample]) -> dict[float, list[float]]:
    """By size, how many times as long several pairs took as the one that was timed last before, in each turn."""
    found, ones = defaultdict[float, list[float]](list), dict[float, Sample]()
    for each in samples:
        if each.kind == "pairs" and len(each.ranks) == 2:
            ones[each.nbytes] = each
        elif each.kind == "pairs" and (one := ones.get(each.nbytes)) and {*one.ranks} <= {*each.ranks}:
            found[each.nbytes].append(each.seconds / one.seconds)
    return found


def between_hosts(samples: Iterable[Sample], per_host: int) -> dict[Ranks, float]:
    """Seconds of a large message of each pair on two hosts, the fastest first; on one host of all pairs."""
    known = {pair: seconds for pair, (*_, seconds) in times(samples).items()}
    apart = {pair: seconds for pair, seconds in known.items() if pair[0] // per_host != pair[1] // per_host} or known
    return dict(sorted(apart.items(), key=lambda each: each[1]))


def best_connected(samples: Iterable[Sample], per_host: int) -> int:
    """The first rank of those with the fastest links."""
    known = between_hosts(samples, per_host)
    fastest = min(known.values(), default=0.0)
    return min((min(pair) for pair, seconds in known.items() if seconds <= LIKE * fastest), default=0)


def groups_of(world: int, per_host: int, messages: Sequence[Sample]) -> list[Ranks]:
    """The groups that collectives are timed over: all ranks, a host, a pair on it, and pairs on two hosts.

    There is a pair for each speed of links: else all would be priced as the slowest.
    """
    everybody = tuple(range(world))
    groups = [everybody]
    if per_host > 1:
        groups += [everybody[:per_host], (0, 1)]
    known = between_hosts(messages, per_host)
    left = list(known)
    while left:
        fastest = known[left[0]]
        groups.append(left[0])
        left = [pair for pair in left if known[pair] > LIKE * fastest]
    return list(dict.fromkeys(groups))
