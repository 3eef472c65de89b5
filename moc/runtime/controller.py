"""Runs the controller, which tracks live nodes and workers and sends the membership's orders to agents.

Agents can restore its complete state.  So it may die during training and be restarted on this or another node.  The
candidate that a majority follows is the leader (:mod:`moc.runtime.election`).  The controller also serves the process
groups' rendezvous store, so that the rendezvous depends on no worker.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import logging
import math
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from moc.cli_output import Parser, escapes_output, log_to_stderr, refused
from moc.errors import UserError, with_code
from moc.runtime import async_connections
from moc.runtime.child_processes import attach_to_parent, report_descriptor
from moc.runtime.election import MIN_JOIN_TIMEOUT_S, Election, SilenceLimits, Voters
from moc.runtime.flags import parse_node_range
from moc.runtime.membership import Membership, nodes_are
from moc.runtime.orders import (
    Abort,
    AssignRank,
    ChangeNotice,
    Connect,
    End,
    Kill,
    Order,
    ReleaseNode,
    RemoveNode,
    SaveAndExit,
    StartWorker,
    StopNode,
    WorkerRecord,
)
from moc.runtime.progress import RunningClock
from moc.runtime.protocol import Message, WireError, token_from_environment
from moc.runtime.rendezvous_store import RendezvousStore
from moc.runtime.standstill import MAX_STANDSTILL


@dataclass
class ControlState:
    """State of one controller; JSON-serializable by ``vars()``.

    Attributes:
        epoch: epoch of the controller that sent the state.
        version: increases with every change within an epoch.
        job: unique ID of this launch.
        membership: from :meth:`moc.runtime.membership.Membership.state_dict`.
        doors: by node (a string, for JSON), the listening address of its agent's process.
        voters: from :meth:`moc.runtime.election.Voters.to_message`; empty until the first leader has taken over.
    """

    epoch: int
    version: int
    job: str
    membership: dict = field(default_factory=dict)
    doors: dict[str, str | None] = field(default_factory=dict)
    voters: dict = field(default_factory=dict)

    @classmethod
    def new(cls, epoch: int) -> ControlState:
        """Returns the state of a new job."""
        return cls(epoch, 0, secrets.token_hex(8))

    @property
    def expected_nodes(self) -> set[int]:
        """Nodes that filled rank blocks and were not known to be lost."""
        places = self.membership
        return {node for place, node in places["places"] if place not in places["vacant"]}

    def update(self, membership: dict, voters: Voters | None) -> bool:
        """Updates the membership and the voters; returns whether one changed."""
        newest = membership, voters.to_message() if voters else {}
        if newest == (self.membership, self.voters):
            return False
        (self.membership, self.voters), self.version = newest, self.version + 1
        return True


def newest_state(states: Iterable[ControlState | None]) -> ControlState | None:
    """Returns the newest of the agents' copies; None if no agent has one."""
    there = (state for state in states if state is not None and state.membership)
    return max(there, key=lambda state: (state.epoch, state.version), default=None)


_PROBE_S = 1.0


