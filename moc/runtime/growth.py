"""Adds newly arrived nodes to a running job (scale-up).

Their workers initialize in the background.  When they are ready, the next generation includes them.  A partial-model
node moves to another part of the model in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moc.runtime.exit_codes import USAGE
from moc.runtime.orders import Cause, Kill, Order, StartWorker, Why, Worker
from moc.runtime.seating import Seating


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
