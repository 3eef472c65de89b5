"""The membership of a job: a state machine that turns events into orders, without sockets, clocks or processes.

A *generation* is a numbered membership.  A lost worker starts the next one:

* Survivors are ordered to *abort* their work, and replacements of the lost workers are started.
* When all workers have reported that they are *here*, all are ordered to *go*.
* A loss meanwhile starts another generation; nothing waits for a worker of an earlier one.

Workers belong to rank blocks (*places*), and the node of a block may change: see :mod:`moc.runtime.seating`.

A job on MIN to MAX nodes continues on the remaining nodes if no spare replaces a lost one.  The program decides how:

* A program whose workers *stay* continues in the same processes, with other ranks.  Workers of new nodes initialize
  meanwhile, as *guests*.  When they are ready, the others get a scale-up notice (*welcome*) and drain (*part*) after
  the same iteration.  Then the guests get ranks.
* If a copy of the model takes several nodes, each node has a part of it.  Complete copies train, and other nodes with a
  part are *helpers* (:mod:`moc.runtime.seating`).  A worker keeps its part while it lives.
* All workers of any other program are restarted, since their number changes.  Before new nodes are added, they are
  asked to save and exit.

    begin --> gathering --all here--> running --a worker is lost--> gathering (next generation) --> ...
                                         `----all exited with 0, or one with another code--> ended
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from moc.errors import UserError, with_code
from moc.runtime.orders import (
    Abort,
    Cause,
    End,
    GiveUp,
    Go,
    Kill,
    Leave,
    Order,
    Seat,
    StartWorker,
    Welcome,
    Why,
    Worker,
)
from moc.runtime.seating import Crew, Growth, NodeAssignment, Seating
from moc.runtime.termination import LOST, RESUME_REMEDY, SAVED, START_OVER, STOP_SIGNALS, USAGE, describe_exit

MAX_BROKEN = 3
"""Consecutive workers that a device may end before its node gives up its rank block."""


@dataclass
class BrokenDevices:
    """Devices that have recently ended workers.

    Attributes:
        per_node: devices per node, with one worker each.
        ended: by device, the number of consecutive workers that it has ended.
    """

    per_node: int
    ended: dict[str, int] = field(default_factory=dict)

    def wears_out(self, worker: Worker) -> bool:
        """Counts a worker that its device has ended; returns whether the device has reached the limit."""
        device = self._device_of(worker)
        self.ended[device] = self.ended.get(device, 0) + 1
        return self.ended[device] >= MAX_BROKEN

    def is_well(self, worker: Worker) -> None:
        """Resets the count of a worker's device, because it works or the node gives up its rank block."""
        self.ended.pop(self._device_of(worker), None)

    def number_of(self, worker: Worker) -> int:
        """Returns the number of a worker's device on its node."""
        return worker.rank % self.per_node

    def _device_of(self, worker: Worker) -> str:
        return f"{worker.node}.{self.number_of(worker)}"


MAX_SUSPICIONS = 10
"""Maximum number of consecutive generations that begin without a loss; one more ends the job."""


