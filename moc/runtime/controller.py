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

from moc.errors import UserError, with_code
from moc.output import Parser, escapes_output, log_to_stderr, refused
from moc.runtime import async_connections
from moc.runtime.child_processes import attach_to_parent, report_descriptor
from moc.runtime.clocks import RunningClock
from moc.runtime.election import MIN_JOIN_TIMEOUT_S, Election, SilenceLimits
from moc.runtime.flags import parse_node_range
from moc.runtime.job_token import token_from_environment
from moc.runtime.membership import Membership, nodes
from moc.runtime.orders import Abort, End, GiveUp, Go, Kill, Leave, Order, Seat, StartWorker, Welcome, Worker
from moc.runtime.protocol import Message, WireError
from moc.runtime.rendezvous_store import RendezvousStore


@dataclass
class ControlState:
    """State of one controller; JSON-serializable by ``vars()``.

    Attributes:
        epoch: epoch of the controller that sent the state.
        version: increases with every change within an epoch.
        job: unique ID of this launch.
        membership: from :meth:`moc.runtime.membership.Membership.state_dict`.
        doors: by node (a string, for JSON), the listening address of its agent's process.
    """

    epoch: int
    version: int
    job: str
    membership: dict = field(default_factory=dict)
    doors: dict[str, str | None] = field(default_factory=dict)

    @classmethod
    def begun(cls, epoch: int) -> ControlState:
        """Returns the state of a new job."""
        return cls(epoch, 0, secrets.token_hex(8))

    @property
    def seated(self) -> set[int]:
        """Nodes that filled rank blocks and were not known to be lost."""
        places = self.membership
        return {node for place, node in places["places"] if place not in places["vacant"]}

    def changes(self, membership: dict) -> bool:
        """Updates the membership; returns whether it changed."""
        if membership == self.membership:
            return False
        self.membership, self.version = membership, self.version + 1
        return True


def newest(states: Iterable[ControlState | None]) -> ControlState | None:
    """Returns the newest of the agents' copies; None if no agent has one."""
    there = (state for state in states if state is not None and state.membership)
    return max(there, key=lambda state: (state.epoch, state.version), default=None)


_PROBE_S = 1.0


@dataclass(eq=False)
class Peer:
    """A connected agent."""

    node: int
    connection: async_connections.AsyncConnection
    hello: dict  # header of its first message
    workers: list[Worker]  # listed in that message
    state: ControlState | None  # its copy of an earlier controller's state
    heard: float  # time of its last message, by the controller's clock
    epoch: int  # epoch that it has promised
    asked: tuple[int, bool] | None = None  # epoch in which its promise was last requested, and ``sure``
    admitted: bool = False  # it belongs to the job; earlier messages are held
    held: collections.deque[Message] = field(default_factory=collections.deque)  # to be handled later
    knows_end: bool = False  # it has acknowledged the end of the job
    lost: bool = False  # it has itself reported its workers dead

    @classmethod
    def from_hello(cls, hello: dict, connection: async_connections.AsyncConnection, now: float) -> Peer:
        """Parses an agent's hello; raises WireError if it is malformed."""
        for name in ("generation", "asked", "instance", "called", "door", "free_in", "silent", "at"):
            hello[name]
        try:
            workers = [Worker.from_message(worker) for worker in hello["workers"]]
            state = None if hello["state"] is None else ControlState(**hello["state"])
        except TypeError as error:
            raise WireError(f"its hello cannot be decoded ({error})") from None
        return cls(hello["node"], connection, hello, workers, state, now, hello["epoch"])

    @property
    def instance(self) -> str:
        """Id of its process, which a restart changes."""
        return self.hello["instance"]

    @property
    def called(self) -> str:
        """Name of its process, for messages."""
        return self.hello["called"]

    @property
    def door(self) -> str | None:
        """Address at which its process listens while it lives."""
        return self.hello["door"]


async def process_has_died(door: str) -> bool:
    """Returns whether a machine refuses connections to a process's address; without an answer, it may still live."""
    host, _, port = door.rpartition(":")
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


TELL_FIRST_S, TELL_S = 5.0, 30.0
"""Seconds before the console first names missing nodes, and between repetitions."""

CALM_S = 600.0
"""Seconds without a new generation after which earlier connection failures no longer count."""

DOUBT_S = 2.0
"""Seconds from a report of lost connections to a new generation, unless a loss is reported meanwhile."""

LEAVE_S = 60.0
"""Seconds for workers to save and exit when more nodes join, or for joining workers to initialize.

Afterwards the order is repeated."""

