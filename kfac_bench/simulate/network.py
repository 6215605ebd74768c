r"""The time of one message, by Hockney's model: a latency per hop and a bandwidth.

Messages travel in rings or in trees, inside a node or between nodes. With p ranks, alpha seconds
per hop and beta bytes per second, a payload of m bytes takes

====================  =========================================  ============================
\                     ring                                       tree
====================  =========================================  ============================
all-reduce            2 (p-1) alpha + 2 (p-1)/p m / beta         2 ceil(log2 p) alpha + 2 m / beta
broadcast or reduce   (p-1) alpha + m / beta                     ceil(log2 p) alpha + m / beta
====================  =========================================  ============================

The formulas are those of Thakur, Rabenseifner and Gropp (2005). Trees are pipelined, like NCCL's
double binary trees.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALGORITHMS = ("ring", "tree", "best")


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """The connection between two ranks."""

    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Network:
    """Nodes of ``ranks_per_node`` consecutive ranks; each node has one ``inter`` link."""

    ranks_per_node: int
    intra: NetworkLink
    inter: NetworkLink
    algorithm: str = "best"
    """``ring``, ``tree``, or ``best``: the faster of both for each message."""

    def link(self, ranks: Sequence[int]) -> NetworkLink:
        """Return the link of each hop of a message among ``ranks``.

        A group with m ranks on a node shares the node's link with the other groups of that node.
        The model assumes that all groups send at the same time, so this group gets
        m / ranks_per_node of the bandwidth.
        """
        nodes = len({rank // self.ranks_per_node for rank in ranks})
        if nodes == 1:
            return self.intra
        share = min(1.0, len(ranks) / nodes / self.ranks_per_node)
        return NetworkLink(self.inter.latency_s, self.inter.bandwidth_bytes_per_s * share)

    def all_reduce_s(self, payload_bytes: float, ranks: Sequence[int]) -> float:
        """Return the seconds until all of ``ranks`` have the sum of a message."""
        return self._seconds(2, payload_bytes, ranks)

    def rooted_s(self, payload_bytes: float, ranks: Sequence[int]) -> float:
        """Return the seconds of a broadcast from one of ``ranks``, or of a reduction to it."""
        return self._seconds(1, payload_bytes, ranks)

    def _seconds(self, passes: int, payload_bytes: float, ranks: Sequence[int]) -> float:
        p = len(ranks)
        if p == 1:
            return 0.0
        link = self.link(ranks)
        wire = payload_bytes / link.bandwidth_bytes_per_s
        # In an all-reduce a rank need not send its own part of the payload to itself.
        share = (p - 1) / p if passes == 2 else 1.0
        ring = passes * ((p - 1) * link.latency_s + share * wire)
        tree = passes * (math.ceil(math.log2(p)) * link.latency_s + wire)
        return {"ring": ring, "tree": tree, "best": min(ring, tree)}[self.algorithm]
