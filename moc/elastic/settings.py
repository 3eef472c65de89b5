"""What plans are made for; without numpy, which flags are read without."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from moc.elastic.allocation import least_replicas, most_everywhere
from moc.elastic.domains import MOST_RANKS, cut, least_in_each


@dataclass(frozen=True)
class Settings:
    """What a plan is made for.

    Attributes:
        slots: experts that a rank can hold.
        least: replicas of each expert on different nodes, as far as the slots suffice (f); fewer than so many lost
            nodes are survived for certain.
        everywhere: of the hottest experts, so many are on every node (h); None to choose it by the load.
        ranks: of a node.
        domain: ranks among which tokens are dispatched, at most, where these have room for all experts.
    """

    slots: int
    least: int = 2
    everywhere: int | None = None
    ranks: int = 1
    domain: int = MOST_RANKS

    def domains(self, nodes: int, experts: int) -> tuple[int, ...]:
        """The nodes of each domain, of so many nodes in all."""
        hot = self.everywhere or 0
        return cut(nodes, self.ranks, self.slots * self.ranks - hot, experts - hot, self.domain)

    def most_everywhere(self, nodes: int, experts: int) -> int:
        """The largest h that leaves every expert a place, and does not reduce the replicas of any.

        Raises:
            ValueError: the slots do not suffice for one replica of each expert.
        """
        room = self.slots * self.ranks

        def fits(hot: int) -> bool:
            domains = dataclasses.replace(self, everywhere=hot).domains(nodes, experts)
            each = least_in_each(self.least, [least_replicas(self.least, experts, size, room) for size in domains])
            return all(hot <= most_everywhere(each, experts, size, room) for size in domains)

        return next(hot for hot in range(min(room, experts), -1, -1) if fits(hot))
