"""Sums over ranks whose lines differ: the part that each adds up for all, and the seconds that this takes.

A rank that adds up a part s of N bytes sends the rest to those that add it up, and the sum of its part to n - 1 others:
N (1 + (n - 2) s) bytes.  It receives as many; in pieces (`sum_parts`) it does both at once.  So with bandwidths b

    minimise t    N (1 + (n - 2) s) <= t b,    s >= 0,    the sum of s = 1

which leaves a rank without a part whose line is busy for longer than t with what it has to send and receive anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from splitc.cost_models.network.alpha_beta import point_to_point
from splitc.ir.cluster import Cluster
from splitc.runtime.transport.collective import PIECE


def sum_shares(cluster: Cluster, world: int) -> tuple[int, ...]:
    """What each rank adds up, in hundredths of the largest part; none where lines are alike or shared."""
    rates = [cluster.link_of(rank).bandwidth for rank in range(world)]
    if world < 3 or cluster.local_link or cluster.site_link or len(set(rates)) == 1:
        return ()
    fastest = accumulate(sorted(rates, reverse=True))
    level = min((world - 2 + k) / whole for k, whole in enumerate(fastest, start=1))  # t / N: the k fastest have parts
    parts = [max(level * rate - 1, 0.0) for rate in rates]
    return tuple(round(100 * part / max(parts)) for part in parts)


def shared_sum(nbytes: float, cluster: Cluster, ranks: Sequence[int], shares: Sequence[int]) -> float:
    """Sum tensors of `nbytes` over ranks; shares: of all ranks.  The first piece goes one way alone.

    Where hosts have several ranks, or there are sites, each is priced on the slowest line.
    """
    whole, slowest, times = sum(shares[rank] for rank in ranks), cluster.link_over(ranks, rings=False), list[float]()
    for rank in ranks:
        link = slowest if cluster.local_link or cluster.site_link else cluster.link_of(rank)
        sent = nbytes * (1 + (len(ranks) - 2) * shares[rank] / whole) + min(nbytes, PIECE)
        times.append(point_to_point(sent if link.duplex else 2 * sent, link))
    return max(times)
