"""Assigns nodes to rank blocks and to parts of the model, and adds newly arrived nodes; no I/O.

A job has one *rank block* for each node of ``--nnodes``.  A block determines the ranks of its node's workers.  Surplus
nodes are spares, which replace lost nodes.  A job may run on fewer nodes than it has blocks.  Its *members* are the
blocks that train in this generation.

A copy of the model is cut into *parts* of one node each, such as pipeline stages.  A job trains with the complete
copies that its nodes form.  *Seats* (rank assignments) are numbered copy by copy: seat i has part i % parts.  The last
seats belong to *helpers* (partial-model nodes): surplus nodes of a part, with its state.

New nodes initialize their workers in the background.  When they are ready, the next generation includes them.  A
partial-model node moves to another part of the model in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moc.runtime.orders import Cause, Kill, Order, StartWorker, Why, Worker
from moc.runtime.termination import USAGE


@dataclass
class Crew:
    """Training workers, and joining workers of new nodes.

    Attributes:
        workers: workers with a rank among the members, by name.
        guests: joining workers, which initialize in the background, by name.
        started: number of workers ever started.
    """

    workers: dict[str, Worker] = field(default_factory=dict)
    guests: dict[str, Worker] = field(default_factory=dict)
    started: int = 0

    def new_name(self, generation: int) -> str:
        """Returns a name, unique in the job, for a worker to be started."""
        self.started += 1
        return f"{generation}.{self.started}"

    @property
    def stays(self) -> bool:
        """Whether the program continues in the same processes when the members change."""
        return any(worker.stays for worker in self.workers.values())

    def forget(self, node: int) -> None:
        """Drops all workers of a node."""
        self.workers = {name: worker for name, worker in self.workers.items() if worker.node != node}
        self.guests = {name: guest for name, guest in self.guests.items() if guest.node != node}


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


@dataclass(frozen=True)
class Candidate:
    """A node that could train.

    Attributes:
        place: rank block of the node.
        part: part of the model for which its workers are initialized; None if it has no workers.
        trains: its workers have the state of that part.
    """

    place: int
    part: int | None = None
    trains: bool = False


def part_of(seat: int, seats: int, parts: int, helpers: Sequence[int]) -> int:
    """Returns the part of the model of a seat.

    Args:
        seat: number of the seat.
        seats: number of seats, with helpers.
        parts: nodes of a copy.
        helpers: parts of the last seats.
    """
    behind = seat - (seats - len(helpers))
    return helpers[behind] if helpers and behind >= 0 else seat % parts


def copies_at_once(candidates: Iterable[Candidate], parts: int) -> int:
    """Returns the number of model copies that nodes form without initializing workers."""
    built = [candidate.part for candidate in candidates]
    return min(built.count(part) for part in range(parts))


def seats(candidates: Iterable[Candidate], parts: int, copies: int) -> tuple[int, ...]:
    """Assigns seats: each node keeps its part, unless the part has more nodes than there are copies.

    Among surplus nodes of a part, those with its state have priority.  Remaining seats go to nodes without workers,
    then to nodes initialized for another part.

    Args:
        candidates: nodes, at least ``parts * copies``.
        parts: nodes of a copy.
        copies: number of copies.

    Returns:
        The place in each seat.
    """
    there, by_part = sorted(candidates, key=lambda one: one.place), []
    for part in range(parts):
        mine = [one for one in there if one.part == part]
        by_part.append(sorted(mine, key=lambda one: not one.trains)[:copies])
    seated = [one for of_part in by_part for one in of_part]
    others = iter(sorted((one for one in there if one not in seated), key=_reluctance))
    for copy in range(copies):
        for of_part in by_part:
            of_part += [next(others)] if len(of_part) <= copy else []
    in_order = [sorted(one.place for one in of_part) for of_part in by_part]
    return tuple(of_part[copy] for copy in range(copies) for of_part in in_order)


def helpers(
    candidates: Iterable[Candidate], parts: int, seated: Sequence[int], later: Sequence[int]
) -> tuple[Candidate, ...]:
    """Returns the partial-model nodes: they have state of a part, no seat in a copy, and no other part later.

    If two parts differ by two nodes or more, a node that changes its part forms another copy.  It does not help, and is
    free for initialization with the other part.

    Args:
        candidates: nodes.
        parts: nodes of a copy.
        seated: places in the current seats of copies.
        later: places in these seats when workers are initialized for the maximum number of copies.

    Returns:
        Helpers, sorted by part and place.
    """
    goes_to = {place: seat % parts for seat, place in enumerate(later)}
    free = (one for one in candidates if one.trains and one.part is not None and one.place not in seated)
    stay = (one for one in free if goes_to.get(one.place, one.part) == one.part)
    return tuple(sorted(stay, key=lambda one: (one.part, one.place)))


def _reluctance(one: Candidate) -> tuple[bool, bool, int]:
    return one.part is not None, one.trains, one.place


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


@dataclass
class Growth:
    """Progress of adding nodes.

    Attributes:
        seating: current and possible assignments of nodes to ranks.
        under_way: whether joining workers were started, or a generation change was requested, since nodes arrived.
        waited: whether, at the last change of members, connected nodes could train once their workers are initialized.
        welcomed: newest generation whose workers received a scale-up notice; -1 if none.
    """

    seating: Seating
    under_way: bool = False
    waited: bool = False
    welcomed: int = -1

    def __post_init__(self):
        self._places, self._crew, self._per_node = self.seating.places, self.seating.crew, self.seating.per_node

    @property
    def more_can_train(self) -> bool:
        """Whether the connected nodes, once initialized, form more model replicas than train now."""
        return len(self.seating.fits(self._places.filled)) > self.seating.whole

    @property
    def need_not_wait(self) -> bool:
        """Whether to wait for no more nodes: all rank blocks are filled, or the new nodes have waited already."""
        return self.waited or len(self._places.filled) == self._places.count

    @property
    def guests_are_ready(self) -> bool:
        """Whether joining workers can be included: all are initialized, and more nodes can train with them."""
        guests = self._crew.guests.values()
        return bool(guests) and all(guest.built for guest in guests) and bool(self.who_has_come)

    @property
    def who_has_come(self) -> Why | None:
        """Reason to include nodes whose workers can train immediately; None if there are no such nodes."""
        if len(self.seating.fits_at_once(self.seating.ready)) <= self.seating.whole:
            return None
        if self.waited:
            return Why(Cause.NODES_WAITED, "nodes have waited, and are ready")
        return Why(Cause.NODES_CAME, "nodes have come")

    @property
    def who_moves(self) -> Why | None:
        """Reason to move a partial-model node to another part of the model; None if no node moves."""
        moves = self.seating.moves(self.seating.fits(self._places.filled))
        return Why(Cause.NODE_MOVES, "a node that helps moves to another part of the model") if moves else None

    def start_guests(self, generation: int) -> list[Order]:
        """Starts the missing workers of joining nodes, which initialize in the background.

        Joining workers that initialized a different part of the model are killed first.
        """
        wanted = self.seating.fits(self._places.filled)
        orders = self._dismiss(self._built_for_another_part(wanted))
        size = len(wanted) * self._per_node
        there = {(guest.node, guest.rank % self._per_node) for guest in self._crew.guests.values()}
        for rank in range(size):
            place = wanted[rank // self._per_node]
            node = self._places.filler(place)
            if place in self._places.members or node is None or (node, rank % self._per_node) in there:
                continue
            name = self._crew.new_name(generation)
            self._crew.guests[name] = Worker(name, node, rank, together=False, born=generation, guest=True, size=size)
            orders.append(StartWorker(node, name, rank, generation, False, place, size, guest=True))
        return orders

    def guest_ended(self, name: str, code: int) -> list[Order]:
        """Handles the exit of a joining worker: kills the joining workers of its node; training continues."""
        node = self._crew.guests.pop(name).node
        if code == USAGE:
            self.seating.refused.add(len(self.seating.fits(self._places.filled)))
        return self._dismiss([other for other in self._crew.guests.values() if other.node == node])

    def _built_for_another_part(self, wanted: tuple[int, ...]) -> list[Worker]:
        """Returns joining workers whose model part differs from their node's in ``wanted`` (rank blocks by seat)."""
        parts = {self._places.filler(place): seat % self.seating.parts for seat, place in enumerate(wanted)}
        has = {guest.name: self.seating.part(guest) for guest in self._crew.guests.values()}
        return [one for one in self._crew.guests.values() if parts.get(one.node, has[one.name]) != has[one.name]]

    def _dismiss(self, guests: Iterable[Worker]) -> list[Order]:
        return [Kill(guest.node, self._crew.guests.pop(guest.name).name) for guest in guests]
