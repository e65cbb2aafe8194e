"""Fit links to timed messages by least squares of relative errors.

    seconds = latency * rounds + bytes / bandwidth                       (1)
    minimise the sum of (fitted / measured - 1)^2,  latency >= 0         (2)

Rounds and bytes are those of `alpha_beta`: 1 and its size for a message, n of each for many to one, those of the ring
for a collective.  A pair of ranks shows the slower of their links, so a rank's own link is taken from its best pair,
and a sample counts for the slowest of its ranks.

A token bucket lets some milliseconds' worth of bytes pass before it limits the rate.  So where there are messages or
collectives that take much longer, only those determine the bandwidth, and the smallest ones the latency.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from splitc import units
from splitc.cost_models.calibration.devices import Residual, averaged
from splitc.cost_models.calibration.samples import (
    LARGE,
    LIKE,
    LinkSamples,
    Overlap,
    Ranks,
    Sample,
    pairs_beside_one,
    times,
)
from splitc.cost_models.network.alpha_beta import RINGS
from splitc.ir.device import COLLECTIVES, Link, Rate

Point = tuple[float, float, float]  # rounds, bytes, seconds

_OTHER_LATENCY = 2.0  # latencies differ that do by this factor
_SETTLED = 0.02  # seconds that a message or a collective takes which a token bucket does not matter for
_MANY = ("many_to_one", "one_to_many")


@dataclass(frozen=True)
class LinkFit:
    """links: by rank, to ranks of other hosts.  local: between the ranks of a host, if there are several hosts.

    largest: bytes of the largest message that was timed.
    """

    links: tuple[Link, ...]
    local: Link | None
    residuals: tuple[Residual, ...]
    largest: float = 0.0


def fit_links(measured: LinkSamples, alike: bool = False) -> LinkFit:
    """Fit the links of all ranks.  alike: give all ranks the same link, as on one machine."""
    near = [each for each in measured.samples if measured.local(each.ranks)]
    far = [each for each in measured.samples if not measured.local(each.ranks)]
    speeds = _Speeds(measured, far, alike)
    own = {first: [each for each in far if speeds.counts(each, first)] for first in speeds.group}
    overlaps = {first: [each for each in measured.overlaps if speeds.group[each.rank] == first] for first in own}
    links = _fill_in({first: _fit(own[first], overlaps[first]) for first in own}, own)
    shared = share_a_line(far)
    links = {first: replace(link, shared=shared) for first, link in links.items()}
    local = _local(near, measured.overlaps) if near else None

    def told(sample: Sample) -> Residual:
        first = speeds.slowest(sample.ranks)
        slowest, like = links[first], [str(rank) for rank, group in enumerate(speeds.group) if group == first]
        where, seconds = f" with rank {', '.join(like)}" * (first != speeds.usual), price(sample, slowest)
        if local is not None and measured.local(sample.ranks):
            where, seconds = " in a host", price(sample, local)
        elif sample.kind in _MANY:
            the_one = links[speeds.group[sample.ranks[0]]]
            seconds = max(price(sample, the_one), price(replace(sample, kind="message"), slowest))
        return Residual(f"{_described(sample)}{where}, {units.nbytes(sample.nbytes)}", sample.seconds, seconds)

    residuals = list(map(told, measured.samples))
    for each in measured.overlaps:
        link = links[speeds.group[each.rank]]
        taken = link.processor * each.nbytes + link.message_processor * each.messages
        what = f"computing beside transfers of {units.nbytes(each.message)}"
        residuals.append(Residual(what, each.together, each.alone + taken))
    largest = max((each.nbytes for each in measured.samples), default=0.0)
    return LinkFit(tuple(links[first] for first in speeds.group), local, averaged(residuals), largest)


# -- lines -------------------------------------------------------------------------------------------------------------


def fit_line(points: Sequence[Point], most: float = math.inf) -> tuple[float, float]:
    """Latency and bandwidth of equation (1) by (2).  most: bandwidth that there can be, unless a point reached more."""
    rounds, nbytes, seconds = np.array(points, dtype=np.float64).T
    rows = np.stack([rounds / seconds, nbytes / seconds], axis=1)
    (latency, per_byte), _, rank, _ = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)
    reached = rows[:, 1]
    if rank < 2 or latency < 0:  # one size only, or noise
        return 0.0, float(reached @ reached / reached.sum())
    if per_byte <= 1 / max(most, reached.max()):  # sizes took too much alike: noise, or only latency
        per_byte = 1 / reached.max() if most == math.inf else 1 / max(most, reached.max())
        latency = max(0.0, rows[:, 0] @ (1 - per_byte * reached) / (rows[:, 0] @ rows[:, 0]))
    return float(latency), float(1 / per_byte)


def fit_factor(points: Iterable[tuple[float, float, float]]) -> float:
    """x of seconds = base + x * unit, from (base, unit, seconds), by (2)."""
    base, unit, seconds = np.array(list(points), dtype=np.float64).T
    return float(((seconds - base) * unit / seconds**2).sum() / ((unit / seconds) ** 2).sum())


def point(sample: Sample) -> Point:
    """Rounds and bytes that (1) prices a message, many to one or a collective by, and its seconds."""
    n, nbytes = len(sample.ranks), sample.nbytes
    times, power = RINGS.get(sample.kind, (1, 0))
    rounds = times * (n - 1) if sample.kind in (*RINGS, *_MANY) else 1
    return rounds, rounds * nbytes / n**power, sample.seconds


def _fit(samples: Sequence[Sample], overlaps: Sequence[Overlap]) -> Link:
    """Fit one link to samples; `_fill_in` completes what they do not show."""
    kinds: dict[str, list[Sample]] = defaultdict(list)
    for each in samples:
        kinds[each.kind].append(each)
    for name in COLLECTIVES:  # what runs in a step: all ranks at once, which a pair alone does not show
        most = max((len(each.ranks) for each in kinds[name]), default=0)
        kinds[name] = [each for each in kinds[name] if len(each.ranks) == most]
    messages = [*_beyond_buckets(kinds["message"]), *kinds["many_to_one"], *kinds["one_to_many"]]
    latency, bandwidth = fit_line([point(each) for each in messages])

    exchanges = [(latency, each.nbytes / bandwidth, each.seconds) for each in kinds["exchange"]]
    collectives = {}
    for name in COLLECTIVES:
        if kinds[name]:
            of_a_round, rate = fit_line([point(each) for each in _beyond_buckets(kinds[name])], bandwidth)
            collectives[name] = Rate(rate, of_a_round)
    taken, of_a_message = _processor(overlaps, 2 / bandwidth, latency)
    return Link(
        bandwidth=bandwidth,
        latency=latency,
        duplex=not exchanges or fit_factor(exchanges) < 1.5,
        processor=taken,
        message_processor=of_a_message,
        collectives=collectives,
    )


def _local(samples: Sequence[Sample], overlaps: Sequence[Overlap]) -> Link:
    """The link within hosts; where its ranks share a line, with the bandwidth that one has while all send."""
    link = _fit(samples, overlaps)
    pairs = [point(each) for each in samples if each.kind == "pairs" and len(each.ranks) > 2]
    return replace(link, bandwidth=fit_line(pairs)[1]) if share_a_line(samples) else link


def share_a_line(samples: Sequence[Sample]) -> bool:
    """Whether n pairs at once took rather n times as long as one than as long as it, over all sizes together.

    minimise the sum of |log(times)|, or |log(times / n)|: the median of the turns, by size                         (3)
    """
    number = max((len(each.ranks) // 2 for each in samples if each.kind == "pairs"), default=1)
    times = [statistics.median(of) for of in pairs_beside_one(samples).values()]
    return sum(abs(math.log(each / number)) for each in times) < sum(abs(math.log(each)) for each in times)


def _processor(overlaps: Sequence[Overlap], most: float, latency: float) -> tuple[float, float]:
    """Seconds of computing that a byte takes, by large sums, and that a message takes besides, by small ones.

    most: of a byte that is sent or received, four times what keeps the core busy as long as the line.
    latency: of a message, which the work of both its ends is part of.
    """
    large = [(each.alone, each.nbytes, each.together) for each in overlaps if each.message >= LARGE]
    taken = min(max(fit_factor(large), 0.0), most) if large else 0.0
    rest = [
        (each.alone + taken * each.nbytes, each.messages, each.together)
        for each in overlaps
        if each.message < LARGE and each.messages
    ]
    return taken, min(max(fit_factor(rest), 0.0), latency) if rest else 0.0


def _fill_in(links: dict[int, Link], own: Mapping[int, Sequence[Sample]]) -> dict[int, Link]:
    """Complete links by what was timed between other ranks only."""
    duplex = [link.duplex for first, link in links.items() if any(each.kind == "exchange" for each in own[first])]
    rates = {name: link.collectives[name] for link in links.values() for name in link.collectives}
    return {
        first: replace(
            link,
            duplex=all(duplex),
            collectives={name: link.collectives.get(name, rate) for name, rate in rates.items()},
        )
        for first, link in links.items()
    }


def _beyond_buckets(messages: list[Sample]) -> list[Sample]:
    settled = [each for each in messages if each.seconds >= _SETTLED]
    if not settled:
        return messages
    smallest = min(each.nbytes for each in messages)
    return [each for each in messages if each.nbytes == smallest] + settled


# -- groups of ranks ---------------------------------------------------------------------------------------------------


class _Speeds:
    """Groups ranks by similar links.  group: by rank, the first rank with a link like its own."""

    def __init__(self, measured: LinkSamples, samples: Sequence[Sample], alike: bool) -> None:
        known = times(samples)
        per_host = measured.ranks_per_host or 1
        self.best: list[tuple[float, ...]] = []  # of each rank, seconds of a small message and of large ones
        group: list[int] = []
        for rank in range(measured.world):
            pairs = [seconds for pair, seconds in known.items() if rank in pair]
            neighbour = rank // per_host * per_host  # stands for the others of its host, which were not timed
            self.best.append(min(pairs, key=lambda seconds: seconds[-1]) if pairs else self.best[neighbour])
            like = (each for each in dict.fromkeys(group) if alike or _like(self.best[each], self.best[rank]))
            group.append(next(like, rank))
        self.group = tuple(group)
        self.usual = max(dict.fromkeys(group), key=group.count)

    def slowest(self, ranks: Ranks) -> int:
        """The group of the slowest of `ranks`."""
        return max((self.group[rank] for rank in ranks), key=lambda first: self.best[first][-1])

    def counts(self, sample: Sample, first: int) -> bool:
        """Whether a sample is used to fit the link of a group."""
        if sample.kind in (*_MANY, "pairs", "exchange"):
            return all(self.group[rank] == first for rank in sample.ranks)
        return self.slowest(sample.ranks) == first


def _like(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Whether two ranks have similar links; a, b: seconds of their small and of their large messages.

    The links differ that do so at every large size: one alone may have been disturbed.
    """
    (quick, slow), *large = (sorted(pair) for pair in zip(a, b, strict=True))
    latency_differs = slow > _OTHER_LATENCY * quick and slow - quick > (LIKE - 1) * large[-1][1]
    slower = [y >= LIKE * x for x, y in zip(a[1:], b[1:], strict=True)]
    faster = [x >= LIKE * y for x, y in zip(a[1:], b[1:], strict=True)]
    return not (all(slower) or all(faster) or latency_differs)


# -- residuals ---------------------------------------------------------------------------------------------------------


def price(sample: Sample, link: Link) -> float:
    """Seconds of what was timed by equation (1), with the numbers of a link."""
    rounds, nbytes, _ = point(sample)
    rate = link.collectives.get(sample.kind, link)
    if sample.kind == "exchange" and not link.duplex:
        nbytes *= 2
    if sample.kind == "pairs" and link.shared:
        nbytes *= len(sample.ranks) // 2
    return rounds * rate.latency + nbytes / rate.bandwidth


def _described(sample: Sample) -> str:
    """What was timed, but for its size: `all reduce over 4 ranks`."""
    n = len(sample.ranks)
    over = {"message": "", "exchange": "", "pairs": f", {n // 2} at once"}.get(sample.kind, f" over {n} ranks")
    return f"{sample.kind.replace('_', ' ')}{over}"
