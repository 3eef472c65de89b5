"""The seats of a job's nodes: which of those that are there train, which help, and with which part of the model."""

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
    """Seats in the order of ranks, those of whole copies of the model first.

    Attributes:
        places: whose members have the seats.
        per_node: workers per node.
        crew: the live workers.
        parts: nodes that a copy of the program's model takes.
        helpers: of the last members, which help: the part of the model that each has.
        refused: numbers of nodes with copies that the program does not run on.
    """

    places: NodeAssignment
    per_node: int
    crew: Crew
    parts: int = 1
    helpers: tuple[int, ...] = ()
    refused: set[int] = field(default_factory=set)

    @property
    def whole(self) -> int:
        """Members that make whole copies; the others help."""
        return len(self.places.members) - len(self.helpers)

    @property
    def ready(self) -> tuple[int, ...]:
        """Places with a present node: of the members, and of guests that are all ready to train."""
        built = Counter(self.places.of(guest.node) for guest in self.crew.guests.values() if guest.built)
        members = self.places.members
        return tuple(place for place in self.places.filled if place in members or built[place] == self.per_node)

    def fits(self, places: Sequence[int]) -> tuple[int, ...]:
        """The seats of as many copies as these places make and the program runs on; none if they are too few.

        Workers are yet to be built where a node has none, or has another part of the model.
        """
        there = self._candidates(places)
        return self._seats(there, len(there) // self.parts) if len(there) >= self.places.least else ()

    def fits_at_once(self, places: Sequence[int]) -> tuple[int, ...]:
        """The seats of as many copies as these places make without building; none if they are too few."""
        there = self._candidates(places)
        return self._seats(there, copies_at_once(there, self.parts))

    def _seats(self, there: Sequence[Candidate], copies: int) -> tuple[int, ...]:
        numbers = range(copies, max(1, self.places.least // self.parts) - 1, -1)
        copies = next((number for number in numbers if number * self.parts not in self.refused), 0)
        return seats(there, self.parts, copies)

    def seat_anew(self, stay: bool) -> None:
        """Gives the seats to the nodes that are there.

        Args:
            stay: workers that have built keep their part of the model; as many copies as they make train at once, and
                others of them help.  Otherwise all are to be built anew.
        """
        later = self.fits(self.places.filled)
        copies = (self.fits_at_once(self.ready) if stay else ()) or later
        there = self._candidates(self.places.filled)
        extra = helpers(there, self.parts, copies, later) if stay and self.parts > 1 else ()
        self.places.members = (*copies, *(one.place for one in extra))
        self.helpers = tuple(one.part for one in extra if one.part is not None)

    def dismiss_helpers(self) -> None:
        """Takes their seats from those that help."""
        self.places.members, self.helpers = self.places.members[: self.whole], ()

    def moves(self, later: Sequence[int]) -> bool:
        """Whether a member has another part in the seats that nodes are to have later."""
        parts = {place: self._part_of_seat(seat) for seat, place in enumerate(self.places.members)}
        return any(parts.get(place, seat % self.parts) != seat % self.parts for seat, place in enumerate(later))

    def _candidates(self, places: Iterable[int]) -> list[Candidate]:
        """Places as candidates for seats, with what the workers of their nodes are built for."""
        return [self._candidate(place) for place in places]

    def _candidate(self, place: int) -> Candidate:
        if place in self.places.members:
            built = sum(worker.built for worker in self.crew.workers.values() if self.places.of(worker.node) == place)
            return Candidate(place, self._part_of_seat(self.places.members.index(place)), built == self.per_node)
        node = self.places.filler(place)
        guest = next((guest for guest in self.crew.guests.values() if guest.node == node), None)
        return Candidate(place, guest and self.part(guest))

    def part(self, worker: Worker) -> int:
        """The part of the model that a worker has by its rank."""
        seat, seats = worker.rank // self.per_node, worker.size // self.per_node
        return part_of(seat, seats, self.parts, worker.helpers)

    def keeps_its_part(self, worker: Worker) -> bool:
        """Whether a worker's node has a seat, with the part of the model that the worker has."""
        place = self.places.of(worker.node)
        if place is None or place not in self.places.members:
            return False
        return self._part_of_seat(self.places.members.index(place)) == self.part(worker)

    def _part_of_seat(self, seat: int) -> int:
        return part_of(seat, len(self.places.members), self.parts, self.helpers)