@dataclass
class Membership:
    """The state machine: methods that take an event return the resulting orders.

    Attributes:
        most: number of workers when all rank blocks are filled.
        per_node: workers per node.
        max_restarts: workers lost by signals that are replaced before the job gives up.
        least_nodes: minimum number of nodes; 0 to wait for all.
        generation: number of the current generation.
        running: all workers of the generation have reported, and were ordered to go.
        restarts: workers lost by signals until now.
        suspicions: consecutive generations that began without a loss.
        end: end of the job; None while it runs.
        asked: signal that requested a stop; None without one.
        crew: live workers.
        places: assignment of nodes to rank blocks.
        seating: nodes that train or help, and their parts of the model.
        growth: progress of adding nodes.
    """

    most: int
    per_node: int
    max_restarts: int
    least_nodes: int = 0
    generation: int = 0
    running: bool = False
    restarts: int = 0
    suspicions: int = 0
    end: End | None = None
    asked: int | None = None
    crew: Crew = field(default_factory=Crew)
    _finished: set[int] = field(default_factory=set)
    _gives_back: str | None = None
    _told: dict[int, int] = field(default_factory=dict)  # newest generation known to each present node
    _anew: int = 0  # generation in which the members last changed
    _stayed: set[str] = field(default_factory=set)  # workers that kept running at the last change of members

    def __post_init__(self):
        self.places = NodeAssignment(self.most // self.per_node, self.least_nodes)
        self.seating = Seating(self.places, self.per_node, self.crew)
        self.growth = Growth(self.seating)
        self._broken = BrokenDevices(self.per_node)

    @property
    def workers(self) -> dict[str, Worker]:
        """Workers that have a rank among the members, by name."""
        return self.crew.workers

    @property
    def guests(self) -> dict[str, Worker]:
        """Joining workers, which initialize on new nodes, by name."""
        return self.crew.guests

    @property
    def size(self) -> int:
        """Workers of this generation."""
        return len(self.places.members) * self.per_node

    def state_dict(self) -> dict:
        """Returns the state that a restarted controller cannot learn from the nodes; JSON-serializable."""
        return {
            "generation": self.generation,
            "restarts": self.restarts,
            "suspicions": self.suspicions,
            "asked": self.asked,
            "finished": sorted(self._finished),
            "gives_back": self._gives_back,
            "started": self.crew.started,
            "places": sorted(self.places.filled_by.items()),
            "vacant": sorted(self.places.vacant),
            "members": list(self.places.members),
            "anew": self._anew,
            "growing": self.growth.under_way,
            "refused": sorted(self.seating.refused),
            "broken": dict(self._broken.ended),
            "stayed": sorted(self._stayed),
            "parts": self.seating.parts,
            "helpers": list(self.seating.helpers),
            "waited": self.growth.waited,
            "end": self.end.to_message() if self.end else None,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restores an earlier controller's state; its nodes have yet to join."""
        self.generation, self.restarts, self.suspicions = state["generation"], state["restarts"], state["suspicions"]
        self.asked, self._finished, self.crew.started = state["asked"], set(state["finished"]), state["started"]
        self._gives_back = state["gives_back"]
        self.places.filled_by, self.places.vacant = dict(state["places"]), set(state["vacant"])
        self.places.members, self._anew = tuple(state["members"]), state["anew"]
        self._stayed = set(state["stayed"])
        self.growth.under_way, self.growth.waited = state["growing"], state["waited"]
        self.seating.refused, self._broken.ended = set(state["refused"]), dict(state["broken"])
        self.seating.parts, self.seating.helpers = state["parts"], tuple(state["helpers"])
        self.end = End.from_message(state["end"]) if state["end"] else None

    def joined(
        self, node: int, workers: Iterable[Worker] = (), generation: int = 0, asked: int | None = None
    ) -> list[Order]:
        """Handles a node that has joined.

        Args:
            node: number of the node.
            workers: its live workers, if an earlier controller started some or the node was declared lost.
            generation: newest generation known to the node.
            asked: signal that asked the node to stop; None without one.
        """
        if self.end:
            return [self.end]
        has = list(workers)
        place = self.places.comes(node, next(map(self._place, has), None))
        self._told[node], self.generation = generation, max(self.generation, generation)
        self.crew.forget(node)
        orders: list[Order] = [self._seat(worker) for worker in has if self._missed_its_seat(worker)]
        wanted = {worker.name: worker for worker in has if place is not None and self._place(worker) == place}
        waits = place is not None and place not in self.places.members
        self.crew.guests |= {worker.name: worker for worker in has if worker.guest and waits}
        orders += [Kill(node, worker.name) for worker in has if worker.name not in wanted | self.guests]
        self.crew.workers |= wanted
        if asked is not None and (end := self.stopping(asked)):
            return end
        if self._can_change and self.has_begun and not self.places.complete:
            return orders + self._change_members(Why(Cause.NODE_JOINED, f"node {node} is there"))
        if place not in self.places.members or not self.places.complete:
            return orders
        members = (self.places.filled_by[member] for member in self.places.members)
        news_missed = any(self._told[member] < self.generation for member in members)
        if self.workers and (news_missed or len(self.workers) + len(self._finished) < self.size):
            return orders + self._next_generation(Why(Cause.NODE_JOINED, f"node {node} is there"))
        if not self._all_here():
            self.running = False
            return orders + self._fill()
        if not self.running and any(worker.met < self.generation for worker in self.workers.values()):
            # the controller with their store may have died before or after it ordered them to connect
            return orders + self._next_generation(Why(Cause.STORE_LOST, "the rendezvous store of the workers is gone"))
        self.running = True
        return orders

    def left(self, node: int, gives_up: bool = False) -> list[Order]:
        """Handles a node that is lost with all its workers; it may return."""
        place, spare = self.places.goes(node)
        self._told.pop(node, None)
        self.crew.forget(node)
        self.growth.under_way = self.growth.under_way and (bool(self.guests) or not self.crew.stays)
        if place not in self.places.members or self.end:
            return []
        if not self.has_begun:
            return self._fill() if self.places.complete else []
        first = self.places.members.index(place) * self.per_node
        if self._finished.issuperset(range(first, first + self.per_node)):
            return []
        instead = "" if spare is None else f", and node {spare} takes its place"
        cause, how = (Cause.NODE_GAVE_UP, "has given up its place") if gives_up else (Cause.NODE_LOST, "is lost")
        why = Why(cause, f"node {node} {how}{instead}")
        if self._can_change and (self.growth.under_way or spare is None):
            return self._change_members(why)
        return self._next_generation(why)

    @property
    def can_grow(self) -> bool:
        """Whether more nodes can train than now, and the job is running without a loss or has not begun."""
        if self.end or self.asked is not None or self._finished or not self.places.varies:
            return False
        if self.has_begun and not self.running:
            return False
        return self.growth.more_can_train

    @property
    def welcomes_guests(self) -> bool:
        """Whether workers of this generation got a scale-up notice, and some have yet to drain."""
        return self.growth.welcomed == self.generation

    def grow(self) -> list[Order]:
        """Begins with the connected nodes, or adds new ones.

        * If workers stay, missing joining workers are started.  When these are ready, or a partial-model node is to
          move, the others get a scale-up notice.  Later calls repeat it until they drain.
        * Otherwise workers are asked to save and exit.  If they have not at the next call, they are killed.
        """
        if not self.can_grow:
            return []
        if not self.has_begun:
            self.places.members = self.seating.fits(self.places.filled)
            return self._fill()
        asked_before, self.growth.under_way = self.growth.under_way, True
        if self.growth.guests_are_ready or (self.crew.stays and self.growth.who_moves):
            self.growth.welcomed = self.generation
            return [Welcome(self.generation)]
        if self.crew.stays:
            return self.growth.start_guests(self.generation)
        return (
            self._change_members(Why(Cause.NODES_CAME, "nodes have joined, and workers do not leave"))
            if asked_before
            else [Leave()]
        )

    def ended(
        self, name: str, code: int, why: str = "", gives_back: str | None = None, broken: str = ""
    ) -> list[Order]:
        """Handles the exit of a worker.

        Args:
            name: name of the worker; ignored if it was already ordered to be killed.
            code: its exit code; minus the signal number if a signal killed it.
            why: reason, if its node killed it.
            gives_back: path of the run's memory, if the worker has released it.
            broken: code of the error that ended it, such as device-broken.
        """
        if name in self.guests:
            return self.growth.guest_ended(name, code)
        worker = self.workers.pop(name, None)
        if worker is None or self.end:
            return []
        if code in (0, SAVED):
            self._gives_back = gives_back or self._gives_back
        if code == 0:
            self._finished.add(worker.rank)
            return self._over(0, "", leaving=True) if len(self._finished) == self.size else []
        leaves = code == SAVED or code < 0
        if leaves and self.growth.under_way and not self.crew.stays and self.asked is None and self._can_change:
            return (
                [] if code == SAVED and self.workers else self._change_members(Why(Cause.NODES_CAME, "nodes have come"))
            )
        if code == START_OVER:
            return self._starts_over(worker)
        if code == USAGE and self._may_be_too_many(worker):
            self.seating.refused.add(self.seating.whole)
            refused = f"the program refuses to run on {nodes_counted(self.seating.whole)}"
            return self._change_members(Why(Cause.NODES_REFUSED, refused))
        how = f"worker {worker.rank} {describe_exit(code)}{why and f': it {why}'}"
        if code > 0:
            return self._over(code, how, leaving=code == SAVED, as_asked=code == SAVED)
        if ends := self._ends_with(worker, -code):
            if ends == SAVED:
                return self._over(ends, f"{how}. Fix: {RESUME_REMEDY}", code="state-partly-lost")
            return self._over(ends, how, as_asked=-code == self.asked)
        self.restarts, self.suspicions = self.restarts + 1, 0
        if self.restarts > self.max_restarts:
            return self._over(
                128 - code,
                f"{how}, and {self.max_restarts} were replaced already. Fix: repair what kills workers, or raise "
                "--max-restarts",
                code="restarts-exhausted",
            )
        if broken and self._broken.wears_out(worker):
            return self._give_up(worker, how)
        return self._next_generation(Why(broken or Cause.WORKER_LOST, how))

    def _ends_with(self, worker: Worker, number: int) -> int | None:
        """Returns the job's exit code if a worker killed by a signal is not replaced; otherwise None.

        A job that was asked to stop replaces workers only while others have state to save, and not if a stop signal
        ended the program.
        """
        if self.asked is None:
            return None
        if not self.places.settled or any(other.built for other in self.workers.values()):
            return 128 + number if worker.built and number in STOP_SIGNALS else None
        return SAVED if self.generation > 0 and not worker.built else 128 + number

    def _starts_over(self, worker: Worker) -> list[Order]:
        if self.asked is None:
            return self._next_generation(Why(Cause.WORKER_STARTS_OVER, f"worker {worker.rank} starts over"))
        what = f"no snapshot can restore what was lost, and the job was asked to stop (signal {self.asked})"
        return self._over(SAVED, f"{what}. Fix: {RESUME_REMEDY}", code="state-partly-lost")

    def _give_up(self, worker: Worker, how: str) -> list[Order]:
        """Removes a node from the job; its launcher ends, so it does not return unless it is started again."""
        node, number = worker.node, self._broken.number_of(worker)
        self._broken.is_well(worker)  # a node that is started again counts as repaired
        kills = [Kill(node, other.name) for other in self.workers.values() if other.node == node]
        often = f"as were {MAX_BROKEN - 1} before it with device {number} of node {node}"
        why = UserError(
            f"{how}, {often}: the node gives up its place. Fix: look at the device before you start it again",
            code="device-broken",
        )
        return [*kills, GiveUp(node, with_code(why)), *self.left(node, gives_up=True)]

    def built(self, name: str, stays: bool = False) -> list[Order]:
        """Marks a worker as ready to train; ``stays`` if it can continue with another number of workers."""
        for worker in filter(None, (self.workers.get(name), self.guests.get(name))):
            worker.built, worker.stays = True, stays
        return []

    def here(self, name: str, generation: int, parts: int = 1) -> list[Order]:
        """Handles a worker that waits for the others in a generation; a copy of its model takes ``parts`` nodes."""
        if name not in self.workers or self.end:
            return []
        if parts != self.seating.parts:
            self.seating.parts = parts
            if len(self.places.members) % parts:
                return self._change_members(
                    Why(Cause.PARTS_CHANGED, f"a copy of the model takes {nodes_counted(parts)}")
                )
        worker = self.workers[name]
        worker.here = generation
        if 0 <= worker.met < generation:  # its device has survived the end of a generation
            self._broken.is_well(worker)
        if not self._all_here():
            return []
        self.running = True
        return [Go(self.generation)]  # repeated for a worker that reports again: it missed the order

    def met(self, name: str, generation: int) -> list[Order]:
        """Records that a worker has connected with all others."""
        if name in self.workers:
            self.workers[name].met = generation
        return []

    def parted(self, name: str, generation: int) -> list[Order]:
        """Handles a worker that has drained after an iteration; the last one starts the next generation.

        No iteration is in progress then.  If joining workers were lost meanwhile, the others reconnect without them.
        """
        if name not in self.workers or self.end:
            return []
        self.workers[name].parted = generation
        if len(self.workers) < self.size or any(one.parted < self.generation for one in self.workers.values()):
            return []
        if self.can_grow and (why := self.growth.who_has_come or self.growth.who_moves):
            return self._change_members(why)
        self.growth.under_way = bool(self.guests)  # lost nodes may return immediately
        if self.asked is None:
            return self._next_generation(Why(Cause.GUESTS_LOST, "nodes that were ready are gone again"))
        return self._next_generation(Why(Cause.JOB_STOPS, "the job is to stop, and meets no more"))

    def suspected(self, name: str, generation: int, hangs: str | None = None) -> list[Order]:
        """Handles a worker that cannot continue although no loss is known: its connections failed, or it hangs."""
        if name not in self.workers or generation != self.generation or self.end:
            return []
        what = f"worker {self.workers[name].rank} {hangs or 'has lost connections'}"
        self.suspicions += 1
        if self.suspicions > MAX_SUSPICIONS:
            return self._over(
                1,
                f"{what}, for the {self.suspicions}th time without a lost worker. Fix: look at the network",
                code="connections-unstable",
            )
        return self._next_generation(Why(Cause.WORKER_HANGS if hangs else Cause.CONNECTIONS_LOST, what))

    def calm(self) -> None:
        """Forgets connection failures and broken devices after a long time without failures."""
        self.suspicions = 0
        self._broken.ended.clear()

    def stopping(self, number: int) -> list[Order]:
        """Handles a stop signal: workers save and exit once all are connected, and no more nodes are added."""
        self.asked = number
        why = f"the job was asked to stop (signal {number})"
        return [] if self.has_begun else self._over(128 + number, f"{why}: nothing has begun", as_asked=True)

    def waits_for(self) -> list[int]:
        """Returns the nodes that are lost or have never joined, and that no spare replaces."""
        return [] if self.end else self.places.missing()

    def gives_up(self, why: str) -> list[Order]:
        """Ends the job if nodes are missing."""
        if self.end or not (missing := self.waits_for()):
            return []
        what = f"{nodes(missing)} missing, and {why}"
        if not self.has_begun:
            return self._over(LOST, f"{what}: nothing has begun. Fix: start all nodes", code="nodes-missing")
        return self._over(SAVED, f"{what}. Fix: {RESUME_REMEDY}", code="nodes-missing")

    @property
    def has_begun(self) -> bool:
        """Whether any worker was ever started."""
        return self.crew.started > 0 or bool(self.workers)

    def _place(self, worker: Worker) -> int | None:
        """Returns the rank block of a worker; None if it was started for other members."""
        seated = worker.born >= self._anew and not worker.guest
        return self.places.members[worker.rank // self.per_node] if seated and self.size else None

    @property
    def _can_change(self) -> bool:
        """Whether the job can run on the connected nodes, even if the members change."""
        return self.places.varies and self.places.settled and bool(self.seating.fits(self.places.filled))

    def _may_be_too_many(self, worker: Worker) -> bool:
        """Returns whether the program may refuse this reduced number of nodes, and accept a smaller one."""
        members = self.places.members[: self.seating.whole]
        return len(members) < self.places.count and not worker.built and bool(self.seating.fits(members[:-1]))

    def _change_members(self, why: Why) -> list[Order]:
        """Continues on the connected nodes: workers that stay get other ranks, and all others are restarted."""
        stay, there = self.crew.stays, self.workers | self.guests
        self.seating.seat_anew(stay)
        self._anew, self.growth.under_way = self.generation + 1, False
        self.crew.guests = {name: one for name, one in self.guests.items() if stay and not self._is_member(one)}
        self.crew.workers = {
            name: one
            for name, one in there.items()
            if stay and self.seating.keeps_its_part(one) and (one.built or not one.together)
        }
        self._stayed = set(self.workers)
        orders: list[Order] = [self._seat(one) for one in self.workers.values()]
        orders += [Kill(one.node, name) for name, one in there.items() if name not in self.workers | self.guests]
        self.growth.waited = stay and self.growth.more_can_train
        count, helping = len(self.places.members), len(self.seating.helpers)
        sentence = f"{why.sentence}: training continues on {count} of {self.places.count} nodes"
        sentence += f", {helping} of which {'helps' if helping == 1 else 'help'}" if helping else ""
        return [*orders, *self._next_generation(Why(why.cause, sentence))]

    def _is_member(self, worker: Worker) -> bool:
        return self.places.of(worker.node) in self.places.members

    def _missed_its_seat(self, worker: Worker) -> bool:
        """Returns whether a controller assigned a rank to a worker, and was lost before it could send it."""
        return worker.name in self._stayed and worker.born < self._anew and self._is_member(worker)

    def _seat(self, worker: Worker) -> Seat:
        """Assigns a rank among the members to a worker that stays."""
        place = self.places.of(worker.node)
        assert place is not None  # its node is a member
        worker.rank = self.places.members.index(place) * self.per_node + worker.rank % self.per_node
        worker.born, worker.guest = self._anew, False
        worker.size, worker.helpers = self.size, self.seating.helpers
        return Seat(worker.node, worker.name, worker.rank, self._anew, self.size, self.seating.helpers)

    def _all_here(self) -> bool:
        return len(self.workers) == self.size and all(w.here == self.generation for w in self.workers.values())

    def _next_generation(self, why: Why) -> list[Order]:
        self.generation, self.running = self.generation + 1, False
        self._finished.clear()
        self._gives_back = None  # survivors resume, and need it
        self._told = dict.fromkeys(self._told, self.generation)
        return [Abort(self.generation, why.cause, why.sentence), *self._fill()]

    def _fill(self) -> list[Order]:
        """Starts missing workers, and kills those that can no longer initialize in step with the others."""
        orders: list[Order] = []
        anybody = any(worker.built for worker in self.workers.values())
        if self.seating.helpers and not anybody:  # all initialize together, which only complete copies can
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
        name, born, helpers = self.crew.new_name(self.generation), self.generation, self.seating.helpers
        self.workers[name] = Worker(name, node, rank, together, born=born, size=self.size, helpers=helpers)
        place = self.places.members[rank // self.per_node]
        return StartWorker(node, name, rank, born, together, place, self.size, helpers=helpers)

    def _over(
        self, exit_code: int, reason: str, leaving: bool = False, as_asked: bool = False, code: str | None = None
    ) -> list[Order]:
        """Ends the job; ``code`` is an error code, None without an error or if a worker has printed its own."""
        asked, gives_back = self.asked if as_asked else None, self._gives_back if exit_code in (0, SAVED) else None
        reason = reason if code is None else with_code(UserError(reason, code=code))
        self.end = End(exit_code, reason, leaving, gives_back, asked)
        return [self.end]


def nodes_counted(count: int) -> str:
    """Returns a number of nodes, such as ``1 node``."""
    return f"{count} node{'' if count == 1 else 's'}"


def nodes(numbers: list[int]) -> str:
    """Returns node numbers with a verb, such as ``node 1 is``."""
    return f"node {numbers[0]} is" if len(numbers) == 1 else f"nodes {', '.join(map(str, numbers))} are"
