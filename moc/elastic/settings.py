"""What plans are made for; without numpy, which flags are read without."""

from __future__ import annotations

from dataclasses import dataclass

from moc.elastic.domains import MOST_RANKS, cut


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