@dataclass(eq=False)
class AgentPeer:
    """A connected agent."""

    node: int
    connection: async_connections.AsyncConnection
    hello: dict  # header of its first message
    workers: list[WorkerRecord]  # listed in that message
    state: ControlState | None  # its copy of an earlier controller's state
    voters: Voters | None  # voters in this state
    last_message_at: float  # time of its last message, by the controller's clock
    epoch: int  # epoch that it has promised
    heartbeat_at: float  # send time of its newest heartbeat, by its clock
    requested_promise: tuple[int, bool] | None = None  # epoch in which its promise was last requested, and ``sure``
    is_admitted: bool = False  # it belongs to the job; earlier messages are held
    pending: collections.deque[Message] = field(default_factory=collections.deque)  # to be handled later
    end_acknowledged: bool = False  # it has acknowledged the end of the job
    has_reported_loss: bool = False  # it has itself reported its workers dead

    @classmethod
    def from_hello(cls, hello: dict, connection: async_connections.AsyncConnection, now: float) -> AgentPeer:
        """Parses an agent's hello; raises WireError if it is malformed."""
        for name in ("generation", "asked", "departs", "instance", "called", "door", "free_in", "silent", "at"):
            hello[name]
        try:
            workers = [WorkerRecord.from_message(worker) for worker in hello["workers"]]
            state = None if hello["state"] is None else ControlState(**hello["state"])
            voters = Voters.from_message(state.voters) if state is not None and state.voters else None
        except TypeError as error:
            raise WireError(f"its hello cannot be decoded ({error})") from None
        return cls(hello["node"], connection, hello, workers, state, voters, now, hello["epoch"], hello["at"])

    @property
    def instance(self) -> str:
        """Id of its process, which a restart changes."""
        return self.hello["instance"]

    @property
    def process_name(self) -> str:
        """Name of its process, for messages."""
        return self.hello["called"]

    @property
    def liveness_address(self) -> str | None:
        """Address of its process while it lives."""
        return self.hello["door"]


async def process_is_dead(address: str) -> bool:
    """Returns whether a machine refuses connections to a process's address; without an answer, it may still live."""
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), _PROBE_S)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return False


FIRST_REMINDER_S, REMINDER_S = 5.0, 30.0
"""Seconds before the console first names missing nodes, and between repetitions."""

FAILURE_MEMORY_S = 600.0
"""Seconds without a new generation after which earlier connection failures no longer count."""

FAILURE_GRACE_S = 2.0
"""Seconds from a report of lost connections to a new generation, unless a loss is reported meanwhile."""

SCALE_UP_RETRY_S = 60.0
"""Seconds for workers to save and exit when more nodes join, or for joining workers to initialize.

Afterwards the order is repeated."""

DEPARTURE_WINDOW_S = 2.0
"""Seconds from a node's request to leave until departures begin: all requests meanwhile are one change of members."""

TAKEOVER_WAIT_S = 0.8
"""Seconds that a new leader waits for its predecessor's agents."""

STEPPED_DOWN = 77
"""Exit code of a controller that is no longer the leader; it is started again as a candidate."""

_TICK_S = 0.05

_log = logging.getLogger("moc")


