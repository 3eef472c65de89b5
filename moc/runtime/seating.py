"""Assigns ranks to a job's nodes: selects the nodes that train or help, and their parts of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moc.runtime.assignment import NodeAssignment
from moc.runtime.crew import Crew
from moc.runtime.orders import Worker
from moc.runtime.seats import Candidate, copies_at_once, helpers, part_of, seats


@dataclass
class Seating:
    """Rank assignment of nodes (*seats*), in rank order; the seats of complete model copies are first.

    Attributes:
        places: assignment of nodes to rank blocks; its members have the seats.
        per_node: workers per node.
        crew: live workers.
        parts: nodes per copy of the program's model.
        helpers: model part of each partial-model node; these are the last members.
        refused: numbers of nodes in complete copies that the program refuses.
    """

    places: NodeAssignment
    per_node: int
    crew: Crew
    parts: int = 1
    helpers: tuple[int, ...] = ()
    refused: set[int] = field(default_factory=set)

    @property
    def whole(self) -> int:
        """Number of members in complete copies; the others are partial-model nodes."""
        return len(self.places.members) - len(self.helpers)

    @property
    def ready(self) -> tuple[int, ...]:
        """Rank blocks of connected nodes that are members, or whose joining workers are all ready to train."""
        built = Counter(self.places.of(guest.node) for guest in self.crew.guests.values() if guest.built)
        members = self.places.members
        return tuple(place for place in self.places.filled if place in members or built[place] == self.per_node)

    def fits(self, places: Sequence[int]) -> tuple[int, ...]:
        """Returns seats for the maximum number of copies that these places form and the program accepts, or none.

        Nodes without workers, or with another part of the model, must initialize workers first.
        """
        there = self._candidates(places)
        return self._seats(there, len(there) // self.parts) if len(there) >= self.places.least else ()

    def fits_at_once(self, places: Sequence[int]) -> tuple[int, ...]:
        """Returns seats for the maximum number of copies that these places form without initialization, or none."""
        there = self._candidates(places)
        return self._seats(there, copies_at_once(there, self.parts))

    def _seats(self, there: Sequence[Candidate], copies: int) -> tuple[int, ...]:
        numbers = range(copies, max(1, self.places.least // self.parts) - 1, -1)
        copies = next((number for number in numbers if number * self.parts not in self.refused), 0)
        return seats(there, self.parts, copies)

    def seat_anew(self, stay: bool) -> None:
        """Assigns the seats to the connected nodes.

        Args:
            stay: ready workers keep their part of the model.  The copies that they form train immediately, and surplus
                nodes help.  Otherwise all workers are initialized again.
        """
        later = self.fits(self.places.filled)
        copies = (self.fits_at_once(self.ready) if stay else ()) or later
        there = self._candidates(self.places.filled)
        extra = helpers(there, self.parts, copies, later) if stay and self.parts > 1 else ()
        self.places.members = (*copies, *(one.place for one in extra))
        self.helpers = tuple(one.part for one in extra if one.part is not None)

    def dismiss_helpers(self) -> None:
        """Removes the partial-model nodes from the members."""
        self.places.members, self.helpers = self.places.members[: self.whole], ()

    def moves(self, later: Sequence[int]) -> bool:
        """Returns whether a member has another part of the model in these later seats."""
        parts = {place: self._part_of_seat(seat) for seat, place in enumerate(self.places.members)}
        return any(parts.get(place, seat % self.parts) != seat % self.parts for seat, place in enumerate(later))

    def _candidates(self, places: Iterable[int]) -> list[Candidate]:
        """Returns places as candidates for seats, with the model parts of their nodes' workers."""
        return [self._candidate(place) for place in places]

    def _candidate(self, place: int) -> Candidate:
        if place in self.places.members:
            built = sum(worker.built for worker in self.crew.workers.values() if self.places.of(worker.node) == place)
            return Candidate(place, self._part_of_seat(self.places.members.index(place)), built == self.per_node)
        node = self.places.filler(place)
        guest = next((guest for guest in self.crew.guests.values() if guest.node == node), None)
        return Candidate(place, guest and self.part(guest))

    def part(self, worker: Worker) -> int:
        """Returns a worker's part of the model, by its rank."""
        seat, seats = worker.rank // self.per_node, worker.size // self.per_node
        return part_of(seat, seats, self.parts, worker.helpers)

    def keeps_its_part(self, worker: Worker) -> bool:
        """Returns whether a worker's node has a seat with the worker's part of the model."""
        place = self.places.of(worker.node)
        if place is None or place not in self.places.members:
            return False
        return self._part_of_seat(self.places.members.index(place)) == self.part(worker)

    def _part_of_seat(self, seat: int) -> int:
        return part_of(seat, len(self.places.members), self.parts, self.helpers)
