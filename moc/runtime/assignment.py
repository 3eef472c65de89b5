"""Assigns nodes to the rank blocks (*places*) of a job; surplus nodes are spares that wait until a node is lost.

A job may run on fewer nodes than it has rank blocks.  Its *members* are the blocks that train in this generation.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class NodeAssignment:
    """Assignment of nodes to rank blocks, which are numbered from 0 and determine the ranks of workers.

    A node keeps its number in any block.

    Attributes:
        count: number of rank blocks.
        least: fewest members that the job can run on; default: ``count``.
        members: rank blocks that train, in the order of ranks: all of them if the job needs all, otherwise none before
            the job begins.
        filled_by: by rank block, the node that fills it or filled it last.
        vacant: rank blocks whose node is lost.
        present: connected nodes, including spares.
    """

    count: int
    least: int = 0
    members: tuple[int, ...] = ()
    filled_by: dict[int, int] = field(default_factory=dict)
    vacant: set[int] = field(default_factory=set)
    present: set[int] = field(default_factory=set)

    def __post_init__(self):
        self.least = self.least or self.count
        if not self.varies:
            self.members = tuple(range(self.count))

    @property
    def varies(self) -> bool:
        """Whether the number of members may change."""
        return self.least < self.count

    def of(self, node: int) -> int | None:
        """Returns the rank block of a node, or its last one if the node is lost; None if it has none."""
        return next((place for place, other in self.filled_by.items() if other == node), None)

    def comes(self, node: int, had: int | None) -> int | None:
        """Adds a node and assigns its previous rank block, the block of its number, or the block of a lost node.

        Args:
            node: its number.
            had: rank block of its live workers; None if it has none.

        Returns:
            Its rank block; None for a spare.
        """
        self.present.add(node)
        place = self.of(node)
        if place is None:
            own = node if node < self.count else None
            free = (p for p in (had, own) if p is not None and (p in self.vacant or p not in self.filled_by))
            place = next(free, min(self.vacant, default=None))  # at first, rank block i waits for node i
        if place is not None:
            self._fill(place, node)
        return place

    def goes(self, node: int) -> tuple[int | None, int | None]:
        """Marks a node as lost.

        Returns:
            The rank block that it filled, and the spare that fills it now; each None if there is none or the node was
            lost already.
        """
        self.present.discard(node)
        place = self.of(node)
        if place is None or place in self.vacant:
            return None, None
        self.vacant.add(place)
        spare = min((other for other in self.present if self.of(other) is None), default=None)
        if spare is not None:
            self._fill(place, spare)
        return place, spare

    def filler(self, place: int) -> int | None:
        """Returns the connected node that fills a rank block, or None."""
        node = self.filled_by.get(place)
        return node if node in self.present and place not in self.vacant else None

    @property
    def complete(self) -> bool:
        """Whether there are members and each has a connected node."""
        return bool(self.members) and all(self.filler(place) is not None for place in self.members)

    @property
    def filled(self) -> tuple[int, ...]:
        """Rank blocks with a connected node, ascending."""
        return tuple(place for place in range(self.count) if self.filler(place) is not None)

    @property
    def settled(self) -> bool:
        """Whether each member's node is connected or lost; after a takeover the state of others is still unknown."""
        return all(place in self.vacant or self.filler(place) is not None for place in self.members)

    def missing(self) -> list[int]:
        """Returns the nodes to wait for: lost nodes that left a vacant rank block, and nodes that never joined."""
        if self.complete or (self.varies and len(self.filled) >= self.least):
            return []
        places = (place for place in range(self.count) if place in self.vacant or place not in self.filled_by)
        return [self.filled_by.get(place, place) for place in places]

    def _fill(self, place: int, node: int) -> None:
        self.filled_by[place] = node
        self.vacant.discard(place)
