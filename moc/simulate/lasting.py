"""How seldom a loss takes state along in an elastic job: else nodes that are left go on without a checkpoint.

What a checkpoint is good for there is the rare loss after which an expert is on no node any more.  It happens if more
nodes are lost at once than each expert has holders; and *at once* is what is lost until all have gone on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moc.simulate.elastic import REGROUP_S, ElasticMembers, ElasticSettings

AT_ONCE = 4
"""Most nodes lost at once that are looked at; of more, none leaves every expert."""
MEMBERSHIPS = 8
"""Numbers of nodes that are looked at, from the smallest on, where a loss hurts most."""

Tokens = Mapping[int, Sequence[int]]
"""By layer, the tokens of each expert."""


@dataclass(frozen=True)
class Lasting:
    """What an elastic job survives without a checkpoint.

    Attributes:
        least: MIN nodes.
        most: MAX nodes.
        ranks: of a node.
        experts: of a layer.
        settings: of the plans.
    """

    least: int
    most: int
    ranks: int
    experts: int
    settings: ElasticSettings

    def survivals(self, loads: Tokens | None = None) -> tuple[float, ...]:
        """By nodes lost at once, from 1 on: the probability that every expert is left, with the riskiest members.

        Args:
            loads: that plans follow; experts are alike if unknown.
        """
        rows = tuple(tuple(row) for row in loads.values()) if loads else ((1,) * self.experts,)
        distinct = tuple(dict.fromkeys(rows))
        members = ElasticMembers(self.least, self.most, ranks=self.ranks, stages=(distinct,), settings=self.settings)
        sizes = range(self.least, min(self.most, self.least + MEMBERSHIPS - 1) + 1)
        return tuple(min(members.survival(n, lost) for n in sizes) for lost in range(1, AT_ONCE + 1))

    def rarer(self, mtbf_s: float, loads: Tokens | None = None) -> float:
        """Losses for each one that takes an expert along.

        Another one follows before all have gone on with the probability of a loss in :data:`REGROUP_S` seconds.

        Args:
            mtbf_s: seconds between losses.
            loads: as in :meth:`survivals`.
        """
        again, fatal, here = min(1.0, REGROUP_S / mtbf_s), 0.0, 1.0
        for number, survives in enumerate((*self.survivals(loads), 0.0)):
            last = number == AT_ONCE
            fatal += here * (1.0 if last else 1 - again) * (1 - survives)
            here *= again
        return 1 / max(fatal, 1e-12)