class Controller:
    """Event loop that passes agents' messages to the membership, and its orders to the agents.

    Args:
        membership: membership of the job.
        election: this candidate's side of the election.
        max_wait_s: seconds to wait for missing nodes.
        grow_wait_s: seconds to wait for more nodes, once enough or new nodes have joined.
    """

    def __init__(self, membership: Membership, election: Election, max_wait_s: float, grow_wait_s: float = 0.0):
        self._membership, self._election, self._max_wait_s = membership, election, max_wait_s
        self._grow_wait_s, self._scale_up_at = grow_wait_s, math.inf
        self._times = election.times
        self._clock = RunningClock(max_step_s=10 * _TICK_S)
        self._agents: dict[int, AgentPeer] = {}
        self._disconnected: dict[int, DisconnectedNode] = {}  # nodes of the job that are to be admitted again
        self._probes: set[asyncio.Task] = set()
        self._missing_since: float | None = None  # start of the wait for missing nodes
        self._remind_at = 0.0  # time of the next console message about them
        self._state: ControlState | None = None  # None until this controller has taken over
        self._leader_since = math.inf
        self._own_node: int | None = None  # node whose launcher runs this controller; None if none does
        self._departures_at = math.inf  # time to announce the departing nodes
        self._leaving: set[int] = set()  # connected nodes that are released when they are no voters any more
        self._released: set[int] = set()  # leaving nodes that were released
        self._store = RendezvousStore()
        self._end_is_logged = False  # the end was logged
        self._broadcast_due = False  # agents joined since the last broadcast
        self._replication_due = False  # events without orders may have changed the state
        self._unacknowledged: list[tuple[AgentPeer, str]] = []  # handled exits that the replicated state may lack
        self._disturbed_at = 0.0

    async def run(
        self, address: str, token: bytes, beyond_loopback: bool, listener: socket.socket | None = None
    ) -> int:
        """Serves agents until the job is over and each node that may return has acknowledged the end.

        The arguments are the same as for :func:`moc.runtime.async_connections.serve`.

        Returns:
            The exit code: 0, or :data:`STEPPED_DOWN`.
        """
        self._own_node = None if listener is None else self._election.index
        listening = async_connections.serve(
            address, token, self._serve_agent, beyond_loopback=beyond_loopback, listener=listener
        )
        async with await listening as server:
            with open(report_descriptor(), "w") as launcher:  # the launcher may have requested port 0
                launcher.write(f"{server.address}\n")
            while not self._membership.end or self._agents or self._disconnected:
                await asyncio.sleep(_TICK_S)
                self._clock.tick()
                if self._election.has_lost_leadership(time.monotonic()) and not self._membership.end:
                    _log.warning("this controller has lost the majority of the nodes: another one may lead")
                    return STEPPED_DOWN
                self._tick(self._clock.now)
        return 0

    def _tick(self, now: float) -> None:
        """Performs all actions that depend only on time."""
        self._election.start_candidacy(time.monotonic())
        epoch, is_safe = self._election.epoch, self._election.is_safe_request
        for peer in self._agents.values():  # agents that joined since the candidacy or were not free then
            if epoch not in (None, peer.epoch) and peer.requested_promise != (epoch, is_safe):
                self._request_promise(peer, epoch, is_safe)
        if self._election.is_leader and self._state is None:
            self._take_over_if_ready(now)
        if not self._may_order:
            return
        for peer in list(self._agents.values()):
            self._admit_if_following(peer)
            while peer.is_admitted and peer.pending:
                self._handle(peer, peer.pending.popleft())
        self._check_timeouts(now)
        self._release_nodes()
        if self._replication_due:  # one broadcast for all events since the last tick
            self._replicate_state()
        if self._broadcast_due:
            self._send_state()
        for peer, worker in self._unacknowledged:
            self._post(peer, "noted", worker=worker)
        self._unacknowledged.clear()

    @property
    def _may_order(self) -> bool:
        return self._state is not None and (
            self._membership.end is not None or self._election.may_order(time.monotonic())
        )

    def _check_timeouts(self, now: float) -> None:
        """Marks silent nodes and nodes that do not return as lost, and limits the wait for missing nodes."""
        membership = self._membership
        for peer in list(self._agents.values()):
            if now - peer.last_message_at > self._times.lease_s:
                _log.warning("node %d has sent no heartbeat for %g s", peer.node, self._times.lease_s)
                self._remove_agent(peer)
                peer.connection.abort()
        for node in [node for node, gone in self._disconnected.items() if now >= gone.lost_at]:
            if node not in self._agents:
                del self._disconnected[node]
                self._execute(membership.node_lost(node))
        if membership.running and now - self._disturbed_at > FAILURE_MEMORY_S:
            membership.forget_failures()
        if membership.has_departures_to_announce and now >= self._departures_at:
            self._execute(self._stop_without_leader() or membership.announce_departures())
        self._scale_up(now)
        missing = membership.missing_nodes()
        if not missing:
            self._missing_since = None
            return
        if self._missing_since is None:
            self._missing_since, self._remind_at = now, now + FIRST_REMINDER_S
        seconds, limit = (
            self._max_wait_s if membership.has_begun else max(self._max_wait_s, MIN_JOIN_TIMEOUT_S),
            "--max-wait",
        )
        if (
            membership.stop_signal is not None and seconds > self._times.lease_s
        ):  # nodes lost since the signal, or disconnected
            seconds, limit = self._times.lease_s, "--silence-timeout"
        remaining = self._missing_since + seconds - now
        if remaining <= 0:
            self._execute(membership.end_if_nodes_missing(f"no node has connected for {seconds:g} s ({limit})"))
        elif now >= self._remind_at:
            self._remind_at = now + REMINDER_S
            _log.warning("%s", missing_nodes_message(missing, remaining, limit))

    def _scale_up(self, now: float) -> None:
        """Starts the job or adds new nodes, once all have joined or no more have joined for a while."""
        membership = self._membership
        if not membership.can_grow:
            self._scale_up_at = math.inf
        elif membership.departing:
            pass  # one change of members after the other
        elif (
            now >= self._scale_up_at
            or (membership.scale_up.joining_workers_are_ready and not membership.has_scale_up_notice)
            or (membership.scale_up.all_arrived and not membership.scale_up.in_progress)
        ):
            self._scale_up_at = now + SCALE_UP_RETRY_S
            was_announced, orders = membership.has_scale_up_notice, membership.grow()
            if any(isinstance(order, StartWorker) and order.is_joining for order in orders):
                _log.warning("more nodes can train: their workers initialize, and join when they are ready")
            if membership.has_scale_up_notice and not was_announced:
                _log.warning("new nodes are ready: all workers connect to them at the end of an iteration")
            self._execute(orders)
        elif self._scale_up_at == math.inf:
            self._scale_up_at = now + self._grow_wait_s
            count = len(membership.blocks.filled_blocks)
            _log.warning("%d nodes are there; waiting %g s for more (--grow-wait)", count, self._grow_wait_s)

    # connections

    async def _serve_agent(self, connection: async_connections.AsyncConnection) -> None:
        first = await connection.recv()
        if first.kind == "ask":
            await connection.send(Message({"kind": "well", "leads": self._election.is_leader}))
            return
        if first.kind == "meets":
            await self._store.serve(connection, first.header["generation"])
            return
        peer = AgentPeer.from_hello(first.header, connection, self._clock.now)
        if not await self._node_is_free(peer):
            return
        self._add_agent(peer)
        try:
            with contextlib.suppress(WireError):  # on a disconnect, _goes() decides the next action
                while not peer.end_acknowledged:
                    self._receive(peer, await connection.recv())
        finally:
            if self._agents.get(peer.node) is peer:
                self._remove_agent(peer)

    async def _node_is_free(self, peer: AgentPeer) -> bool:
        """Waits until no other process represents the node; refuses the peer and returns False if a live one does."""
        while True:
            current, disconnected = self._agents.get(peer.node), self._disconnected.get(peer.node)
            is_taken = current is not None and current.instance != peer.instance
            if (
                current is not None
                and is_taken
                and self._clock.now - current.last_message_at < 4 * self._times.heartbeat_interval_s
            ):
                refusal = UserError(
                    f"node {peer.node} is there already, as {current.process_name}. Fix: give each launcher its "
                    "own --node-rank",
                    code="node-rank-taken",
                )
                reason = with_code(refusal)
                _log.warning("%s was refused: %s", peer.process_name, reason)
                await peer.connection.send(Message({"kind": "refused", "why": reason}))
                return False
            if not is_taken and not (disconnected is not None and disconnected.instance not in ("", peer.instance)):
                return True
            await asyncio.sleep(0.1)

    def _add_agent(self, peer: AgentPeer) -> None:
        previous = self._agents.get(peer.node)
        if previous is not None:
            self._remove_agent(previous)
            previous.connection.abort()
        self._agents[peer.node] = peer
        hello = peer.hello
        waits = hello["free_in"], hello["silent"]
        self._election.add_agent(peer.node, peer.epoch, *waits, time.monotonic(), peer.voters)
        if self._membership.end is not None:
            self._post(peer, "end", **self._membership.end.to_message())
            self._disconnected.pop(peer.node, None)
            peer.is_admitted = True
        else:
            self._admit_if_following(peer)

    def _remove_agent(self, peer: AgentPeer) -> None:
        """Removes a disconnected agent; a node of the job is disconnected until it is admitted again or lost."""
        del self._agents[peer.node]
        self._leaving.discard(peer.node)
        self._released.discard(peer.node)
        self._election.remove_agent(peer.node)
        before = self._disconnected.get(peer.node)
        if peer.end_acknowledged or not (peer.is_admitted or before):
            return
        lost_at = max(peer.last_message_at + self._times.lease_s, before.lost_at if before else 0.0)
        lost_at = self._clock.now if peer.has_reported_loss else lost_at
        self._watch_disconnected(peer.node, DisconnectedNode(lost_at, peer.instance), peer.liveness_address)

    def _watch_disconnected(self, node: int, disconnected: DisconnectedNode, address: str | None) -> None:
        """Marks a node as disconnected, and probes its door to detect the death of its process immediately."""
        self._disconnected[node] = disconnected
        probe = asyncio.create_task(self._probe(node, disconnected, address))
        self._probes.add(probe)  # this reference prevents garbage collection
        probe.add_done_callback(self._probes.discard)

    async def _probe(self, node: int, disconnected: DisconnectedNode, address: str | None) -> None:
        while address is not None and self._disconnected.get(node) is disconnected:
            if node not in self._agents and await process_is_dead(address):
                disconnected.lost_at = min(disconnected.lost_at, self._clock.now)
                return
            await asyncio.sleep(0.2)

    def _receive(self, peer: AgentPeer, message: Message) -> None:
        header = message.header
        peer.last_message_at = self._clock.now
        if message.kind == "alive":
            if header["echo"] is not None:
                self._election.record_echo(peer.node, header["echo"])
            peer.heartbeat_at = header["at"]
            self._send_beat(peer)
        elif message.kind == "promise":
            if self._election.handle_promise(peer.node, header["epoch"], header["free_in"], time.monotonic()):
                self._leader_since = self._clock.now
            peer.epoch = header["epoch"]
            self._admit_if_following(peer)
            if not peer.is_admitted:  # it follows this leader meanwhile
                self._send_beat(peer)
        elif message.kind == "heard":
            peer.end_acknowledged = True
        elif message.kind == "lost":
            peer.has_reported_loss = True
        elif peer.is_admitted and self._may_order and not peer.pending:
            self._handle(peer, message)
        else:
            peer.pending.append(message)

    def _send_beat(self, peer: AgentPeer) -> None:
        """Answers the newest heartbeat of an agent."""
        now = time.monotonic()
        age = now - self._election.majority_contact(now)
        self._post(peer, "beat", at=peer.heartbeat_at, sent=now, age=age, leads=self._election.is_leader)

    # taking over

    def _request_promise(self, peer: AgentPeer, epoch: int, is_safe: bool) -> None:
        peer.requested_promise = epoch, is_safe
        self._post(peer, "elect", epoch=epoch, sure=is_safe)

    def _take_over_if_ready(self, now: float) -> None:
        """Takes over once all live nodes of the predecessor follow with their state, or after some time.

        Nodes whose processes are dead are not waited for; others for :data:`TAKEOVER_WAIT_S`.
        """
        if not self._election.may_order(time.monotonic()):
            return  # what agents store would not be the newest
        followers = [peer for peer in self._agents.values() if peer.epoch == self._election.epoch]
        previous = newest_state(peer.state for peer in followers)
        expected = set() if previous is None else previous.expected_nodes
        missing = expected - {peer.node for peer in followers}
        lost_at = now + max(0.0, self._election.leases_expire_at - time.monotonic())
        addresses = {} if previous is None else previous.doors
        for node in expected - self._disconnected.keys():  # until they are admitted
            self._watch_disconnected(node, DisconnectedNode(lost_at), addresses.get(str(node)))
        all_follow = self._election.all_connected and len(followers) == len(
            self._agents
        )  # all nodes are connected and follow
        enough = all_follow if previous is None else all(self._disconnected[node].lost_at <= now for node in missing)
        if not enough and now < self._leader_since + TAKEOVER_WAIT_S:
            return
        epoch, voters = self._election.epoch, self._election.voters
        assert epoch is not None and voters is not None  # set for a leader
        self._state = replace(previous or ControlState.new(epoch), epoch=epoch, voters=voters.to_message())
        if previous is not None:
            self._membership.load_state_dict(previous.membership)
            self._end_is_logged = self._membership.end is not None
            _log.warning("this controller has taken over the job (epoch %d)", epoch)
        self._disturbed_at = now
        for peer in followers:
            self._admit_if_following(peer)

    def _admit_if_following(self, peer: AgentPeer) -> None:
        is_new = peer.epoch == self._election.epoch and not peer.is_admitted
        if self._state is not None and is_new and self._election.may_admit(peer.node, time.monotonic()):
            self._admit(peer, self._state)

    def _admit(self, peer: AgentPeer, state: ControlState) -> None:
        peer.is_admitted = True
        self._disconnected.pop(peer.node, None)
        hello = peer.hello
        state.doors = state.doors | {str(peer.node): peer.liveness_address}
        self._post_state(peer, state)
        self._send_beat(peer)  # so that the lease is valid before its workers start
        self._broadcast_due = True
        self._execute(self._membership.node_joined(peer.node, peer.workers, hello["generation"], hello["asked"]))
        if hello["departs"]:
            self._request_departure(peer.node)
        if self._membership.blocks.block_of(peer.node) is None and not self._end_is_logged:
            _log.warning("node %d is there, and waits as a spare", peer.node)

    # messages of agents, and orders to them

    def _handle(self, peer: AgentPeer, message: Message) -> None:
        header, membership = message.header, self._membership
        if message.kind == "ended":
            details = header["code"], header["why"], header["gives_back"], header["broken"], header["iteration"]
            self._execute(membership.worker_exited(header["worker"], *details))
            self._unacknowledged.append((peer, header["worker"]))
        elif message.kind == "built":
            self._execute(membership.worker_ready(header["worker"], header["stays"]))
        elif message.kind == "here":
            reported = header["generation"], header["parts"], header["iteration"]
            self._execute(membership.worker_reported(header["worker"], *reported))
        elif message.kind == "met":
            self._execute(membership.worker_connected(header["worker"], header["generation"]))
        elif message.kind == "parted":
            reported = header["generation"], header["handed_over"]
            self._execute(membership.worker_drained(header["worker"], *reported))
        elif message.kind == "suspects":
            asyncio.get_running_loop().call_later(
                FAILURE_GRACE_S, self._confirm_failure, header["worker"], header["generation"]
            )
        elif message.kind == "hangs":
            self._execute(membership.worker_blocked(header["worker"], header["generation"], header["how"]))
        elif message.kind == "stopping":
            self._execute(membership.stop_requested(header["signal"]))
        elif message.kind == "departs":
            self._request_departure(peer.node)

    def _request_departure(self, node: int) -> None:
        """Passes on a node's request to leave; requests within :data:`DEPARTURE_WINDOW_S` are one."""
        if not self._membership.departing:
            self._departures_at = self._clock.now + DEPARTURE_WINDOW_S
        _log.warning("node %d asks to leave the job", node)
        orders = self._membership.departure_requested(node)
        self._execute(self._stop_without_leader() or orders)

    def _stop_without_leader(self) -> list[Order]:
        """Has departing nodes stop the job if no controller could lead it without them; otherwise returns no orders."""
        nodes, election = self._membership.departing, self._election
        left = self._agents.keys() - nodes
        if not nodes or self._own_node is None and election.candidates == 1:
            return []
        if election.candidates == 1:
            problem = "the only controller is on one of them" if self._own_node in nodes else ""
        elif len(left) < (required := election.required_without(nodes, set(self._agents))):
            problem = f"controllers need {required} nodes, and {len(left)} remain"
        else:
            is_led = self._own_node is None or any(node in left for node in range(election.candidates))
            problem = "" if is_led else "no node with a controller remains"
        if not problem:
            return []
        _log.warning("nodes %s cannot leave the others: %s", ", ".join(map(str, sorted(nodes))), problem)
        return self._membership.stop_departing()

    def _confirm_failure(self, worker: str, generation: int) -> None:
        if self._may_order:
            self._execute(self._membership.worker_blocked(worker, generation))

    def _execute(self, orders: list[Order]) -> None:
        self._replication_due = True
        if orders:
            self._replicate_state()
        for order in orders:
            if isinstance(order, StartWorker):
                self._send(order.node, "start", worker=order.worker, rank=order.rank, generation=order.generation,
                           together=order.starts_together, place=order.rank_block, size=order.size,
                           guest=order.is_joining, helpers=order.partial_model_parts)  # fmt: skip
            elif isinstance(order, AssignRank):
                self._send(order.node, "seat", worker=order.worker, rank=order.rank, generation=order.generation,
                           size=order.size, helpers=order.partial_model_parts)  # fmt: skip
            elif isinstance(order, SaveAndExit):
                _log.warning("nodes have joined: all workers save and exit, and more workers start")
                self._send_all("leave")
            elif isinstance(order, ChangeNotice):
                if order.departing:
                    _log.warning("all workers leave this generation after an iteration, since nodes depart")
                self._send_all("welcome", generation=order.generation, departing=order.departing)
            elif isinstance(order, ReleaseNode):
                self._leaving.add(order.node)
                self._release_nodes()
            elif isinstance(order, StopNode):
                _log.warning("the others cannot continue without node %d: the job stops instead", order.node)
                self._send(order.node, "stop")
            elif isinstance(order, RemoveNode):
                _log.error("%s", order.reason)
                self._send(order.node, "give_up", why=order.reason)
            elif isinstance(order, Kill):
                self._send(order.node, "kill", worker=order.worker)
            elif isinstance(order, Abort):
                self._disturbed_at = self._clock.now
                _log.warning("generation %d: %s", order.generation, order.reason)
                why = {"cause": order.cause, "reason": order.reason, "lost": dict(order.lost)}
                self._send_all("abort", generation=order.generation, **why)
            elif isinstance(order, Connect):
                self._order_connect(order.generation)
            elif isinstance(order, End):
                if (
                    order.reason and order.stop_signal is None and not self._end_is_logged
                ):  # each launcher reports its own stop signal
                    _log.error("%s", order.reason)
                self._end_is_logged = True
                self._send_all("end", **order.to_message())

    def _order_connect(self, generation: int) -> None:
        assert self._state is not None  # after takeover
        self._send_all("go", generation=generation, epoch=self._election.epoch, job=self._state.job)

    def _replicate_state(self) -> None:
        """Broadcasts changed state before any order, so that a successor knows all orders and counts."""
        assert self._state is not None  # set by the takeover, before any order
        self._replication_due = False
        if self._state.update(self._membership.state_dict(), self._election.voters):
            self._send_state()

    def _send_state(self) -> None:
        assert self._state is not None  # set by the takeover
        self._broadcast_due = False
        for peer in list(self._agents.values()):
            if peer.is_admitted:
                self._post_state(peer, self._state)

    def _post_state(self, peer: AgentPeer, state: ControlState) -> None:
        self._post(peer, "state", **vars(state))
        self._election.record_voters_sent(peer.node, time.monotonic())

    @property
    def _lost_voters(self) -> set[int]:
        """Voters that are lost; after a takeover, all nodes have the time of a lease to connect."""
        voters = self._election.voters
        if voters is None or self._clock.now < self._leader_since + self._times.lease_s:
            return set()
        return set(voters.nodes) - self._agents.keys() - self._disconnected.keys()

    def _release_nodes(self) -> None:
        """Adds joined nodes to the voters and removes departing and lost ones; then releases the departing nodes."""
        present = {node for node, peer in self._agents.items() if peer.is_admitted}
        if self._election.revise_voters(present, self._leaving | self._lost_voters, time.monotonic()):
            self._replicate_state()
            for node in present:
                self._send_beat(self._agents[node])  # its echo confirms that the node has stored them
        for node in sorted(self._leaving - self._released):
            if self._election.may_release(node):
                self._released.add(node)
                self._send(node, "depart")

    def _send_all(self, kind: str, **fields) -> None:
        for node in list(self._agents):
            self._send(node, kind, **fields)

    def _send(self, node: int, kind: str, **fields) -> None:
        peer = self._agents.get(node)
        if peer is not None and peer.is_admitted:
            self._post(peer, kind, **fields)

    @staticmethod
    def _post(peer: AgentPeer, kind: str, **fields) -> None:
        with contextlib.suppress(WireError):  # the handler of the connection detects a disconnect
            peer.connection.post(Message({"kind": kind} | fields))


