"""Converts the budgets of a selective snapshot to limits on its experts (MoEtion, section 4.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from moc.policy.selection import Limit, Place, per_byte


@dataclass(frozen=True, eq=False)
class Sizes:
    """Bytes of snapshots.

    Attributes:
        dense: bytes of all dense operators, by rank.
        experts: bytes of each expert, by the ranks that save it.
        nodes: node of each rank.
        replicas: nodes that receive a copy of each node's snapshot; 0 without peers.
        gradients: bytes of each expert's gradients, by the ranks that save them; empty if none are saved.
    """

    dense: Mapping[int, int]
    experts: Mapping[Place, Mapping[int, int]]
    nodes: tuple[int, ...] = ()
    replicas: int = 0
    gradients: Mapping[Place, Mapping[int, int]] = field(default_factory=dict)

    def number(self, number: int) -> Limit:
        """Returns the limit of a fixed number of experts over all layers; gradients count by their relative bytes."""
        return _number(self, number)

    def ratio(self, place: Place) -> float:
        """Returns the bytes of an expert's state relative to its gradients."""
        return sum(self.experts[place].values()) / sum(self.gradients[place].values())

    def by_rank(self, budget: float) -> Limit:
        """Returns the limit of each rank's bytes, after subtracting dense operators.

        Replicas save complete experts in turn, so a rank may save up to one more than its mean share. Room for one
        expert is reserved.
        """
        return _by_rank(self, budget)

    def by_node(self, received: float) -> Limit:
        """Returns the limit of each node's received bytes; every node keeps copies for ``replicas`` others."""
        return _by_node(self, received)

    @cached_property
    def least_of_rank(self) -> int:
        """The smallest budget of a rank that leaves every rank room for an expert."""
        return max((self.dense.get(rank, 0) + most for rank, (most, _) in self._largest.items()), default=0)

    @cached_property
    def of_ranks(self) -> dict[int, int]:
        """Bytes of each rank in a full snapshot."""
        found = dict(self.dense)
        for ranks in self.experts.values():
            for rank, amount in ranks.items():
                found[rank] = found.get(rank, 0) + amount
        return found

    @cached_property
    def busiest(self) -> tuple[int, int]:
        """The rank with the most bytes of dense operators and its largest expert, and its bytes of that expert."""
        largest: dict[int, int] = {}
        for ranks in self.experts.values():
            for rank, amount in ranks.items():
                largest[rank] = max(largest.get(rank, 0), amount)
        rank = max(largest, key=lambda rank: self.dense.get(rank, 0) + largest[rank])
        return rank, largest[rank]

    @cached_property
    def least_of_node(self) -> int:
        """The smallest budget of a node, in bytes received, that leaves every node room for an expert."""
        largest = max((amount for nodes in self._of_nodes.values() for amount in nodes.values()), default=0)
        return max(1, self.replicas) * (max(self._dense_of_nodes.values(), default=0) + largest)

    @cached_property
    def _largest(self) -> dict[int, tuple[int, int]]:
        """Bytes of the largest expert of each rank, and the number of ranks that save it."""
        found: dict[int, tuple[int, int]] = {}
        for ranks in self.experts.values():
            for rank in ranks:
                found[rank] = max(found.get(rank, (0, 1)), (sum(ranks.values()), len(ranks)))
        return found

    @cached_property
    def _of_nodes(self) -> dict[Place, dict[int, int]]:
        return {place: self._joined(ranks) for place, ranks in self.experts.items()}

    @cached_property
    def _dense_of_nodes(self) -> dict[int, int]:
        return dict.fromkeys(self.nodes, 0) | self._joined(self.dense)

    def _joined(self, ranks: Mapping[int, int]) -> dict[int, int]:
        found: dict[int, int] = {}
        for rank, amount in ranks.items():
            found[self.nodes[rank]] = found.get(self.nodes[rank], 0) + amount
        return found


@lru_cache(maxsize=8)
def _number(sizes: Sizes, number: int) -> Limit:
    whole, gradients = (
        {place: {0: sum(ranks.values())} for place, ranks in of.items()} for of in (sizes.experts, sizes.gradients)
    )
    return Limit({0: number * max((bins[0] for bins in whole.values()), default=0)}, whole, gradients)


@lru_cache(maxsize=8)  # budgets stay the same for many snapshots
def _by_rank(sizes: Sizes, budget: float) -> Limit:
    room = {
        rank: budget - sizes.dense.get(rank, 0) - most * (1 - 1 / ranks)
        for rank, (most, ranks) in sizes._largest.items()
    }
    return Limit(_from_0(room), sizes.experts, sizes.gradients)


@lru_cache(maxsize=8)
def _by_node(sizes: Sizes, received: float) -> Limit:
    sent = received / max(1, sizes.replicas)
    room = {node: sent - dense for node, dense in sizes._dense_of_nodes.items()}
    gradients = {place: sizes._joined(ranks) for place, ranks in sizes.gradients.items()}
    return Limit(_from_0(room), sizes._of_nodes, gradients)


def fitting(numbers: Mapping[int, int], limits: Sequence[Limit]) -> int:
    """Returns how many equally popular experts fit: at most S_total, since ranks cannot share their room."""
    ages = {layer: [0] * number for layer, number in numbers.items()}
    return sum(map(len, per_byte(ages, ages, 0, limits).values()))


def _from_0(room: Mapping[int, float]) -> dict[int, float]:
    return {key: max(0.0, left) for key, left in room.items()}