GATHER_S = 2.0
"""Seconds that a new leader waits for its predecessor's agents."""

STEPS_DOWN = 77
"""Exit code of a controller that is no longer the leader; its launcher restarts it as a candidate."""

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
        self._grow_wait_s, self._grows_at = grow_wait_s, math.inf
        self._times = election.times
        self._clock = RunningClock(max_step_s=10 * _TICK_S)
        self._agents: dict[int, Peer] = {}
        self._gone: dict[int, Gone] = {}  # disconnected nodes that may return
        self._probing: set[asyncio.Task] = set()
        self._waits_since: float | None = None  # start of the wait for missing nodes
        self._names_them_at = 0.0  # time of the next console message about them
        self._state: ControlState | None = None  # None until this controller has taken over
        self._leads_since = math.inf
        self._store = RendezvousStore()
        self._over = False  # the end was logged
        self._has_news = False  # agents joined since the last broadcast
        self._disturbed = 0.0

    async def run(
        self, address: str, token: bytes, beyond_loopback: bool, listener: socket.socket | None = None
    ) -> int:
        """Serves agents until the job is over and each node that may return has acknowledged the end.

        The arguments are the same as for :func:`moc.runtime.async_connections.serve`.

        Returns:
            The exit code: 0, or :data:`STEPS_DOWN`.
        """
        serving = async_connections.serve(
            address, token, self._serve_agent, beyond_loopback=beyond_loopback, listener=listener
        )
        async with await serving as server:
            with open(report_descriptor(), "w") as launcher:  # the launcher may have requested port 0
                launcher.write(f"{server.address}\n")
            while not self._membership.end or self._agents or self._gone:
                await asyncio.sleep(_TICK_S)
                self._clock.tick()
                if self._election.has_lost_leadership(time.monotonic()) and not self._membership.end:
                    _log.warning("this controller has lost the majority of the nodes: another one may lead")
                    return STEPS_DOWN
                self._tick(self._clock.now)
        return 0

    def _tick(self, now: float) -> None:
        """Performs all actions that depend only on time."""
        self._election.start_candidacy(time.monotonic())
        epoch, sure = self._election.epoch, self._election.is_safe_request
        for peer in self._agents.values():  # agents that joined since the candidacy or were not free then
            if epoch not in (None, peer.epoch) and peer.asked != (epoch, sure):
                self._ask(peer, epoch, sure)
        if self._election.is_leader and self._state is None:
            self._take_over_when_all_are_there(now)
        if not self._may_order:
            return
        for peer in list(self._agents.values()):
            while peer.admitted and peer.held:
                self._hear(peer, peer.held.popleft())
        self._look_at_clock(now)
        if self._state is not None and self._has_news:  # one broadcast for all agents that joined in this tick
            self._tell_all("state", **vars(self._state))
            self._has_news = False

    @property
    def _may_order(self) -> bool:
        return self._state is not None and (
            self._membership.end is not None or self._election.may_order(time.monotonic())
        )

    def _look_at_clock(self, now: float) -> None:
        """Marks silent nodes and nodes that do not return as lost, and limits the wait for missing nodes."""
        membership = self._membership
        for peer in list(self._agents.values()):
            if now - peer.heard > self._times.lease_s:
                _log.warning("node %d has said nothing for %g s", peer.node, self._times.lease_s)
                del self._agents[peer.node]
                self._election.remove_agent(peer.node)
                peer.connection.abort()
                self._obey(membership.left(peer.node))
        for node in [node for node, gone in self._gone.items() if now >= gone.lost_at]:
            del self._gone[node]
            self._obey(membership.left(node))
        if membership.running and now - self._disturbed > CALM_S:
            membership.calm()
        self._grow(now)
        missing = membership.waits_for()
        if not missing:
            self._waits_since = None
            return
        if self._waits_since is None:
            self._waits_since, self._names_them_at = now, now + TELL_FIRST_S
        most, limit = (
            self._max_wait_s if membership.has_begun else max(self._max_wait_s, MIN_JOIN_TIMEOUT_S),
            "--max-wait",
        )
        if membership.asked is not None and most > self._times.lease_s:  # nodes lost since the signal, or disconnected
            most, limit = self._times.lease_s, "--silence-timeout"
        left = self._waits_since + most - now
        if left <= 0:
            self._obey(membership.gives_up(f"nobody has come for {most:g} s ({limit})"))
        elif now >= self._names_them_at:
            self._names_them_at = now + TELL_S
            _log.warning("%s", waiting_for(missing, left, limit))

    def _grow(self, now: float) -> None:
        """Starts the job or adds new nodes, once all have joined or no more have joined for a while."""
        membership = self._membership
        if not membership.can_grow:
            self._grows_at = math.inf
        elif (
            now >= self._grows_at
            or (membership.growth.guests_are_ready and not membership.welcomes_guests)
            or (membership.growth.need_not_wait and not membership.growth.under_way)
        ):
            self._grows_at = now + LEAVE_S
            told, orders = membership.welcomes_guests, membership.grow()
            if any(isinstance(order, StartWorker) and order.guest for order in orders):
                _log.warning("more nodes can train: their workers build, and are taken in when they are ready")
            if membership.welcomes_guests and not told:
                _log.warning("nodes that have come are ready: all meet them at the end of an iteration")
            self._obey(orders)
        elif self._grows_at == math.inf:
            self._grows_at = now + self._grow_wait_s
            count = len(membership.places.filled)
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
        peer = Peer.from_hello(first.header, connection, self._clock.now)
        if not await self._seat_is_free(peer):
            return
        self._comes(peer)
        try:
            with contextlib.suppress(WireError):  # on a disconnect, _goes() decides the next action
                while not peer.knows_end:
                    self._take(peer, await connection.recv())
        finally:
            if self._agents.get(peer.node) is peer:
                self._goes(peer)

    async def _seat_is_free(self, peer: Peer) -> bool:
        """Waits until no other process represents the node; refuses the peer and returns False if a live one does."""
        while True:
            other, gone = self._agents.get(peer.node), self._gone.get(peer.node)
            taken = other is not None and other.instance != peer.instance
            if other is not None and taken and self._clock.now - other.heard < 4 * self._times.heartbeat_interval_s:
                refusal = UserError(
                    f"node {peer.node} is there already, as {other.called}. Fix: give each launcher its "
                    "own --node-rank",
                    code="node-rank-taken",
                )
                why = with_code(refusal)
                _log.warning("%s was refused: %s", peer.called, why)
                await peer.connection.send(Message({"kind": "refused", "why": why}))
                return False
            if not taken and not (gone is not None and gone.instance not in ("", peer.instance)):
                return True
            await asyncio.sleep(0.1)

    def _comes(self, peer: Peer) -> None:
        before = self._agents.pop(peer.node, None)
        if before is not None:
            before.connection.abort()
        self._agents[peer.node] = peer
        self._gone.pop(peer.node, None)
        hello = peer.hello
        self._election.add_agent(peer.node, peer.epoch, hello["free_in"], hello["silent"], time.monotonic())
        if self._membership.end is not None:
            self._post(peer, "end", **_told(self._membership.end))
            peer.admitted = True
        elif self._state is not None and peer.epoch == self._election.epoch:
            self._admit(peer, self._state)

    def _goes(self, peer: Peer) -> None:
        del self._agents[peer.node]
        self._election.remove_agent(peer.node)
        if not peer.admitted or peer.knows_end:
            return
        if peer.lost:
            self._obey(self._membership.left(peer.node))
        else:
            self._is_gone(peer.node, Gone(peer.heard + self._times.lease_s, peer.instance), peer.door)

    def _is_gone(self, node: int, gone: Gone, door: str | None) -> None:
        """Marks a node as disconnected, and probes its door to detect the death of its process immediately."""
        self._gone[node] = gone
        probing = asyncio.create_task(self._lose_if_dead(node, gone, door))
        self._probing.add(probing)  # this reference prevents garbage collection
        probing.add_done_callback(self._probing.discard)

    async def _lose_if_dead(self, node: int, gone: Gone, door: str | None) -> None:
        while door is not None and self._gone.get(node) is gone:
            if await process_has_died(door):
                gone.lost_at = min(gone.lost_at, self._clock.now)
                return
            await asyncio.sleep(0.2)

    def _take(self, peer: Peer, message: Message) -> None:
        said = message.header
        peer.heard = self._clock.now
        if message.kind == "alive":
            if said["echo"] is not None:
                self._election.record_echo(peer.node, said["echo"])
            self._beat(peer, said["at"])
        elif message.kind == "promise":
            if self._election.handle_promise(peer.node, said["epoch"], said["free_in"], time.monotonic()):
                self._leads_since = self._clock.now
            peer.epoch = said["epoch"]
            if self._state is not None and peer.epoch == self._election.epoch and not peer.admitted:
                self._admit(peer, self._state)
        elif message.kind == "heard":
            peer.knows_end = True
        elif message.kind == "lost":
            peer.lost = True
        elif peer.admitted and self._may_order and not peer.held:
            self._hear(peer, message)
        else:
            peer.held.append(message)

    def _beat(self, peer: Peer, at: float) -> None:
        now = time.monotonic()
        age = now - self._election.majority_contact(now)
        self._post(peer, "beat", at=at, sent=now, age=age, leads=self._election.is_leader)

    # taking over

    def _ask(self, peer: Peer, epoch: int, sure: bool) -> None:
        peer.asked = epoch, sure
        self._post(peer, "elect", epoch=epoch, sure=sure)

    def _take_over_when_all_are_there(self, now: float) -> None:
        """Takes over once all nodes of the predecessor follow with their state, or after :data:`GATHER_S`."""
        follow = [peer for peer in self._agents.values() if peer.epoch == self._election.epoch]
        known = newest(peer.state for peer in follow)
        expected = set() if known is None else known.seated
        everybody = self._election.all_connected and len(follow) == len(
            self._agents
        )  # all nodes are connected and follow
        enough = everybody if known is None else expected <= {peer.node for peer in follow}
        if not enough and now < self._leads_since + GATHER_S:
            return
        epoch = self._election.epoch
        assert epoch is not None  # set for a leader
        self._state = ControlState.begun(epoch) if known is None else replace(known, epoch=epoch)
        if known is not None:
            self._membership.load_state_dict(known.membership)
            self._over = self._membership.end is not None
            _log.warning("this controller has taken over the job (epoch %d)", epoch)
        lost_in = max(0.0, self._election.leases_expire_at - time.monotonic())
        doors = {} if known is None else known.doors
        for node in expected - {peer.node for peer in follow}:
            self._is_gone(node, Gone(now + lost_in), doors.get(str(node)))
        self._disturbed = now
        for peer in follow:
            self._admit(peer, self._state)

    def _admit(self, peer: Peer, state: ControlState) -> None:
        peer.admitted = True
        hello = peer.hello
        state.doors = state.doors | {str(peer.node): peer.door}
        self._post(peer, "state", **vars(state))
        self._beat(peer, hello["at"])  # so that the lease is valid before its workers start
        self._has_news = True
        self._obey(self._membership.joined(peer.node, peer.workers, hello["generation"], hello["asked"]))
        if self._membership.places.of(peer.node) is None and not self._over:
            _log.warning("node %d is there, and waits as a spare", peer.node)

    # messages of agents, and orders to them

    def _hear(self, peer: Peer, message: Message) -> None:
        said, membership = message.header, self._membership
        if message.kind == "ended":
            told = said["code"], said["why"], said["gives_back"], said["broken"]
            self._obey(membership.ended(said["worker"], *told))
            self._post(peer, "noted", worker=said["worker"])
        elif message.kind == "built":
            self._obey(membership.built(said["worker"], said["stays"]))
        elif message.kind == "here":
            self._obey(membership.here(said["worker"], said["generation"], said["parts"]))
        elif message.kind == "met":
            self._obey(membership.met(said["worker"], said["generation"]))
        elif message.kind == "parted":
            self._obey(membership.parted(said["worker"], said["generation"]))
        elif message.kind == "suspects":
            asyncio.get_running_loop().call_later(DOUBT_S, self._believe, said["worker"], said["generation"])
        elif message.kind == "hangs":
            self._obey(membership.suspected(said["worker"], said["generation"], said["how"]))
        elif message.kind == "stopping":
            self._obey(membership.stopping(said["signal"]))

    def _believe(self, worker: str, generation: int) -> None:
        if self._may_order:
            self._obey(self._membership.suspected(worker, generation))

    def _obey(self, orders: list[Order]) -> None:
        self._remember()
        for order in orders:
            if isinstance(order, StartWorker):
                self._tell(order.node, "start", worker=order.worker, rank=order.rank, generation=order.generation,
                           together=order.together, place=order.place, size=order.size,
                           guest=order.guest, helpers=order.helpers)  # fmt: skip
            elif isinstance(order, Seat):
                self._tell(order.node, "seat", worker=order.worker, rank=order.rank, generation=order.generation,
                           size=order.size, helpers=order.helpers)  # fmt: skip
            elif isinstance(order, Leave):
                _log.warning("nodes have come: all workers save and leave, and more start")
                self._tell_all("leave")
            elif isinstance(order, Welcome):
                self._tell_all("welcome", generation=order.generation)
            elif isinstance(order, GiveUp):
                _log.error("%s", order.why)
                self._tell(order.node, "give_up", why=order.why)
            elif isinstance(order, Kill):
                self._tell(order.node, "kill", worker=order.worker)
            elif isinstance(order, Abort):
                self._disturbed = self._clock.now
                _log.warning("generation %d: %s", order.generation, order.reason)
                self._tell_all("abort", generation=order.generation, cause=order.cause, reason=order.reason)
            elif isinstance(order, Go):
                self._go(order.generation)
            elif isinstance(order, End):
                if order.reason and order.asked is None and not self._over:  # each launcher reports its own stop signal
                    _log.error("%s", order.reason)
                self._over = True
                self._tell_all("end", **_told(order))

    def _go(self, generation: int) -> None:
        assert self._state is not None  # after takeover
        self._tell_all("go", generation=generation, epoch=self._election.epoch, job=self._state.job)

    def _remember(self) -> None:
        """Broadcasts changed state before any order, so that a successor knows all orders and counts."""
        assert self._state is not None  # set by the takeover, before any order
        if self._state.changes(self._membership.state_dict()):
            self._tell_all("state", **vars(self._state))

    def _tell_all(self, kind: str, **what) -> None:
        for node in list(self._agents):
            self._tell(node, kind, **what)

    def _tell(self, node: int, kind: str, **what) -> None:
        peer = self._agents.get(node)
        if peer is not None and peer.admitted:
            self._post(peer, kind, **what)

    @staticmethod
    def _post(peer: Peer, kind: str, **what) -> None:
        with contextlib.suppress(WireError):  # the handler of the connection detects a disconnect
            peer.connection.post(Message({"kind": kind} | what))


