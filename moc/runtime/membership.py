"""The membership of a job: a state machine without sockets, clocks or processes.  Events go in, orders come out.

A *generation* is a membership with a number.  A lost worker starts the next one: survivors are told to *abort* what
they are doing, replacements of the lost workers are started, and when all report that they are *here*, all are told to
*go* on.  A loss meanwhile starts another generation; nothing waits for a worker of an earlier one.  Workers belong to
places, and the node that fills a place may change: see :mod:`moc.runtime.assignment`.

A job that runs on MIN to MAX nodes continues with those that are left when one is lost that no spare replaces.  A
program whose workers *stay* goes on in the same processes, which get other ranks.  When nodes come, their workers build
as *guests*.  Once these are ready, the others are told to *welcome* them: they *part* at the end of the same iteration,
and guests are seated among them when all have.  Where a copy of its model takes several nodes, each has a part of it;
the job trains with whole copies, and other nodes that have a part help (:mod:`moc.runtime.seats`).  A worker keeps its
part as long as it lives.  Workers of any other program are all started anew, since their number is another one; when
nodes come, they are asked to save and to leave first.

    begin --> gathering --all here--> running --a worker is lost--> gathering (next generation) --> ...
                                         `----all exited with 0, or one with another code--> ended
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from moc.runtime.assignment import NodeAssignment
from moc.runtime.orders import Abort, End, GiveUp, Go, Kill, Leave, Order, Seat, StartWorker, Welcome, Worker
from moc.runtime.seating import Seating
from moc.runtime.seats import Candidate

SAVED = 75
"""Exit code of a worker that has saved its state after a request to stop; of a job: restart it to resume."""

LOST = 70
"""Exit code of a job that has lost something it depends on (sysexits' EX_SOFTWARE)."""

MAX_SUSPICIONS = 10
"""Most consecutive generations that begin without a loss; one more ends the job."""

MAX_BROKEN = 3
"""Workers in a row that one device may end before its node gives up its place."""

START_OVER = 76
"""Exit code of a worker that asks to be replaced without an error."""

USAGE = 2
"""Exit code of a program that refuses its settings, such as a batch that this number of workers cannot divide."""


@dataclass
class Membership:
    """The state machine: every method takes an event and returns the orders that follow.

    Attributes:
        most: workers of the job when all its places are filled.
        per_node: workers per node.
        max_restarts: workers lost by signals that are replaced before the job gives up.
        least_nodes: with which it continues; 0 if it waits for all.
        places: assignment of nodes to places.
        end: of the job; None while it lasts.
        asked: the signal by which the job was asked to stop; None if it was not.
        guests: workers that build for nodes that are about to be taken in.
        seating: of the nodes.
    """

    most: int
    per_node: int
    max_restarts: int
    least_nodes: int = 0
    generation: int = 0
    running: bool = False
    workers: dict[str, Worker] = field(default_factory=dict)
    restarts: int = 0
    suspicions: int = 0
    end: End | None = None
    asked: int | None = None
    guests: dict[str, Worker] = field(default_factory=dict)
    _finished: set[int] = field(default_factory=set)
    _gives_back: str | None = None
    _started: int = 0
    _told: dict[int, int] = field(default_factory=dict)  # by present node, the newest generation known to it
    _anew: int = 0  # the generation with which the members last changed
    _growing: bool = False  # guests were started, or workers were asked to leave, since nodes have come
    _broken: dict[str, int] = field(default_factory=dict)  # workers lately lost to a device, by node and number there
    _stayed: set[str] = field(default_factory=set)  # workers that the last change of members has seated
    _waited: bool = False  # when the members last changed, nodes were there that can train once their workers are built
    _welcomes: int = -1  # the newest generation whose workers were told that guests are ready

    def __post_init__(self):
        self.places = NodeAssignment(self.most // self.per_node, self.least_nodes)
        self.seating = Seating(self.places, self.per_node)

    @property
    def size(self) -> int:
        """Workers of this generation."""
        return len(self.places.members) * self.per_node

    def state_dict(self) -> dict:
        """State that a restarted controller cannot learn from the nodes; JSON-serializable."""
        return {
            "generation": self.generation,
            "restarts": self.restarts,
            "suspicions": self.suspicions,
            "asked": self.asked,
            "finished": sorted(self._finished),
            "gives_back": self._gives_back,
            "started": self._started,
            "places": sorted(self.places.filled_by.items()),
            "vacant": sorted(self.places.vacant),
            "members": list(self.places.members),
            "anew": self._anew,
            "growing": self._growing,
            "refused": sorted(self.seating.refused),
            "broken": dict(self._broken),
            "stayed": sorted(self._stayed),
            "parts": self.seating.parts,
            "helpers": list(self.seating.helpers),
            "waited": self._waited,
            "end": asdict(self.end) if self.end else None,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restores an earlier controller's state; its nodes have yet to join."""
        self.generation, self.restarts, self.suspicions = state["generation"], state["restarts"], state["suspicions"]
        self.asked, self._finished, self._started = state["asked"], set(state["finished"]), state["started"]
        self._gives_back = state["gives_back"]
        self.places.filled_by, self.places.vacant = dict(state["places"]), set(state["vacant"])
        self.places.members, self._anew = tuple(state["members"]), state["anew"]
        self._growing, self._stayed, self._waited = state["growing"], set(state["stayed"]), state["waited"]
        self.seating.refused, self._broken = set(state["refused"]), dict(state["broken"])
        self.seating.parts, self.seating.helpers = state["parts"], tuple(state["helpers"])
        self.end = End(**state["end"]) if state["end"] else None

    def joined(
        self, node: int, workers: Iterable[Worker] = (), generation: int = 0, asked: int | None = None
    ) -> list[Order]:
        """A node has joined.

        Args:
            node: its number.
            workers: its live workers, if an earlier controller started some or the node was declared lost.
            generation: the newest known to the node.
            asked: the signal by which it was asked to stop; None if it was not.
        """
        if self.end:
            return [self.end]
        has = list(workers)
        place = self.places.comes(node, next(map(self._place, has), None))
        self._told[node], self.generation = generation, max(self.generation, generation)
        self._forget_workers(node)
        orders: list[Order] = [self._seat(worker) for worker in has if self._missed_its_seat(worker)]
        wanted = {worker.name: worker for worker in has if place is not None and self._place(worker) == place}
        self.guests |= {w.name: w for w in has if w.guest and place is not None and place not in self.places.members}
        orders += [Kill(node, worker.name) for worker in has if worker.name not in wanted | self.guests]
        self.workers |= wanted
        if asked is not None and (end := self.stopping(asked)):
            return end
        if self._can_change and self.has_begun and not self.places.complete:
            return orders + self._change_members(f"node {node} is there")
        if place not in self.places.members or not self.places.complete:
            return orders
        members = (self.places.filled_by[member] for member in self.places.members)
        news_missed = any(self._told[member] < self.generation for member in members)
        if self.workers and (news_missed or len(self.workers) + len(self._finished) < self.size):
            return orders + self._next_generation(f"node {node} is there")
        if not self._all_here():
            self.running = False
            return orders + self._fill()
        if not self.running and any(worker.met < self.generation for worker in self.workers.values()):
            # their store may be gone with the controller that ordered them to connect, or died before it could
            return orders + self._next_generation("whoever was to bring the workers together is gone")
        self.running = True
        return orders

    def left(self, node: int, how: str = "is lost") -> list[Order]:
        """A node is lost with all its workers; it may return."""
        place, spare = self.places.goes(node)
        self._told.pop(node, None)
        self._forget_workers(node)
        self._growing = self._growing and (bool(self.guests) or not self._stays)
        if place not in self.places.members or self.end:
            return []
        if not self.has_begun:
            return self._fill() if self.places.complete else []
        first = self.places.members.index(place) * self.per_node
        if self._finished.issuperset(range(first, first + self.per_node)):
            return []
        instead = "" if spare is None else f", and node {spare} takes its place"
        if self._can_change and (self._growing or spare is None):
            return self._change_members(f"node {node} {how}{instead}")
        return self._next_generation(f"node {node} {how}{instead}")

    @property
    def can_grow(self) -> bool:
        """Whether more nodes are there than train, and all of the others train undisturbed, or nothing has begun."""
        if self.end or self.asked is not None or self._finished or not self.places.varies:
            return False
        if self.has_begun and not self.running:
            return False
        return len(self._fits(self.places.filled)) > self.seating.whole

    @property
    def is_growing(self) -> bool:
        """Whether guests were started, or workers were asked to leave, since nodes have come."""
        return self._growing

    @property
    def guests_are_ready(self) -> bool:
        """Whether guests can be taken in: all have built what they need, and more nodes can train with them."""
        built = bool(self.guests) and all(guest.built for guest in self.guests.values())
        return built and bool(self._who_has_come)

    @property
    def need_not_wait(self) -> bool:
        """Whether no more nodes can come, since all places are filled, or those to be taken in have waited already."""
        return self._waited or len(self.places.filled) == self.places.count

    @property
    def welcomes_guests(self) -> bool:
        """Whether workers of this generation were told that guests are ready, and some are yet to part."""
        return self._welcomes == self.generation

    def grow(self) -> list[Order]:
        """Begins with the nodes that are there, or takes in those that have come.

        If workers stay, those of the nodes that have come are started as guests, again if they have died; when these
        are ready, or a node that helps is to move, the others are told so, again if they are yet to part.  Otherwise
        workers are asked to save and to leave; if they have not when this is called again, they are killed.
        """
        if not self.can_grow:
            return []
        if not self.has_begun:
            self.places.members = self._fits(self.places.filled)
            return self._fill()
        if self.guests_are_ready or (self._stays and self._who_moves):
            self._welcomes, self._growing = self.generation, True
            return [Welcome(self.generation)]
        if self._stays:
            self._growing = True
            return self._start_guests()
        if self._growing:
            return self._change_members("nodes have come, and workers do not leave")
        self._growing = True
        return [Leave()]

    def ended(
        self, name: str, code: int, why: str = "", gives_back: str | None = None, broken: bool = False
    ) -> list[Order]:
        """A worker has exited.

        Args:
            name: of the worker; ignored if it was already ordered to be killed.
            code: its exit code; minus the signal number if a signal killed it.
            why: the reason, if its node killed it.
            gives_back: the run's memory, if the worker has released it.
            broken: it has ended itself, since its device does not work any more.
        """
        if name in self.guests:
            return self._guest_ended(self.guests.pop(name), code)
        worker = self.workers.pop(name, None)
        if worker is None or self.end:
            return []
        if code in (0, SAVED):
            self._gives_back = gives_back or self._gives_back
        if code == 0:
            self._finished.add(worker.rank)
            return self._over(0, "", leaving=True) if len(self._finished) == self.size else []
        if (
            self._growing
            and not self._stays
            and self.asked is None
            and (code == SAVED or code < 0)
            and self._can_change
        ):
            return [] if code == SAVED and self.workers else self._change_members("nodes have come")
        if code == START_OVER and self.asked is None:
            return self._next_generation(f"worker {worker.rank} starts over")
        if code == USAGE and self.asked is None and self._may_be_too_many(worker):
            self.seating.refused.add(self.seating.whole)
            return self._change_members(f"the program refuses to run on {self.seating.whole} nodes")
        how = f"worker {worker.rank} {_how(code)}{why and f': it {why}'}"
        if code > 0 or self.asked is not None:
            return self._over(code if code > 0 else 128 - code, how, leaving=code == SAVED)
        self.restarts, self.suspicions = self.restarts + 1, 0
        if self.restarts > self.max_restarts:
            return self._over(128 - code, f"{how}, and {self.max_restarts} were replaced already (--max-restarts)")
        if broken and self._wears_out(worker):
            return self._give_up(worker, how)
        return self._next_generation(how)

    def _wears_out(self, worker: Worker) -> bool:
        """Counts a worker that its device has ended; returns whether another one there would fare no better."""
        device = self._device_of(worker)
        self._broken[device] = self._broken.get(device, 0) + 1
        return self._broken[device] >= MAX_BROKEN

    def _device_of(self, worker: Worker) -> str:
        return f"{worker.node}.{worker.rank % self.per_node}"

    def _give_up(self, worker: Worker, how: str) -> list[Order]:
        """Takes a node out of the job; its launcher ends, so it does not return by itself."""
        node, number = worker.node, worker.rank % self.per_node
        del self._broken[self._device_of(worker)]  # whoever starts the node again has looked at it
        kills = [Kill(node, other.name) for other in self.workers.values() if other.node == node]
        often = f"as were {MAX_BROKEN - 1} before it with device {number} of node {node}"
        why = f"{how}, {often}: the node gives up its place; look at the device before you start it again"
        return [*kills, GiveUp(node, why), *self.left(node, "has given up its place")]

    def built(self, name: str, stays: bool = False) -> list[Order]:
        """A worker is ready to train; ``stays`` tells whether it could go on if the number of workers changed."""
        for worker in filter(None, (self.workers.get(name), self.guests.get(name))):
            worker.built, worker.stays = True, stays
        return []

    def here(self, name: str, generation: int, parts: int = 1) -> list[Order]:
        """A worker reports in a generation, and waits for the others; a copy of its model takes ``parts`` nodes."""
        if name not in self.workers or self.end:
            return []
        if parts != self.seating.parts:
            self.seating.parts = parts
            if len(self.places.members) % parts:
                return self._change_members(f"a copy of the model takes {parts} nodes")
        worker = self.workers[name]
        worker.here = generation
        if 0 <= worker.met < generation:  # its device has survived the end of a generation
            self._broken.pop(self._device_of(worker), None)
        if not self._all_here():
            return []
        self.running = True
        return [Go(self.generation)]  # repeated for a worker that reports again: it missed the order

    def met(self, name: str, generation: int) -> list[Order]:
        """A worker has connected with all others."""
        if name in self.workers:
            self.workers[name].met = generation
        return []

    def parted(self, name: str, generation: int) -> list[Order]:
        """A worker has left a generation at the end of an iteration, and waits for guests; all have, when this ends.

        No iteration is under way then.  If guests were lost meanwhile, the others meet again without them.
        """
        if name not in self.workers or self.end:
            return []
        self.workers[name].parted = generation
        if len(self.workers) < self.size or any(one.parted < self.generation for one in self.workers.values()):
            return []
        if self.can_grow and (why := self._who_has_come or self._who_moves):
            return self._change_members(why)
        self._growing = bool(self.guests)  # whoever is gone may come again at once
        why = "nodes that were ready are gone again" if self.asked is None else "the job is to stop, and meets no more"
        return self._next_generation(why)

    def suspected(self, name: str, generation: int, how: str = "has lost connections") -> list[Order]:
        """A worker of a generation cannot continue although no loss is known: connections are lost, or it hangs."""
        if name not in self.workers or generation != self.generation or self.end:
            return []
        what = f"worker {self.workers[name].rank} {how}"
        self.suspicions += 1
        if self.suspicions > MAX_SUSPICIONS:
            return self._over(1, f"{what}, for the {self.suspicions}th time that nobody was lost: look at the network")
        return self._next_generation(what)

    def calm(self) -> None:
        """Forgets earlier suspicions and broken devices after a long time without trouble."""
        self.suspicions = 0
        self._broken.clear()

    def stopping(self, number: int) -> list[Order]:
        """A signal asks the job to stop: lost workers are no longer replaced, and missing nodes no longer awaited."""
        self.asked = number
        why = f"the job was asked to stop (signal {number})"
        return self.gives_up(why) if self.has_begun else self._over(128 + number, f"{why}: nothing has begun")

    def waits_for(self) -> list[int]:
        """Nodes that are lost or have never joined, and that no spare replaces."""
        return [] if self.end else self.places.missing()

    def gives_up(self, why: str) -> list[Order]:
        """Ends the job if nodes are missing."""
        if self.end or not (missing := self.waits_for()):
            return []
        what = f"{nodes(missing)} missing, and {why}"
        if not self.has_begun:
            return self._over(LOST, f"{what}: nothing has begun")
        return self._over(SAVED, f"{what}: what was saved is kept; start the job again to go on from there")

    @property
    def has_begun(self) -> bool:
        """Whether any worker was ever started."""
        return self._started > 0 or bool(self.workers)

    def _place(self, worker: Worker) -> int | None:
        """The place of a worker; None if it was started for other members."""
        seated = worker.born >= self._anew and not worker.guest
        return self.places.members[worker.rank // self.per_node] if seated and self.size else None

    def _candidates(self, places: tuple[int, ...]) -> list[Candidate]:
        return self.seating.candidates(places, self.workers, self.guests)

    def _fits(self, places: tuple[int, ...]) -> tuple[int, ...]:
        """The seats of copies that these places make, see :meth:`Seating.fits`."""
        return self.seating.fits(self._candidates(places))

    @property
    def _can_change(self) -> bool:
        """Whether the job can run on the nodes that are there, be they others than the members."""
        return self.places.varies and self.places.settled and bool(self._fits(self.places.filled))

    def _may_be_too_many(self, worker: Worker) -> bool:
        """Whether the program may refuse this number of nodes, which is not that of the job, and accept a smaller."""
        members = self.places.members[: self.seating.whole]
        return len(members) < self.places.count and not worker.built and bool(self._fits(members[:-1]))

    def _change_members(self, reason: str) -> list[Order]:
        """Goes on with the nodes that are there: workers that stay get other ranks, and all others are started anew."""
        stay, there = self._stays, self.workers | self.guests
        copies = self.seating.fit_at_once(self._candidates(self._ready)) if stay else ()
        candidates = self._candidates(self.places.filled)
        self.seating.seat(copies or self.seating.fits(candidates), candidates, help_too=stay)
        self._anew, self._growing = self.generation + 1, False
        self.guests = {name: one for name, one in self.guests.items() if stay and not self._is_member(one)}
        self.workers = {
            name: one
            for name, one in there.items()
            if stay and self.seating.keeps_its_part(one) and (one.built or not one.together)
        }
        self._stayed = set(self.workers)
        orders: list[Order] = [self._seat(one) for one in self.workers.values()]
        orders += [Kill(one.node, name) for name, one in there.items() if name not in self.workers | self.guests]
        self._waited = stay and len(self._fits(self.places.filled)) > self.seating.whole
        count, helping = len(self.places.members), len(self.seating.helpers)
        why = f"{reason}: training continues on {count} of {self.places.count} nodes"
        why += f", {helping} of which {'helps' if helping == 1 else 'help'}" if helping else ""
        return [*orders, *self._next_generation(why)]

    @property
    def _stays(self) -> bool:
        """Whether the program goes on in the same processes when the members change."""
        return any(worker.stays for worker in self.workers.values())

    @property
    def _ready(self) -> tuple[int, ...]:
        """Places with a present node: of the members, and of guests that are all ready to train."""
        built = Counter(self.places.of(guest.node) for guest in self.guests.values() if guest.built)
        return tuple(
            place for place in self.places.filled if place in self.places.members or built[place] == self.per_node
        )

    @property
    def _who_has_come(self) -> str:
        """Nodes with which more can train than now, without building, as a sentence; empty if there are none."""
        if len(self.seating.fit_at_once(self._candidates(self._ready))) <= self.seating.whole:
            return ""
        return "nodes have waited, and are ready" if self._waited else "nodes have come"

    @property
    def _who_moves(self) -> str:
        """A node that helps, and is to be built for another part, as a sentence; empty if there is none."""
        moves = self.seating.moves(self._fits(self.places.filled))
        return "a node that helps moves to another part of the model" if moves else ""

    def _is_member(self, worker: Worker) -> bool:
        return self.places.of(worker.node) in self.places.members

    def _missed_its_seat(self, worker: Worker) -> bool:
        """Whether the controller that has seated a worker was lost before it could say so."""
        return worker.name in self._stayed and worker.born < self._anew and self._is_member(worker)

    def _seat(self, worker: Worker) -> Seat:
        """Gives a worker that stays the rank that it has among the members."""
        place = self.places.of(worker.node)
        assert place is not None  # it is a member's
        worker.rank = self.places.members.index(place) * self.per_node + worker.rank % self.per_node
        worker.born, worker.guest = self._anew, False
        worker.size, worker.helpers = self.size, self.seating.helpers
        return Seat(worker.node, worker.name, worker.rank, self._anew, self.size, self.seating.helpers)

    def _start_guests(self) -> list[Order]:
        """Starts the workers of nodes that have come, as far as they are not there: they build beside the others."""
        wanted = self._fits(self.places.filled)
        parts = {self.places.filler(place): seat % self.seating.parts for seat, place in enumerate(wanted)}
        has = {name: self.seating.part(guest) for name, guest in self.guests.items()}
        others = [guest for name, guest in self.guests.items() if parts.get(guest.node, has[name]) != has[name]]
        orders: list[Order] = [Kill(guest.node, self.guests.pop(guest.name).name) for guest in others]
        there = {(guest.node, guest.rank % self.per_node) for guest in self.guests.values()}
        for rank in range(len(wanted) * self.per_node):
            place = wanted[rank // self.per_node]
            node = self.places.filler(place)
            if place not in self.places.members and node is not None and (node, rank % self.per_node) not in there:
                self._started += 1
                name, size = f"{self.generation}.{self._started}", len(wanted) * self.per_node
                guest = Worker(name, node, rank, together=False, born=self.generation, guest=True, size=size)
                self.guests[name] = guest
                orders.append(StartWorker(node, name, rank, self.generation, False, place, size, guest=True))
        return orders

    def _guest_ended(self, guest: Worker, code: int) -> list[Order]:
        """A worker has died that was about to be taken in: the others of its node end too, and training continues."""
        if code == USAGE:
            self.seating.refused.add(len(self._fits(self.places.filled)))
        others = [name for name, other in self.guests.items() if other.node == guest.node]
        return [Kill(self.guests.pop(name).node, name) for name in others]

    def _all_here(self) -> bool:
        return len(self.workers) == self.size and all(w.here == self.generation for w in self.workers.values())

    def _forget_workers(self, node: int) -> None:
        self.workers = {name: worker for name, worker in self.workers.items() if worker.node != node}
        self.guests = {name: guest for name, guest in self.guests.items() if guest.node != node}

    def _next_generation(self, reason: str) -> list[Order]:
        self.generation, self.running = self.generation + 1, False
        self._finished.clear()
        self._gives_back = None  # survivors resume, and need it
        self._told = dict.fromkeys(self._told, self.generation)
        return [Abort(self.generation, reason), *self._fill()]

    def _fill(self) -> list[Order]:
        """Starts missing workers, and kills those that can no longer build in step with all others."""
        orders: list[Order] = []
        anybody = any(worker.built for worker in self.workers.values())
        if self.seating.helpers and not anybody:  # all build together, and whole copies alone can
            self.seating.dismiss_helpers()
            self._anew = self.generation
        for worker in list(self.workers.values()):
            if not worker.built and (worker.together or not anybody) and worker.here != self.generation:
                orders.append(Kill(worker.node, worker.name))
                del self.workers[worker.name]
        taken = {worker.rank for worker in self.workers.values()} | self._finished
        for rank in sorted(set(range(self.size)) - taken):
            node = self.places.filler(self.places.members[rank // self.per_node])
            if node is not None:
                orders.append(self._start(node, rank, together=not anybody))
        return orders

    def _start(self, node: int, rank: int, together: bool) -> StartWorker:
        self._started += 1
        name, born, helpers = f"{self.generation}.{self._started}", self.generation, self.seating.helpers
        self.workers[name] = Worker(name, node, rank, together, born=born, size=self.size, helpers=helpers)
        place = self.places.members[rank // self.per_node]
        return StartWorker(node, name, rank, born, together, place, self.size, helpers=helpers)

    def _over(self, code: int, reason: str, leaving: bool = False) -> list[Order]:
        self.end = End(code, reason, leaving, self._gives_back if code in (0, SAVED) else None)
        return [self.end]


def nodes(numbers: list[int]) -> str:
    """Nodes, with a verb: ``node 1 is``."""
    return f"node {numbers[0]} is" if len(numbers) == 1 else f"nodes {', '.join(map(str, numbers))} are"


def _how(code: int) -> str:
    if code < 0:
        return f"was killed by signal {-code}"
    return "was asked to stop, and has saved" if code == SAVED else f"failed (exit code {code})"
