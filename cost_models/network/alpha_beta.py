"""Seconds of messages and collectives: latency + bytes / bandwidth for each message.

The model is Hockney's, with its alpha and beta.  `nbytes` is what the docstring says, `n` a number of
ranks; n = 1 costs nothing.  A link that is not duplex takes twice as long wherever a rank sends and
receives at the same time.  Collectives: Thakur, Rabenseifner and Gropp 2005.  Where a link has a measured `Rate` of
one, that is the alpha and the beta of its rounds, which include what a backend adds up, copies and waits for.

Read by the planner (`passes/planner/moves.py`), and by the simulation, which overlaps (`simulation/paths.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

from splitc.ir.device import Link


def point_to_point(nbytes: float, link: Link) -> float:
    """One message of `nbytes` from one rank to another."""
    return link.latency + nbytes / link.bandwidth


def many_to_one(nbytes: float, n: int, link: Link) -> float:
    """`n` ranks send `nbytes` each to one other rank, whose link carries it all (Stanza 4.1.1)."""
    return n * (link.latency + nbytes / link.bandwidth)


def one_to_many(nbytes: float, n: int, link: Link) -> float:
    """One rank sends `nbytes` to each of `n` others: `many_to_one` reversed."""
    return many_to_one(nbytes, n, link)


def concurrent(nbytes: Iterable[float], link: Link) -> float:
    """Messages that begin together and share a link in one direction, until the last of them is there.

    The link is never idle before that, however they share it.
    """
    sizes = list(nbytes)
    return link.latency + sum(sizes) / link.bandwidth if sizes else 0.0


RINGS = {"all_reduce": (2, 1), "all_gather": (1, 1), "reduce_scatter": (1, 1), "all_to_all": (1, 2)}
"""Collective -> a, b: it has a (n - 1) rounds, in each of which a rank sends nbytes / n^b of a tensor of nbytes."""


def ring(collective: str, nbytes: float, n: int, link: Link) -> float:
    """A collective of `RINGS` over `n` ranks: at its measured rate, else by exchanges on the link.

    By rounds of a ring, or, as on gloo where parts are unequal or summed, by a message straight to every other rank: as
    many bytes.  A reduce-scatter sums tensors of `nbytes`, of which each rank keeps 1/n; an all-gather reverses it.
    """
    turns, power = RINGS[collective]
    rate = link.collectives.get(collective)
    each = nbytes / n**power
    return turns * (n - 1) * (_exchange(each, link) if rate is None else rate.latency + each / rate.bandwidth)


ring_all_reduce, all_gather, reduce_scatter, all_to_all = (partial(ring, collective) for collective in RINGS)


def through_server(nbytes: float, n: int, link: Link) -> float:
    """Sum tensors of `nbytes` over `n` ranks on one of them, whose link all of them share, there and back."""
    return 2 * concurrent((n - 1) * [nbytes], link)


def recursive_doubling_rounds(n: int) -> int:
    """log2 n; floor(log2 n) + 2 when n is no power of two.

    Stanza 4.1.2 says floor and means it: the surplus ranks send to others in one round, get the
    result in one more, and 2^floor(log2 n) ranks do the doubling.  The ceil in the paper's equation
    (3) is taken for a slip.
    """
    rounds = n.bit_length() - 1
    return rounds if n == 1 << rounds else rounds + 2


def recursive_doubling(nbytes: float, n: int, link: Link) -> float:
    """Sum tensors of `nbytes` over `n` ranks, all of it in every round (Stanza 4.1.2)."""
    doubling = int(math.log2(n))
    surplus = recursive_doubling_rounds(n) - doubling  # 0 or 2 rounds, in one direction
    return doubling * _exchange(nbytes, link) + surplus * point_to_point(nbytes, link)


def _exchange(nbytes: float, link: Link) -> float:
    """A rank sends `nbytes` and receives as many at the same time."""
    return link.latency + (1 if link.duplex else 2) * nbytes / link.bandwidth


def rounds(algorithm: str, n: int) -> int:
    """The messages that a rank sends one after the other in a collective over `n` ranks."""
    if algorithm in RINGS:
        return RINGS[algorithm][0] * (n - 1)
    return recursive_doubling_rounds(n) if algorithm == "recursive_doubling" else 2


ALGORITHMS: dict[str, Callable[[float, int, Link], float]] = {
    **dict(zip(RINGS, (ring_all_reduce, all_gather, reduce_scatter, all_to_all), strict=True)),
    "recursive_doubling": recursive_doubling,
    "server": through_server,
}
"""The price of a collective, by the algorithm of its wire operation."""