@dataclass(eq=False)
class DisconnectedNode:
    """Disconnected node."""

    lost_at: float  # its workers have certainly ended by this time
    instance: str = ""  # ID of its agent's process; empty if unknown


def missing_nodes_message(missing: list[int], left_s: float, limit: str) -> str:
    """Returns the message that names the missing nodes and the remedy."""
    commands = ", ".join(f"`mocrun ... --node-rank {node}`" for node in missing)
    return (
        f"{nodes_are(missing)} missing: waiting for a spare, or for {commands}; giving up in {left_s:.0f} s ({limit})"
    )


def parser() -> argparse.ArgumentParser:
    """Returns the command-line parser of a standalone controller; most flags repeat the launchers'."""
    flags = Parser("python -m moc.runtime.controller", description=(__doc__ or "").partition("\n")[0])
    add: Callable = flags.add_argument
    add("--listen", required=True, metavar="HOST:PORT", help="where agents find it: their --rdzv-endpoint")
    add("--nnodes", type=parse_node_range, required=True, metavar="[MIN:]MAX", help="as the launchers'")
    add("--nproc-per-node", type=int, required=True, help="as the launchers'")
    add("--spares", type=int, default=0, help="as the launchers' (default: 0)")
    add("--max-restarts", type=int, default=1000, help="as the launchers' (default: 1000)")
    add("--max-standstill", type=int, default=MAX_STANDSTILL, help=f"as the launchers' (default: {MAX_STANDSTILL})")
    add("--silence-timeout", type=float, default=30.0, help="as the launchers' (default: 30)")
    add("--max-wait", type=float, default=1800.0, help="as the launchers' (default: 1800)")
    add("--grow-wait", type=float, default=120.0, help="as the launchers' (default: 120)")
    add(
        "--candidate",
        type=_parse_candidate,
        default=(0, 1),
        metavar="I/N",
        help="which of N controllers this one is (default: 0/1)",
    )
    add("--listen-fd", type=int, help=argparse.SUPPRESS)
    add("--beyond-loopback", action="store_true", help="--listen may be an address that other machines can reach")
    return flags


