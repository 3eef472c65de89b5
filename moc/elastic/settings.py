"""Settings of plans; imports no numpy, so that flags can be read without it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from moc.elastic.allocation import least_replicas, most_everywhere
from moc.elastic.domains import MOST_RANKS, cut, least_in_each


@dataclass(frozen=True)
class Settings:
    """Settings of a plan.

    Attributes:
        slots: experts that a rank can hold.
        least: replicas of each expert on different nodes, if the slots suffice (f); fewer lost nodes lose no expert.
        everywhere: number of hottest experts on every node (h); None to choose it by load.
        ranks: ranks of a node.
        domain: maximum ranks that dispatch tokens to each other, if these have room for all experts.
    """

    slots: int
    least: int = 2
    everywhere: int | None = None
    ranks: int = 1
    domain: int = MOST_RANKS

    def domains(self, nodes: int, experts: int) -> tuple[int, ...]:
        """Returns the number of nodes of each domain."""
        hot = self.everywhere or 0
        return cut(nodes, self.ranks, self.slots * self.ranks - hot, experts - hot, self.domain)

    def most_everywhere(self, nodes: int, experts: int) -> int:
        """Returns the largest h that leaves a slot for every expert, and reduces no expert's replicas.

        Raises:
            ValueError: the slots do not suffice for one replica of each expert.
        """
        room = self.slots * self.ranks

        def fits(hot: int) -> bool:
            domains = dataclasses.replace(self, everywhere=hot).domains(nodes, experts)
            each = least_in_each(self.least, [least_replicas(self.least, experts, size, room) for size in domains])
            return all(hot <= most_everywhere(each, experts, size, room) for size in domains)

        return next(hot for hot in range(min(room, experts), -1, -1) if fits(hot))
