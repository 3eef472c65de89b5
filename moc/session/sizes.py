"""Gathers the sizes of snapshots from all workers."""

from __future__ import annotations

from collections.abc import Mapping

from moc.runtime.collectives import gather
from moc.session.components import Components
from moc.state.detail import Detail


class SnapshotSizes:
    """Implementation of :class:`moc.policy.plan.SnapshotSizer`.

    Args:
        parts: components of this generation.
    """

    def __init__(self, parts: Components):
        self._contents, self._rank = parts.contents, parts.world.rank
        names = list(dict.fromkeys(parts.tiers.nodes))
        self.nodes = tuple(map(names.index, parts.tiers.nodes))
        self.replicas = parts.peers.replicas if parts.peers is not None else 0

    def __call__(self, operators: Mapping[str, Detail]) -> int:
        """Returns the bytes of operators, each at its detail, on the rank that saves the most; a collective call."""
        return max(gather(max(self._contents.loads(operators).values(), default=0)))

    def by_rank(self, plans: Mapping[str, Mapping[str, Detail]]) -> dict[str, dict[int, int]]:
        """Returns the bytes of each rank by plan, if not 0; a collective call."""
        loads = {name: self._contents.loads(plan).get(self._rank, 0) for name, plan in plans.items()}
        mine = {name: amount for name, amount in loads.items() if amount}
        found: dict[str, dict[int, int]] = {name: {} for name in plans}
        for rank, its in enumerate(gather(mine)):
            for name, amount in its.items():
                found[name][rank] = amount
        return found
