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


def ring_all_reduce(nbytes: float, n: int, link: Link) -> float:
    """Sum tensors of `nbytes` over `n` ranks: 2 (n - 1) rounds of nbytes / n."""
    return 2 * (n - 1) * _round("all_reduce", nbytes / n, link) if n > 1 else 0.0


def through_server(nbytes: float, n: int, link: Link) -> float:
    """Sum tensors of `nbytes` over `n` ranks on one of them, whose link all of them share, there and back."""
    return 2 * concurrent((n - 1) * [nbytes], link)


def reduce_scatter(nbytes: float, n: int, link: Link) -> float:
    """Sum tensors of `nbytes` over `n` ranks, each keeps 1/n: n - 1 rounds of nbytes / n.

    By rounds of a ring, or as on gloo by a message straight to every other rank, which sums them: as many bytes.
    """
    return (n - 1) * _round("reduce_scatter", nbytes / n, link)


def all_gather(nbytes: float, n: int, link: Link) -> float:
    """Give all `n` ranks a tensor of `nbytes` of which each has 1/n: n - 1 rounds of nbytes / n.

    By rounds of a ring, or, where parts are unequal on gloo, by a message straight to every other rank.
    """
    return (n - 1) * _round("all_gather", nbytes / n, link)


def all_to_all(nbytes: float, n: int, link: Link) -> float:
    """Send equal parts of `nbytes` from each of `n` ranks to every other: n - 1 rounds of nbytes / n^2."""
    return (n - 1) * _round("all_to_all", nbytes / n**2, link)


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


def _round(collective: str, nbytes: float, link: Link) -> float:
    """One round of a ring: at the collective's measured rate, else an exchange on the link."""
    rate = link.collectives.get(collective)
    return _exchange(nbytes, link) if rate is None else rate.latency + nbytes / rate.bandwidth


def _exchange(nbytes: float, link: Link) -> float:
    """A rank sends `nbytes` and receives as many at the same time."""
    return link.latency + (1 if link.duplex else 2) * nbytes / link.bandwidth


def rounds(algorithm: str, n: int) -> int:
    """The messages that a rank sends one after the other in a collective over `n` ranks."""
    match algorithm:
        case "all_reduce":
            return 2 * (n - 1)
        case "recursive_doubling":
            return recursive_doubling_rounds(n)
        case "server":
            return 2
    return n - 1


ALGORITHMS: dict[str, Callable[[float, int, Link], float]] = {
    "all_reduce": ring_all_reduce,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "reduce_scatter": reduce_scatter,
    "recursive_doubling": recursive_doubling,
    "server": through_server,
}
"""The price of a collective, by the algorithm of its wire operation."""
