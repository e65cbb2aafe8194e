"""Map a message or collective to the lines it occupies in a cluster, and price it.

Every rank has an outgoing and an incoming line, or a single one where its link is half duplex; the ranks of a host with
a shared link share its lines.  Traffic inside a host has lines of its own (`Cluster.local_link`), and that between
sites.
"""

from __future__ import annotations

from functools import cache

from splitc.cost_models.network.alpha_beta import ALGORITHMS, point_to_point, rounds
from splitc.cost_models.network.sum_shares import shared_sum
from splitc.cost_models.simulation.operations import Transfer
from splitc.ir.cluster import Cluster
from splitc.ir.device import Link
from splitc.ir.wire_op import WireOp


class Paths:
    """The lines of a cluster of `world` ranks, of which `simulated` are parties of transfers."""

    def __init__(self, cluster: Cluster, world: int, simulated: frozenset[int]) -> None:
        self._cluster, self._world, self._simulated = cluster, world, simulated
        self._link_over = cache(cluster.link_over)

    def transfer(self, op: WireOp, ends: tuple[int, ...], times: int = 1) -> Transfer:
        """Return the transfer of `op`.  ends: source and destination of a message, or all ranks of a collective.

        times: that it is repeated.
        """
        link = self._link_over(ends, rings=op.algorithm != "recursive_doubling")
        if op.kind != "collective":
            messages = 1
            seconds = point_to_point(op.nbytes, link)
            lines = {self._line(ends[0], link, ends, out=True), self._line(ends[1], link, ends, out=False)}
            processor = times * (link.message_processor + link.processor * op.nbytes)
        else:
            seconds = ALGORITHMS[op.algorithm](op.nbytes, len(ends), link)
            if op.shares:
                seconds = shared_sum(op.nbytes, self._cluster, ends, op.shares)
            messages = rounds(op.algorithm, len(ends))
            every, ends = ends, tuple([rank for rank in ends if rank in self._simulated])
            lines = {self._line(rank, link, every, out) for rank in ends for out in (True, False)}
            processor = 2 * times * (link.message_processor * messages + link.processor * op.sent)
        seconds = max(seconds, link.message_processor * messages)
        if op.nbytes <= link.latency * link.bandwidth:
            lines = set()  # a few packets, which pass between those of other transfers
        return Transfer(str(op.payload), ends, tuple(sorted(lines)), times * seconds, processor)

    def _line(self, rank: int, link: Link, ends: tuple[int, ...], out: bool) -> int:
        """Return the number of a line of `rank`: outgoing or incoming; its own, its host's, its site's, or inside."""
        if self._cluster.crosses_sites(ends):
            kind, place = (4, self._cluster.site_of(rank)) if link.shared else (3, rank)
        elif link is self._cluster.local_link:
            kind, place = 2, rank
        else:
            kind, place = (1, self._cluster.host_of(rank)) if link.shared else (0, rank)
        return 2 * (kind * self._world + place) + (out and link.duplex)
