"""How nodes that have come are taken in while others train.

Their workers build as guests, beside the others.  Once these are ready, the others meet them; a node that helps, and is
wanted for another part of the model, moves in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moc.runtime.exit_codes import USAGE
from moc.runtime.orders import Cause, Kill, Order, StartWorker, Why, Worker
from moc.runtime.seating import Seating


@dataclass
class Growth:
    """Who may be taken in, and how far that is.

    Attributes:
        seating: of the nodes.
        under_way: guests were started, or workers were asked to leave, since nodes have come.
        waited: when the members last changed, nodes were there that can train once their workers are built.
        welcomed: the newest generation whose workers were told that guests are ready.
    """

    seating: Seating
    under_way: bool = False
    waited: bool = False
    welcomed: int = -1

    def __post_init__(self):
        self._places, self._crew, self._per_node = self.seating.places, self.seating.crew, self.seating.per_node

    @property
    def more_can_train(self) -> bool:
        """Whether the nodes that are there make more copies than train, once they are built."""
        return len(self.seating.fits(self._places.filled)) > self.seating.whole

    @property
    def need_not_wait(self) -> bool:
        """Whether no more nodes can come, since all places are filled, or those to be taken in have waited already."""
        return self.waited or len(self._places.filled) == self._places.count

    @property
    def guests_are_ready(self) -> bool:
        """Whether guests can be taken in: all have built what they need, and more nodes can train with them."""
        guests = self._crew.guests.values()
        return bool(guests) and all(guest.built for guest in guests) and bool(self.who_has_come)

    @property
    def who_has_come(self) -> Why | None:
        """Nodes that let more workers train than now, without building; None if there are none."""
        if len(self.seating.fits_at_once(self.seating.ready)) <= self.seating.whole:
            return None
        if self.waited:
            return Why(Cause.NODES_WAITED, "nodes have waited, and are ready")
        return Why(Cause.NODES_CAME, "nodes have come")

    @property
    def who_moves(self) -> Why | None:
        """A node that helps, and is to be built for another part; None if there is none."""
        moves = self.seating.moves(self.seating.fits(self._places.filled))
        return Why(Cause.NODE_MOVES, "a node that helps moves to another part of the model") if moves else None

    def start_guests(self, generation: int) -> list[Order]:
        """Starts the workers of nodes that have come, as far as they are not there: they build beside the others.

        Guests that have built for another part of the model than is wanted now are killed.
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
        """A guest has died: the others of its node end too, and training continues."""
        node = self._crew.guests.pop(name).node
        if code == USAGE:
            self.seating.refused.add(len(self.seating.fits(self._places.filled)))
        return self._dismiss([other for other in self._crew.guests.values() if other.node == node])

    def _built_for_another_part(self, wanted: tuple[int, ...]) -> list[Worker]:
        """Guests whose node has a seat of another part of the model than they have; by place in each seat."""
        parts = {self._places.filler(place): seat % self.seating.parts for seat, place in enumerate(wanted)}
        has = {guest.name: self.seating.part(guest) for guest in self._crew.guests.values()}
        return [one for one in self._crew.guests.values() if parts.get(one.node, has[one.name]) != has[one.name]]

    def _dismiss(self, guests: Iterable[Worker]) -> list[Order]:
        return [Kill(guest.node, self._crew.guests.pop(guest.name).name) for guest in guests]
