"""The seats of a job's nodes: which of those that are there train, which help, and with which part of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moc.runtime.assignment import NodeAssignment
from moc.runtime.orders import Worker
from moc.runtime.seats import Candidate, copies_at_once, helpers, part_of, seats


@dataclass
class Seating:
    """Seats in the order of ranks, those of whole copies of the model first.

    Attributes:
        places: whose members have the seats.
        per_node: workers per node.
        parts: nodes that a copy of the program's model takes.
        helpers: of the last members, which help: the part of the model that each has.
        refused: numbers of nodes with copies that the program does not run on.
    """

    places: NodeAssignment
    per_node: int
    parts: int = 1
    helpers: tuple[int, ...] = ()
    refused: set[int] = field(default_factory=set)

    @property
    def whole(self) -> int:
        """Members that make whole copies; the others help."""
        return len(self.places.members) - len(self.helpers)

    def fits(self, there: Sequence[Candidate]) -> tuple[int, ...]:
        """The seats of as many copies as these nodes make and the program runs on; none if they are too few.

        Workers are yet to be built where a node has none, or has another part of the model.
        """
        return self._seats(there, len(there) // self.parts) if len(there) >= self.places.least else ()

    def fit_at_once(self, there: Sequence[Candidate]) -> tuple[int, ...]:
        """The seats of as many copies as these nodes make without building; none if they are too few."""
        return self._seats(there, copies_at_once(there, self.parts))

    def _seats(self, there: Sequence[Candidate], copies: int) -> tuple[int, ...]:
        numbers = range(copies, max(1, self.places.least // self.parts) - 1, -1)
        copies = next((number for number in numbers if number * self.parts not in self.refused), 0)
        return seats(there, self.parts, copies)

    def seat(self, copies: tuple[int, ...], there: Sequence[Candidate], help_too: bool) -> None:
        """Gives seats to copies, and to those of the nodes that help, if any are to."""
        extra = helpers(there, self.parts, copies, self.fits(there)) if help_too and self.parts > 1 else ()
        self.places.members = (*copies, *(one.place for one in extra))
        self.helpers = tuple(one.part for one in extra if one.part is not None)

    def dismiss_helpers(self) -> None:
        """Takes their seats from those that help."""
        self.places.members, self.helpers = self.places.members[: self.whole], ()

    def moves(self, later: Sequence[int]) -> bool:
        """Whether a member has another part in the seats that nodes are to have later."""
        parts = {place: self._part_of_seat(seat) for seat, place in enumerate(self.places.members)}
        return any(parts.get(place, seat % self.parts) != seat % self.parts for seat, place in enumerate(later))

    def candidates(
        self, places: Iterable[int], workers: Mapping[str, Worker], guests: Mapping[str, Worker]
    ) -> list[Candidate]:
        """Places as candidates for seats, with what the workers of their nodes are built for."""
        return [self._candidate(place, workers, guests) for place in places]

    def _candidate(self, place: int, workers: Mapping[str, Worker], guests: Mapping[str, Worker]) -> Candidate:
        if place in self.places.members:
            built = sum(worker.built for worker in workers.values() if self.places.of(worker.node) == place)
            return Candidate(place, self._part_of_seat(self.places.members.index(place)), built == self.per_node)
        node = self.places.filler(place)
        guest = next((guest for guest in guests.values() if guest.node == node), None)
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
