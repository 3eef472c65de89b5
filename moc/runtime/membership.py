"""The membership of a job: a state machine that turns events into orders, without sockets, clocks or processes.

A *generation* is a numbered membership.  A lost worker starts the next one:

* Survivors are ordered to *abort* their work, and replacements of the lost workers are started.
* When all workers have reported that they are ready, all are ordered to connect.
* A loss meanwhile starts another generation; nothing waits for a worker of an earlier one.

Workers belong to rank blocks, and the node of a block may change: see :mod:`moc.runtime.seating`.

A job on MIN to MAX nodes continues on the remaining nodes if no spare replaces a lost one.  The program decides how:

* A program whose workers survive a resize continues in the same processes, with other ranks.  Workers of new nodes
  (*joining workers*) initialize meanwhile.  When they are ready, the others get a scale-up notice, and drain after the
  same iteration.  Then the joining workers get ranks.
* A node that is to leave is announced by the same notice.  Its workers move their state to the others before they
  drain.  Then it has no rank, and is released when the others have connected.
* If a copy of the model takes several nodes, each node has a part of it.  Complete copies train, and other nodes with a
  part are partial-model nodes (:mod:`moc.runtime.seating`).  A worker keeps its part while it lives.
* All workers of any other program are restarted, since their number changes.  Before new nodes are added, they are
  asked to save and exit.

    begin --> gathering --all ready--> running --a worker is lost--> gathering (next generation) --> ...
                                          `----all exited with 0, or one with another code--> ended
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from moc.errors import UserError, with_code
from moc.runtime.loss_record import LossRecord
from moc.runtime.orders import (
    Abort,
    AssignRank,
    Cause,
    ChangeNotice,
    Connect,
    End,
    GenerationReason,
    Kill,
    Order,
    ReleaseNode,
    RemoveNode,
    SaveAndExit,
    StartWorker,
    StopNode,
    WorkerRecord,
)
from moc.runtime.seating import LiveWorkers, RankAssignment, RankBlocks, ScaleUp
from moc.runtime.standstill import MAX_STANDSTILL, Standstill
from moc.runtime.termination import LOST, RESUME_REMEDY, SAVED, START_OVER, STOP_SIGNALS, USAGE, describe_exit

MAX_DEVICE_FAILURES = 3
"""Consecutive workers that a device may end before its node gives up its rank block."""


@dataclass
class BrokenDevices:
    """Devices that have recently ended workers.

    Attributes:
        workers_per_node: devices per node, with one worker each.
        failures: by device, the number of consecutive workers that it has ended.
    """

    workers_per_node: int
    failures: dict[str, int] = field(default_factory=dict)

    def count_failure(self, worker: WorkerRecord) -> bool:
        """Counts a worker that its device has ended; returns whether the device has reached the limit."""
        device = self._device_of(worker)
        self.failures[device] = self.failures.get(device, 0) + 1
        return self.failures[device] >= MAX_DEVICE_FAILURES

    def reset(self, worker: WorkerRecord) -> None:
        """Resets the count of a worker's device, because it works or the node gives up its rank block."""
        self.failures.pop(self._device_of(worker), None)

    def device_index(self, worker: WorkerRecord) -> int:
        """Returns the number of a worker's device on its node."""
        return worker.rank % self.workers_per_node

    def _device_of(self, worker: WorkerRecord) -> str:
        return f"{worker.node}.{self.device_index(worker)}"


MAX_FAILURES_WITHOUT_LOSS = 10
"""Maximum number of consecutive generations that begin without a loss; one more ends the job."""


