"""Which node fills which place of a job; nodes beyond the places are spares, and wait until one is lost."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class NodeAssignment:
    """Places are numbered from 0, and the ranks of workers follow from them; a node keeps its number wherever it is.

    Attributes:
        count: places.
        filled_by: by place, the node that has it, or had it last.
        vacant: places whose node is lost.
        present: nodes that are there, spares too.
    """

    count: int
    filled_by: dict[int, int] = field(default_factory=dict)
    vacant: set[int] = field(default_factory=set)
    present: set[int] = field(default_factory=set)

    def of(self, node: int) -> int | None:
        """The place of a node, or the one that it had when it was lost; None if it has none."""
        return next((place for place, other in self.filled_by.items() if other == node), None)

    def comes(self, node: int, had: int | None) -> int | None:
        """A node is there.  It gets the place that it had, the one of its own number, or that of a lost node.

        Args:
            node: its number.
            had: the place that its workers are of; None if it has none.

        Returns:
            Its place; None for a spare.
        """
        self.present.add(node)
        place = self.of(node)
        if place is None:
            own = node if node < self.count else None
            free = (p for p in (had, own) if p is not None and (p in self.vacant or p not in self.filled_by))
            place = next(free, min(self.vacant, default=None))  # the first nodes to begin with are waited for
        if place is not None:
            self._fill(place, node)
        return place

    def goes(self, node: int) -> tuple[int | None, int | None]:
        """A node is lost.

        Returns:
            The place that it had, and the spare that fills it now; None where there is none, or it was lost already.
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
        """The node that fills a place and is there."""
        node = self.filled_by.get(place)
        return node if node in self.present and place not in self.vacant else None

    @property
    def complete(self) -> bool:
        """Whether all places are filled by nodes that are there."""
        return all(self.filler(place) is not None for place in range(self.count))

    def missing(self) -> list[int]:
        """Nodes that were lost and have left their places vacant, or that have never come to theirs."""
        places = (place for place in range(self.count) if place in self.vacant or place not in self.filled_by)
        return [self.filled_by.get(place, place) for place in places]

    def _fill(self, place: int, node: int) -> None:
        self.filled_by[place] = node
        self.vacant.discard(place)