def _parse_candidate(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N, with I from 0 to N - 1")
    return int(index), int(count)


def _make_controller(arguments: argparse.Namespace) -> Controller:
    index, candidates = arguments.candidate
    minimum, maximum = arguments.nnodes
    membership = Membership(
        maximum * arguments.nproc_per_node,
        arguments.nproc_per_node,
        arguments.max_restarts,
        minimum,
        arguments.max_standstill,
    )
    nodes, limits = maximum + arguments.spares, SilenceLimits(arguments.silence_timeout)
    min_voters = 0 if minimum == maximum else max(minimum, (nodes + 1) // 2)
    election = Election(index, candidates, nodes, limits, min_voters=min_voters)
    return Controller(membership, election, arguments.max_wait, arguments.grow_wait)


@escapes_output
def main() -> int:
    """Runs the controller as a separate process; returns the exit code."""
    arguments = parser().parse_args()
    is_standalone = arguments.listen_fd is None
    if not is_standalone:
        attach_to_parent()
    log_to_stderr()
    listener = None if is_standalone else socket.socket(fileno=arguments.listen_fd)
    try:
        while True:
            run = _make_controller(arguments).run
            code = asyncio.run(run(arguments.listen, token_from_environment(), arguments.beyond_loopback, listener))
            if code != STEPPED_DOWN or not is_standalone:  # a launcher starts another process
                return code
    except BrokenPipeError:
        return 1  # its launcher has ended, for example by SIGINT, and reports the cause
    except (UserError, OSError) as error:
        return refused("controller", error, arguments.listen)


if __name__ == "__main__":
    sys.exit(main())