def _told(end: End) -> dict:
    return {"code": end.code, "leaving": end.leaving, "gives_back": end.gives_back, "asked": end.asked}


@dataclass(eq=False)
class Gone:
    """Disconnected node."""

    lost_at: float  # its workers have certainly ended by this time
    instance: str = ""  # ID of its agent's process; empty if unknown


def waiting_for(missing: list[int], left_s: float, limit: str) -> str:
    """Returns the message that names the missing nodes and the remedy."""
    commands = ", ".join(f"`mocrun ... --node-rank {node}`" for node in missing)
    return f"{nodes(missing)} missing: waiting for a spare, or for {commands}; giving up in {left_s:.0f} s ({limit})"


def parser() -> argparse.ArgumentParser:
    """Returns the command-line parser of a standalone controller; most flags repeat the launchers'."""
    flags = Parser("python -m moc.runtime.controller", description=(__doc__ or "").partition("\n")[0])
    add: Callable = flags.add_argument
    add("--listen", required=True, metavar="HOST:PORT", help="where agents find it: their --rdzv-endpoint")
    add("--nnodes", type=parse_node_range, required=True, metavar="[MIN:]MAX", help="as the launchers'")
    add("--nproc-per-node", type=int, required=True, help="as the launchers'")
    add("--spares", type=int, default=0, help="as the launchers' (default: 0)")
    add("--max-restarts", type=int, default=1000, help="as the launchers' (default: 1000)")
    add("--silence-timeout", type=float, default=30.0, help="as the launchers' (default: 30)")
    add("--max-wait", type=float, default=1800.0, help="as the launchers' (default: 1800)")
    add("--grow-wait", type=float, default=120.0, help="as the launchers' (default: 120)")
    add(
        "--candidate",
        type=_candidate,
        default=(0, 1),
        metavar="I/N",
        help="which of N controllers this one is (default: 0/1)",
    )
    add("--listen-fd", type=int, help=argparse.SUPPRESS)
    add("--beyond-loopback", action="store_true", help="--listen may be an address that other machines can reach")
    return flags


def _candidate(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N, with I from 0 to N - 1")
    return int(index), int(count)


@escapes_output
def main() -> int:
    """Runs the controller as a separate process; returns the exit code."""
    own = parser().parse_args()
    if own.listen_fd is not None:  # started by a launcher, not standalone
        attach_to_parent()
    log_to_stderr()
    index, candidates = own.candidate
    least, most = own.nnodes
    membership = Membership(most * own.nproc_per_node, own.nproc_per_node, own.max_restarts, least)
    election = Election(index, candidates, most + own.spares, SilenceLimits(own.silence_timeout))
    controller = Controller(membership, election, own.max_wait, own.grow_wait)
    listener = None if own.listen_fd is None else socket.socket(fileno=own.listen_fd)
    try:
        return asyncio.run(controller.run(own.listen, token_from_environment(), own.beyond_loopback, listener))
    except (UserError, OSError) as error:
        return refused("controller", error, own.listen)


if __name__ == "__main__":
    sys.exit(main())