@dataclass
class Membership:
    """The state machine: methods that take an event return the resulting orders.

    Attributes:
        max_workers: number of workers when all rank blocks are filled.
        workers_per_node: workers per node.
        max_restarts: workers lost by signals that are replaced before the job gives up.
        min_nodes: minimum number of nodes; 0 to wait for all.
        max_standstill: generations in a row that may lose a worker at one iteration before the job gives up.
        generation: number of the current generation.
        running: all workers of the generation have reported, and were ordered to go.
        restarts: workers lost by signals until now.
        failures_without_loss: consecutive generations that began without a loss.
        end: end of the job; None while it runs.
        stop_signal: signal that requested a stop; None without one.
        live: live workers.
        blocks: assignment of nodes to rank blocks.
        assignment: nodes that train, and their parts of the model.
        scale_up: progress of adding nodes.
        departing: members that asked to leave, and are to move their state to the others first.
        departed: nodes whose state the others have, to be released when these have connected.
    """

    max_workers: int
    workers_per_node: int
    max_restarts: int
    min_nodes: int = 0
    max_standstill: int = MAX_STANDSTILL
    generation: int = 0
    running: bool = False
    restarts: int = 0
    failures_without_loss: int = 0
    end: End | None = None
    stop_signal: int | None = None
    live: LiveWorkers = field(default_factory=LiveWorkers)
    departing: set[int] = field(default_factory=set)
    departed: set[int] = field(default_factory=set)
    _finished: set[int] = field(default_factory=set)
    _released_memory: str | None = None
    _known_generation: dict[int, int] = field(default_factory=dict)  # newest generation known to each present node
    _resize_generation: int = 0  # generation of the last change of members
    _continued: set[str] = field(default_factory=set)  # workers that kept running at the last change of members
    _announced: tuple[int, tuple[int, ...]] = (-1, ())  # generation and rank blocks of the last notice of departures

    def __post_init__(self):
        self.blocks = RankBlocks(self.max_workers // self.workers_per_node, self.min_nodes)
        self.assignment = RankAssignment(self.blocks, self.workers_per_node, self.live)
        self.scale_up = ScaleUp(self.assignment)
        self._broken_devices = BrokenDevices(self.workers_per_node)
        self._standstill = Standstill()
        self._losses = LossRecord()

    @property
    def workers(self) -> dict[str, WorkerRecord]:
        """Workers that have a rank among the members, by name."""
        return self.live.workers

    @property
    def joining(self) -> dict[str, WorkerRecord]:
        """Joining workers, which initialize on new nodes, by name."""
        return self.live.joining

    @property
    def size(self) -> int:
        """Workers of this generation."""
        return len(self.blocks.members) * self.workers_per_node

    def state_dict(self) -> dict:
        """Returns the state that a restarted controller cannot learn from the nodes; JSON-serializable."""
        return {
            "generation": self.generation,
            "restarts": self.restarts,
            "suspicions": self.failures_without_loss,
            "asked": self.stop_signal,
            "finished": sorted(self._finished),
            "gives_back": self._released_memory,
            "started": self.live.started_count,
            "places": sorted(self.blocks.node_of_block.items()),
            "vacant": sorted(self.blocks.vacant),
            "members": list(self.blocks.members),
            "anew": self._resize_generation,
            "growing": self.scale_up.in_progress,
            "refused": sorted(self.assignment.refused_sizes),
            "broken": dict(self._broken_devices.failures),
            "standstill": [self._standstill.iteration, list(self._standstill.devices)],
            "losses": [self._losses.writer, list(self._losses.losses)],
            "stayed": sorted(self._continued),
            "parts": self.assignment.nodes_per_model,
            "helpers": list(self.assignment.partial_model_parts),
            "waited": self.scale_up.candidates_waited,
            "end": self.end.to_message() if self.end else None,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restores an earlier controller's state; its nodes have yet to join."""
        self.generation, self.restarts, self.failures_without_loss = (
            state["generation"],
            state["restarts"],
            state["suspicions"],
        )
        self.stop_signal, self._finished, self.live.started_count = (
            state["asked"],
            set(state["finished"]),
            state["started"],
        )
        self._released_memory = state["gives_back"]
        self.blocks.node_of_block, self.blocks.vacant = dict(state["places"]), set(state["vacant"])
        self.blocks.members, self._resize_generation = tuple(state["members"]), state["anew"]
        self._continued = set(state["stayed"])
        self.scale_up.in_progress, self.scale_up.candidates_waited = state["growing"], state["waited"]
        self.assignment.refused_sizes, self._broken_devices.failures = set(state["refused"]), dict(state["broken"])
        iteration, devices = state["standstill"]
        self._standstill = Standstill(iteration, tuple((node, device) for node, device in devices))
        writer, losses = state["losses"]
        self._losses = LossRecord(tuple(losses), writer)
        self.assignment.nodes_per_model, self.assignment.partial_model_parts = state["parts"], tuple(state["helpers"])
        self.end = End.from_message(state["end"]) if state["end"] else None

    def node_joined(
        self, node: int, workers: Iterable[WorkerRecord] = (), generation: int = 0, stop_signal: int | None = None
    ) -> list[Order]:
        """Handles a node that has joined.

        Args:
            node: number of the node.
            workers: its live workers, if an earlier controller started some or the node was declared lost.
            generation: newest generation known to the node.
            stop_signal: signal that asked the node to stop; None without one.
        """
        if self.end:
            return [self.end]
        present = list(workers)
        block = self.blocks.add_node(node, next(map(self._block_of, present), None))
        self._known_generation[node], self.generation = generation, max(self.generation, generation)
        self.live.remove_node(node)
        orders: list[Order] = [self._assign_rank(worker) for worker in present if self._missed_assignment(worker)]
        retained = {worker.name: worker for worker in present if block is not None and self._block_of(worker) == block}
        is_waiting = block is not None and block not in self.blocks.members
        self.live.joining |= {worker.name: worker for worker in present if worker.is_joining and is_waiting}
        orders += [Kill(node, worker.name) for worker in present if worker.name not in retained | self.joining]
        self.live.workers |= retained
        if stop_signal is not None and (end := self.stop_requested(stop_signal)):
            return end
        if self._can_resize and self.has_begun and not self.blocks.is_complete:
            return orders + self._resize(GenerationReason(Cause.NODE_JOINED, f"node {node} is there"))
        if block not in self.blocks.members or not self.blocks.is_complete:
            return orders
        members = (self.blocks.node_of_block[member] for member in self.blocks.members)
        missed_generation = any(self._known_generation[member] < self.generation for member in members)
        if self.workers and (missed_generation or len(self.workers) + len(self._finished) < self.size):
            return orders + self._next_generation(GenerationReason(Cause.NODE_JOINED, f"node {node} is there"))
        if not self._all_reported():
            self.running = False
            return orders + self._start_missing_workers()
        if not self.running and any(worker.connected_generation < self.generation for worker in self.workers.values()):
            # the controller with their store may have died before or after it ordered them to connect
            return orders + self._next_generation(
                GenerationReason(Cause.STORE_LOST, "the rendezvous store of the workers is gone")
            )
        self.running = True
        return orders

    def node_lost(self, node: int, is_removed: bool = False) -> list[Order]:
        """Handles a node that is lost with all its workers; it may return."""
        block, spare = self.blocks.remove_node(node)
        self._forget_node(node)
        has_failed_to_depart = node in self.departing
        self.departing.discard(node)
        self.scale_up.in_progress = self.scale_up.in_progress and (bool(self.joining) or not self.live.survive_resize)
        if block not in self.blocks.members or self.end:
            return []
        if not self.has_begun:
            return self._start_missing_workers() if self.blocks.is_complete else []
        first_rank = self.blocks.members.index(block) * self.workers_per_node
        if self._finished.issuperset(range(first_rank, first_rank + self.workers_per_node)):
            return []
        replacement = "" if spare is None else f", and node {spare} takes its place"
        cause, event = (Cause.NODE_GAVE_UP, "has given up its place") if is_removed else (Cause.NODE_LOST, "is lost")
        event += " before it has moved its state, as it was to do" if has_failed_to_depart else ""
        reason = GenerationReason(cause, f"node {node} {event}{replacement}", {"node": node})
        if self._can_resize and (self.scale_up.in_progress or spare is None):
            return self._resize(reason)
        return self._next_generation(reason)

    @property
    def can_grow(self) -> bool:
        """Whether more nodes can train than now, and the job is running without a loss or has not begun."""
        if self.end or self.stop_signal is not None or self._finished or not self.blocks.is_elastic:
            return False
        if self.has_begun and not self.running:
            return False
        return self.scale_up.more_can_train

    @property
    def has_scale_up_notice(self) -> bool:
        """Whether workers of this generation got a scale-up notice, and some have yet to drain."""
        return self.scale_up.announced_generation == self.generation

    def grow(self) -> list[Order]:
        """Begins with the connected nodes, or adds new ones.

        * If workers stay, missing joining workers are started.  When these are ready, or a partial-model node is to
          move, the others get a scale-up notice.  Later calls repeat it until they drain.
        * Otherwise workers are asked to save and exit.  If they have not at the next call, they are killed.
        """
        if not self.can_grow:
            return []
        if not self.has_begun:
            self.blocks.members = self.assignment.largest_assignment(self.blocks.filled_blocks)
            return self._start_missing_workers()
        repeated, self.scale_up.in_progress = self.scale_up.in_progress, True
        if self.scale_up.joining_workers_are_ready or (self.live.survive_resize and self.scale_up.move_reason):
            self.scale_up.announced_generation = self.generation
            return [ChangeNotice(self.generation)]
        if self.live.survive_resize:
            return self.scale_up.start_joining_workers(self.generation)
        return (
            self._resize(GenerationReason(Cause.NODES_ARRIVED, "nodes have joined, and workers do not leave"))
            if repeated
            else [SaveAndExit()]
        )

    def departure_requested(self, node: int) -> list[Order]:
        """Handles a node that is to leave while the others continue.

        A node without a rank has no state, and is released.  Members depart after :meth:`announce_departures`.  If the
        others cannot continue without all departing nodes, these stop the job instead.
        """
        if self.end:
            return []
        if self.has_begun and self.blocks.block_of(node) not in self.blocks.members:
            self.blocks.remove_node(node)
            self._forget_node(node)
            return [ReleaseNode(node)]
        self.departing.add(node)
        return [] if self._can_continue_without(self.departing) else self.stop_departing()

    @property
    def has_departures_to_announce(self) -> bool:
        """Whether departing nodes have not been announced to the workers of this generation."""
        notice = self.generation, self._departing_blocks
        return bool(self.running and self.departing) and not self.end and self._announced != notice

    def announce_departures(self) -> list[Order]:
        """Announces the departing nodes to all workers, or stops the job if the others cannot continue any more."""
        if not self._can_continue_without(self.departing):
            return self.stop_departing()
        self._announced = self.generation, self._departing_blocks
        return [ChangeNotice(*self._announced)]

    @property
    def _departing_blocks(self) -> tuple[int, ...]:
        blocks = (self.blocks.block_of(node) for node in self.departing)
        return tuple(sorted(block for block in blocks if block is not None))

    def _can_continue_without(self, nodes: set[int]) -> bool:
        """Returns whether enough members remain without initialization, and the job is not about to end."""
        remaining = [block for block in self.assignment.ready_blocks if self.blocks.node_in(block) not in nodes]
        is_ending = self.stop_signal is not None or bool(self._finished)
        if is_ending or not (self.blocks.is_elastic and self.live.survive_resize and self.blocks.is_known):
            return False
        return len(remaining) >= self.blocks.min_members and bool(self.assignment.ready_assignment(remaining))

    def stop_departing(self) -> list[Order]:
        """Has the departing nodes stop the job instead, as any other stop signal does."""
        orders: list[Order] = [StopNode(node) for node in sorted(self.departing)]
        self.departing.clear()
        return orders

    def worker_exited(
        self,
        name: str,
        code: int,
        reason: str = "",
        released_memory: str | None = None,
        error_code: str = "",
        iteration: int | None = None,
    ) -> list[Order]:
        """Handles the exit of a worker.

        Args:
            name: name of the worker; ignored if it was already ordered to be killed.
            code: its exit code; minus the signal number if a signal killed it.
            reason: reason, if its node killed it.
            released_memory: path of the run's memory, if the worker has released it.
            error_code: code of the error that ended it, such as device-broken.
            iteration: newest iteration that it has reported, if any.
        """
        if name in self.joining:
            return self.scale_up.joining_worker_exited(name, code)
        worker = self.workers.pop(name, None)
        if worker is None or self.end:
            return []
        if code in (0, SAVED):
            self._released_memory = released_memory or self._released_memory
        if code == 0:
            self._finished.add(worker.rank)
            return self._end_job(0, "", workers_exiting=True) if len(self._finished) == self.size else []
        is_leaving = code == SAVED or code < 0
        if (
            is_leaving
            and self.scale_up.in_progress
            and not self.live.survive_resize
            and self.stop_signal is None
            and self._can_resize
        ):
            return (
                []
                if code == SAVED and self.workers
                else self._resize(GenerationReason(Cause.NODES_ARRIVED, "nodes have joined"))
            )
        if code == START_OVER:
            return self._replace_on_request(worker)
        if code == USAGE and self._may_accept_fewer_nodes(worker):
            self.assignment.refused_sizes.add(self.assignment.nodes_in_copies)
            refused = f"the program refuses to run on {count_nodes(self.assignment.nodes_in_copies)}"
            return self._resize(GenerationReason(Cause.NODES_REFUSED, refused))
        event = f"worker {worker.rank} {describe_exit(code)}{reason and f': it {reason}'}"
        lost = {"rank": worker.rank, "node": worker.node, **({"signal": -code} if code < 0 else {})}
        loss = GenerationReason(error_code or Cause.WORKER_LOST, event, lost)
        if code > 0:
            failure = None if is_leaving else loss
            return self._end_job(code, event, workers_exiting=is_leaving, as_requested=is_leaving, loss=failure)
        if exit_code := self._exit_code_after(worker, -code):
            if exit_code == SAVED:
                return self._end_job(exit_code, f"{event}. Fix: {RESUME_REMEDY}", code="state-partly-lost", loss=loss)
            return self._end_job(exit_code, event, as_requested=-code == self.stop_signal, loss=loss)
        return self._worker_killed(worker, loss, is_device_broken=bool(error_code), iteration=iteration)

    def _worker_killed(
        self, worker: WorkerRecord, loss: GenerationReason, is_device_broken: bool, iteration: int | None
    ) -> list[Order]:
        """Replaces a worker, removes its node, or ends the job at one of the limits of failures.

        Args:
            worker: the worker.
            loss: its loss; ``lost`` has the signal that killed it.
            is_device_broken: its device has ended it.
            iteration: as in :meth:`worker_exited`.
        """
        self.restarts, self.failures_without_loss = self.restarts + 1, 0
        event, exit_code = loss.reason, 128 + loss.lost["signal"]
        if self.restarts > self.max_restarts:
            return self._end_job(
                exit_code,
                f"{event}, and {self.max_restarts} were replaced already. Fix: repair what kills workers, or raise "
                "--max-restarts",
                code="restarts-exhausted",
                loss=loss,
            )
        if is_device_broken and self._broken_devices.count_failure(worker):
            return self._remove_node(worker, event)
        if self._count_loss(worker, iteration):
            return self._end_job(
                exit_code,
                f"{event}, and {len(self._standstill.devices) - 1} generations before lost a worker "
                f"{self._standstill.phase}, too{self._standstill.shared_device}. Fix: correct what kills workers, or "
                "raise --max-standstill",
                code="progress-missing",
                loss=loss,
            )
        lost = {**loss.lost, **self._standstill.to_message()}
        return self._next_generation(GenerationReason(loss.cause, event, lost))

    def _count_loss(self, worker: WorkerRecord, iteration: int | None) -> bool:
        """Counts a loss, at most one for each generation; returns whether too many had no progress between them."""
        if self.running or worker.rank_generation == self.generation:
            device = self._broken_devices.device_index(worker)
            self._standstill = self._standstill.after_loss(worker.node, device, iteration)
        return len(self._standstill.devices) > self.max_standstill

    def _exit_code_after(self, worker: WorkerRecord, number: int) -> int | None:
        """Returns the job's exit code if a worker killed by a signal is not replaced; otherwise None.

        A job that was asked to stop replaces workers only while others have state to save, and not if a stop signal
        ended the program.
        """
        if self.stop_signal is None:
            return None
        if not self.blocks.is_known or any(survivor.is_ready for survivor in self.workers.values()):
            return 128 + number if worker.is_ready and number in STOP_SIGNALS else None
        return SAVED if self.generation > 0 and not worker.is_ready else 128 + number

    def _replace_on_request(self, worker: WorkerRecord) -> list[Order]:
        if self.stop_signal is None:
            return self._next_generation(
                GenerationReason(
                    Cause.WORKER_STARTS_OVER,
                    f"worker {worker.rank} starts over",
                    {"rank": worker.rank, "node": worker.node},
                )
            )
        event = f"no snapshot can restore what was lost, and the job was asked to stop (signal {self.stop_signal})"
        return self._end_job(SAVED, f"{event}. Fix: {RESUME_REMEDY}", code="state-partly-lost")

    def _remove_node(self, worker: WorkerRecord, event: str) -> list[Order]:
        """Removes a node from the job; its launcher ends, so it does not return unless it is started again."""
        node, device = worker.node, self._broken_devices.device_index(worker)
        self._broken_devices.reset(worker)  # a node that is started again counts as repaired
        kills = [Kill(node, node_worker.name) for node_worker in self.workers.values() if node_worker.node == node]
        repeated = f"as were {MAX_DEVICE_FAILURES - 1} before it with device {device} of node {node}"
        error = UserError(
            f"{event}, {repeated}: the node gives up its place. Fix: look at the device before you start it again",
            code="device-broken",
        )
        return [*kills, RemoveNode(node, with_code(error)), *self.node_lost(node, is_removed=True)]

    def worker_ready(self, name: str, survives_resize: bool = False) -> list[Order]:
        """Marks a worker as ready to train; ``survives_resize`` if it can continue with another number of workers."""
        for worker in filter(None, (self.workers.get(name), self.joining.get(name))):
            worker.is_ready, worker.survives_resize = True, survives_resize
        return []

    def worker_reported(
        self, name: str, generation: int, nodes_per_model: int = 1, iteration: int | None = None
    ) -> list[Order]:
        """Handles a worker that waits for the others in a generation.

        Args:
            name: name of the worker.
            generation: the generation.
            nodes_per_model: nodes that a copy of its model takes.
            iteration: iteration that it has completed, or resumed from; None if none.
        """
        if name not in self.workers or self.end:
            return []
        self._standstill = self._standstill.after_report(iteration)
        if nodes_per_model != self.assignment.nodes_per_model:
            self.assignment.nodes_per_model = nodes_per_model
            if len(self.blocks.members) % nodes_per_model:
                return self._resize(
                    GenerationReason(Cause.PARTS_CHANGED, f"a copy of the model takes {count_nodes(nodes_per_model)}")
                )
        worker = self.workers[name]
        worker.reported_generation = generation
        if 0 <= worker.connected_generation < generation:  # its device has survived the end of a generation
            self._broken_devices.reset(worker)
        if not self._all_reported():
            return []
        self.running = True
        return [Connect(self.generation)]  # repeated for a worker that reports again: it missed the order

    def worker_connected(self, name: str, generation: int) -> list[Order]:
        """Records that a worker has connected with all others."""
        if name in self.workers:
            self.workers[name].connected_generation = generation
        if name in self.workers and generation == self.generation:
            self._losses = self._losses.after_connection(self.workers[name])
        if not self.departed or any(worker.connected_generation < self.generation for worker in self.workers.values()):
            return []
        orders: list[Order] = [ReleaseNode(node) for node in sorted(self.departed)]
        self.departed.clear()
        return orders

    def worker_drained(self, name: str, generation: int, has_handed_over: bool = False) -> list[Order]:
        """Handles a worker that has drained after an iteration; the last one starts the next generation.

        No iteration is in progress then.  If joining workers were lost meanwhile, the others reconnect without them.

        Args:
            name: name of the worker.
            generation: generation that it has left.
            has_handed_over: its node departs, and the others have its state.
        """
        if name not in self.workers or self.end:
            return []
        self.workers[name].drained_generation, self.workers[name].has_handed_over = generation, has_handed_over
        if len(self.workers) < self.size or any(
            worker.drained_generation < self.generation for worker in self.workers.values()
        ):
            return []
        if departed := {worker.node for worker in self.workers.values() if worker.has_handed_over}:
            return self._remove_departed(departed)
        if self.can_grow and (reason := self.scale_up.arrival_reason or self.scale_up.move_reason):
            return self._resize(reason)
        self.scale_up.in_progress = bool(self.joining)  # lost nodes may return immediately
        if self.stop_signal is None:
            return self._next_generation(
                GenerationReason(Cause.JOINING_NODES_LOST, "nodes that were ready are gone again")
            )
        return self._next_generation(GenerationReason(Cause.JOB_STOPS, "the job is to stop, and meets no more"))

    def _remove_departed(self, nodes: set[int]) -> list[Order]:
        """Continues without nodes whose state the others have."""
        kills: list[Order] = [Kill(worker.node, name) for name, worker in self.workers.items() if worker.node in nodes]
        for node in nodes:
            self.blocks.remove_node(node, replace=False)
            self._forget_node(node)
        self.departing -= nodes
        self.departed |= nodes
        names = sorted(nodes)
        event = f"node {names[0]} has" if len(names) == 1 else f"nodes {', '.join(map(str, names))} have"
        orders = kills + self._resize(GenerationReason(Cause.NODE_DEPARTED, f"{event} left as requested"))
        self.blocks.fill_vacant_blocks()
        return orders

    def _forget_node(self, node: int) -> None:
        self._known_generation.pop(node, None)
        self.live.remove_node(node)

    def worker_blocked(self, name: str, generation: int, hang: str | None = None) -> list[Order]:
        """Handles a worker that cannot continue although no loss is known: its connections failed, or it hangs."""
        if name not in self.workers or generation != self.generation or self.end:
            return []
        worker = self.workers[name]
        event = f"worker {worker.rank} {hang or 'has lost connections'}"
        self.failures_without_loss += 1
        if self.failures_without_loss > MAX_FAILURES_WITHOUT_LOSS:
            return self._end_job(
                1,
                f"{event}, for the {self.failures_without_loss}th time without a lost worker. Fix: look at the network",
                code="connections-unstable",
            )
        cause, lost = Cause.WORKER_HANGS if hang else Cause.CONNECTIONS_LOST, {"rank": worker.rank, "node": worker.node}
        return self._next_generation(GenerationReason(cause, event, lost))

    def forget_failures(self) -> None:
        """Forgets connection failures and broken devices after a long time without failures."""
        self.failures_without_loss = 0
        self._broken_devices.failures.clear()

    def stop_requested(self, signal_number: int) -> list[Order]:
        """Handles a stop signal: workers save and exit once all are connected, and no more nodes are added."""
        self.stop_signal = signal_number
        reason = f"the job was asked to stop (signal {signal_number})"
        return (
            []
            if self.has_begun
            else self._end_job(128 + signal_number, f"{reason}: nothing has begun", as_requested=True)
        )

    def missing_nodes(self) -> list[int]:
        """Returns the nodes that are lost or have never joined, and that no spare replaces."""
        return [] if self.end else self.blocks.missing_nodes()

    def end_if_nodes_missing(self, cause: str) -> list[Order]:
        """Ends the job if nodes are missing."""
        if self.end or not (missing := self.missing_nodes()):
            return []
        event = f"{nodes_are(missing)} missing, and {cause}"
        if not self.has_begun:
            return self._end_job(LOST, f"{event}: nothing has begun. Fix: start all nodes", code="nodes-missing")
        return self._end_job(SAVED, f"{event}. Fix: {RESUME_REMEDY}", code="nodes-missing")

    @property
    def has_begun(self) -> bool:
        """Whether any worker was ever started."""
        return self.live.started_count > 0 or bool(self.workers)

    def _block_of(self, worker: WorkerRecord) -> int | None:
        """Returns the rank block of a worker; None if it was started for other members."""
        is_assigned = worker.rank_generation >= self._resize_generation and not worker.is_joining
        return self.blocks.members[worker.rank // self.workers_per_node] if is_assigned and self.size else None

    @property
    def _can_resize(self) -> bool:
        """Whether the job can run on the connected nodes, even if the members change."""
        return (
            self.blocks.is_elastic
            and self.blocks.is_known
            and bool(self.assignment.largest_assignment(self.blocks.filled_blocks))
        )

    def _may_accept_fewer_nodes(self, worker: WorkerRecord) -> bool:
        """Returns whether the program may refuse this reduced number of nodes, and accept a smaller one."""
        members = self.blocks.members[: self.assignment.nodes_in_copies]
        return (
            len(members) < self.blocks.count
            and not worker.is_ready
            and bool(self.assignment.largest_assignment(members[:-1]))
        )

    def _resize(self, reason: GenerationReason) -> list[Order]:
        """Continues on the connected nodes: workers that stay get other ranks, and all others are restarted."""
        keeps_workers, workers = self.live.survive_resize, self.workers | self.joining
        self.assignment.reassign(keeps_workers)
        self._resize_generation, self.scale_up.in_progress = self.generation + 1, False
        self.live.joining = {
            name: worker for name, worker in self.joining.items() if keeps_workers and not self._is_member(worker)
        }
        self.live.workers = {
            name: worker
            for name, worker in workers.items()
            if keeps_workers
            and self.assignment.keeps_model_part(worker)
            and (worker.is_ready or not worker.starts_together)
        }
        self._continued = set(self.workers)
        orders: list[Order] = [self._assign_rank(worker) for worker in self.workers.values()]
        orders += [
            Kill(worker.node, name) for name, worker in workers.items() if name not in self.workers | self.joining
        ]
        self.scale_up.candidates_waited = keeps_workers and self.scale_up.more_can_train
        count, partial = len(self.blocks.members), len(self.assignment.partial_model_parts)
        sentence = f"{reason.reason}: training continues on {count} of {self.blocks.count} nodes"
        sentence += f", {partial} of them with a partial model" if partial else ""
        return [*orders, *self._next_generation(GenerationReason(reason.cause, sentence, reason.lost))]

    def _is_member(self, worker: WorkerRecord) -> bool:
        return self.blocks.block_of(worker.node) in self.blocks.members

    def _missed_assignment(self, worker: WorkerRecord) -> bool:
        """Returns whether a controller assigned a rank to a worker, and was lost before it could send it."""
        return (
            worker.name in self._continued
            and worker.rank_generation < self._resize_generation
            and self._is_member(worker)
        )

    def _assign_rank(self, worker: WorkerRecord) -> AssignRank:
        """Assigns a rank among the members to a worker that stays."""
        block = self.blocks.block_of(worker.node)
        assert block is not None  # its node is a member
        worker.rank = self.blocks.members.index(block) * self.workers_per_node + worker.rank % self.workers_per_node
        worker.rank_generation, worker.is_joining = self._resize_generation, False
        worker.size, worker.partial_model_parts = self.size, self.assignment.partial_model_parts
        return AssignRank(
            worker.node,
            worker.name,
            worker.rank,
            self._resize_generation,
            self.size,
            self.assignment.partial_model_parts,
        )

    def _all_reported(self) -> bool:
        return len(self.workers) == self.size and all(
            worker.reported_generation == self.generation for worker in self.workers.values()
        )

    def _next_generation(self, reason: GenerationReason) -> list[Order]:
        self.generation, self.running = self.generation + 1, False
        earlier = self._losses.before_generation(self.workers)
        self._losses = earlier.after_loss(self.generation, reason)
        self._finished.clear()
        self._released_memory = None  # survivors resume, and need it
        self._known_generation = dict.fromkeys(self._known_generation, self.generation)
        lost = {**reason.lost, **earlier.to_message()}
        return [Abort(self.generation, reason.cause, reason.reason, lost), *self._start_missing_workers()]

    def _start_missing_workers(self) -> list[Order]:
        """Starts missing workers, and kills workers that can no longer initialize in step with the others."""
        orders: list[Order] = []
        some_ready = any(worker.is_ready for worker in self.workers.values())
        if (
            self.assignment.partial_model_parts and not some_ready
        ):  # all initialize together, which only complete copies can
            self.assignment.remove_partial_model_nodes()
            self._resize_generation = self.generation
        for worker in list(self.workers.values()):
            if (
                not worker.is_ready
                and (worker.starts_together or not some_ready)
                and worker.reported_generation != self.generation
            ):
                orders.append(Kill(worker.node, worker.name))
                del self.workers[worker.name]
        occupied = {worker.rank for worker in self.workers.values()} | self._finished
        for rank in sorted(set(range(self.size)) - occupied):
            node = self.blocks.node_in(self.blocks.members[rank // self.workers_per_node])
            if node is not None:
                orders.append(self._start_worker(node, rank, together=not some_ready))
        return orders

    def _start_worker(self, node: int, rank: int, together: bool) -> StartWorker:
        name, generation, helpers = (
            self.live.new_name(self.generation),
            self.generation,
            self.assignment.partial_model_parts,
        )
        self.workers[name] = WorkerRecord(
            name, node, rank, together, rank_generation=generation, size=self.size, partial_model_parts=helpers
        )
        block = self.blocks.members[rank // self.workers_per_node]
        return StartWorker(node, name, rank, generation, together, block, self.size, partial_model_parts=helpers)

    def _end_job(
        self,
        exit_code: int,
        reason: str,
        workers_exiting: bool = False,
        as_requested: bool = False,
        code: str | None = None,
        loss: GenerationReason | None = None,
    ) -> list[Order]:
        """Ends the job; ``code`` is an error code, None without an error or if a worker has printed its own."""
        stop_signal, released_memory = (
            self.stop_signal if as_requested else None,
            self._released_memory if exit_code in (0, SAVED) else None,
        )
        reason = reason if code is None else with_code(UserError(reason, code=code))
        losses = self._losses.before_generation(self.workers)
        losses = losses.after_loss(self.generation, loss) if loss else losses
        self.end = End(exit_code, reason, workers_exiting, released_memory, stop_signal, losses.losses)
        return [self.end]


def count_nodes(count: int) -> str:
    """Returns a number of nodes, such as ``1 node``."""
    return f"{count} node{'' if count == 1 else 's'}"


def nodes_are(numbers: list[int]) -> str:
    """Returns node numbers with a verb, such as ``node 1 is``."""
    return f"node {numbers[0]} is" if len(numbers) == 1 else f"nodes {', '.join(map(str, numbers))} are"
