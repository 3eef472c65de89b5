"""The process that keeps a job together: hears from the agents who lives, and tells them what the membership wants.

What it knows, the agents can tell it again, so it can die and be started anew while training goes on, here or on
another node: of several candidates the one leads that a majority follows (:mod:`moc.runtime.election`).  It also has
the store over which process groups find each other, so that no worker has to live for the others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import math
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from moc.runtime import async_connections as wire
from moc.runtime.children import belong
from moc.runtime.control_state import ControlState, newest
from moc.runtime.election import BEGIN_S, Election, Times
from moc.runtime.job_token import token_from_environment
from moc.runtime.meeting_store import MeetingStore
from moc.runtime.membership import Abort, End, Go, Kill, Membership, Order, StartWorker, nodes
from moc.runtime.message import Message
from moc.runtime.peers import Peer, process_has_died
from moc.runtime.running_clock import RunningClock
from moc.runtime.wire import WireError

TELL_FIRST_S, TELL_S = 5.0, 30.0
"""When, and then how often, the console says which nodes are missing."""

CALM_S = 600.0
"""After so long without a new generation, suspicions before it do not count any more."""

DOUBT_S = 2.0
"""After a worker has lost connections and no loss was heard of for so long, a generation begins without one."""

GATHER_S = 2.0
"""How long a controller that takes over waits for agents that an earlier one knew, before it goes on without them."""

STEPS_DOWN = 77
"""Exit code of a controller that does not lead any more: its launcher starts another one, as a candidate."""

_TICK_S = 0.05

_log = logging.getLogger("moc")


class Controller:
    """Takes messages of agents to the membership, and its orders to the agents.

    Args:
        membership: of the job.
        election: this candidate's part of it.
        max_wait_s: how long nodes that are missing are waited for.
    """

    def __init__(self, membership: Membership, election: Election, max_wait_s: float):
        self._membership, self._election, self._max_wait_s = membership, election, max_wait_s
        self._times = election.times
        self._clock = RunningClock(most_s=10 * _TICK_S)
        self._agents: dict[int, Peer] = {}
        self._gone: dict[int, Gone] = {}  # nodes that may come back
        self._probing: set[asyncio.Task] = set()
        self._waiting: Waiting | None = None
        self._state: ControlState | None = None  # None until this controller has taken over
        self._leads_since = math.inf
        self._store: MeetingStore | None = None
        self._over = False  # and the console says why
        self._has_news = False  # of who has come
        self._disturbed = 0.0

    async def run(
        self, address: str, token: bytes, beyond_loopback: bool, listener: socket.socket | None = None
    ) -> int:
        """Serves agents until the job is over and all that may come back have heard of it.

        Args:
            address: where to listen; with port 0 at any free one.
            token: the job's secret.
            beyond_loopback: the address may be one that others can connect to.
            listener: the listening socket, if there is one already.

        Returns:
            The exit code: 0, or :data:`STEPS_DOWN`.
        """
        self._store = MeetingStore(address.rpartition(":")[0], self._go_at_last)
        keeping = asyncio.create_task(self._store.keep())
        serving = wire.serve(address, token, self._serve_agent, beyond_loopback=beyond_loopback, listener=listener)
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(_end, keeping)
            server = await undo.enter_async_context(await serving)
            print(server.address, flush=True)  # for the launcher, which may have asked for any free port
            while not self._membership.end or self._agents or self._gone:
                await asyncio.sleep(_TICK_S)
                self._clock.tick()
                if keeping.done():
                    keeping.result()
                if self._election.is_over(time.monotonic()) and not self._membership.end:
                    _log.warning("this controller has lost the majority of the nodes: another one may lead")
                    return STEPS_DOWN
                self._tick(self._clock.now)
        return 0

    def _tick(self, now: float) -> None:
        """What follows from time alone."""
        self._election.stands(time.monotonic())
        for peer in self._agents.values():  # whoever has come since it stood, too
            if self._election.epoch not in (None, peer.epoch, peer.asked):
                self._ask(peer)
        if self._election.leads and self._state is None:
            self._take_over_when_all_are_there(now)
        if not self._may_order:
            return
        for peer in list(self._agents.values()):
            while peer.admitted and peer.held:
                self._hear(peer, peer.held.popleft())
        self._look_at_clock(now)
        if self._state is not None and self._has_news:  # of all that have come in the same moment, once
            self._tell_all("state", **self._state.told)
            self._has_news = False

    @property
    def _may_order(self) -> bool:
        return self._state is not None and (
            self._membership.end is not None or self._election.may_order(time.monotonic())
        )

    def _look_at_clock(self, now: float) -> None:
        """Nodes that are silent or do not come back are lost, and not waited for without end."""
        membership = self._membership
        for peer in list(self._agents.values()):
            if now - peer.heard > self._times.lease_s:
                _log.warning("node %d has said nothing for %g s", peer.node, self._times.lease_s)
                del self._agents[peer.node]
                self._election.goes(peer.node)
                peer.connection.abort()
                self._obey(membership.left(peer.node))
        for node in [node for node, gone in self._gone.items() if now >= gone.lost_at]:
            del self._gone[node]
            self._obey(membership.left(node))
        if membership.running and now - self._disturbed > CALM_S:
            membership.calm()
        missing = membership.waits_for()
        if not missing:
            self._waiting = None
            return
        self._waiting = waiting = self._waiting or Waiting(now, now + TELL_FIRST_S)
        most, limit = self._max_wait_s if membership.has_begun else max(self._max_wait_s, BEGIN_S), "--max-wait"
        if membership.asked is not None and most > self._times.lease_s:  # lost since then, or only its connection
            most, limit = self._times.lease_s, "--silence-timeout"
        left = waiting.since + most - now
        if left <= 0:
            self._obey(membership.gives_up(f"nobody has come for {most:g} s ({limit})"))
        elif now >= waiting.tell_at:
            waiting.tell_at = now + TELL_S
            _log.warning("%s", waiting_for(missing, left, limit))

    # whoever connects

    async def _serve_agent(self, connection: wire.AsyncConnection) -> None:
        first = await connection.recv()
        if first.kind == "ask":
            await connection.send(Message({"kind": "well", "leads": self._election.leads}))
            return
        peer = Peer.from_hello(first.header, connection, self._clock.now)
        if not await self._seat_is_free(peer):
            return
        self._comes(peer)
        try:
            while not peer.knows_end:
                self._take(peer, await connection.recv())
        except WireError:
            pass  # it is gone; what that means follows from what the job is doing
        finally:
            if self._agents.get(peer.node) is peer:
                self._goes(peer)

    async def _seat_is_free(self, peer: Peer) -> bool:
        """Waits until no other process speaks for the node; False, and it is told, if one does and is well."""
        while True:
            other, gone = self._agents.get(peer.node), self._gone.get(peer.node)
            taken = other is not None and other.instance != peer.instance
            if other is not None and taken and self._clock.now - other.heard < 4 * self._times.says_s:
                why = f"node {peer.node} is there already, as {other.called}: give each launcher its own --node-rank"
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
        self._election.comes(peer.node, peer.epoch, peer.free_in, peer.silent, time.monotonic())
        if self._membership.end is not None:
            self._post(peer, "end", **_told(self._membership.end))
            peer.admitted = True
        elif self._state is not None and peer.epoch == self._election.epoch:
            self._admit(peer, self._state)

    def _goes(self, peer: Peer) -> None:
        del self._agents[peer.node]
        self._election.goes(peer.node)
        if not peer.admitted or peer.knows_end:
            return
        if peer.lost:
            self._obey(self._membership.left(peer.node))
            return
        self._is_gone(peer.node, Gone(peer.heard + self._times.lease_s, peer.instance), peer.door)

    def _is_gone(self, node: int, gone: Gone, door: str | None) -> None:
        """Its connection may be all that it has lost; where its process is gone for certain, nobody waits for it."""
        self._gone[node] = gone
        probing = asyncio.create_task(self._lose_if_dead(node, gone, door))
        self._probing.add(probing)  # or it might be collected
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
                self._election.echoed(peer.node, said["echo"])
            self._beat(peer, said["at"])
        elif message.kind == "promise":
            if self._election.promised(peer.node, said["epoch"], said["free_in"], time.monotonic()):
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
        age = now - self._election.heard(now)
        self._post(peer, "beat", at=at, sent=now, age=age, leads=self._election.leads)

    # taking over

    def _ask(self, peer: Peer) -> None:
        peer.asked = self._election.epoch
        self._post(peer, "elect", epoch=self._election.epoch, sure=self._election.sure)

    def _take_over_when_all_are_there(self, now: float) -> None:
        """Whoever an earlier controller knew is given a moment to come, so that as much as possible is known."""
        follow = [peer for peer in self._agents.values() if peer.epoch == self._election.epoch]
        known = newest(peer.state for peer in follow)
        expected = set() if known is None else known.seated
        everybody = self._election.everybody and len(follow) == len(self._agents)  # connected, and asked
        enough = everybody if known is None else expected <= {peer.node for peer in follow}
        if not enough and now < self._leads_since + GATHER_S:
            return
        epoch = self._election.epoch
        assert epoch is not None  # since it leads
        self._state = ControlState.begun(epoch) if known is None else known.taken_over(epoch)
        if known is not None:
            self._membership.load_state_dict(known.membership)
            self._over = self._membership.end is not None
            _log.warning("this controller has taken over the job (epoch %d)", epoch)
        lost_in = max(0.0, self._election.absent_are_lost_at - time.monotonic())
        doors = {} if known is None else known.doors
        for node in expected - {peer.node for peer in follow}:
            self._is_gone(node, Gone(now + lost_in), doors.get(str(node)))
        self._disturbed = now
        for peer in follow:
            self._admit(peer, self._state)

    def _admit(self, peer: Peer, state: ControlState) -> None:
        peer.admitted = True
        hello = peer.hello
        state.has_come(peer.node, peer.door)
        self._post(peer, "state", **state.told)
        self._beat(peer, hello["at"])  # its workers have a lease before there are any
        self._has_news = True
        self._obey(self._membership.joined(peer.node, peer.workers, hello["generation"], hello["asked"]))
        if self._membership.places.of(peer.node) is None and not self._over:
            _log.warning("node %d is there, and waits as a spare", peer.node)

    # what agents say, and what they are told

    def _hear(self, peer: Peer, message: Message) -> None:
        said, membership = message.header, self._membership
        if message.kind == "ended":
            self._obey(membership.ended(said["worker"], said["code"], said["why"], said["gives_back"]))
            self._post(peer, "noted", worker=said["worker"])
        elif message.kind == "built":
            self._obey(membership.built(said["worker"]))
        elif message.kind == "here":
            self._obey(membership.here(said["worker"], said["generation"]))
        elif message.kind == "met":
            self._obey(membership.met(said["worker"], said["generation"]))
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
                self._tell(order.node, "start", worker=order.worker, rank=order.rank,
                           generation=order.generation, together=order.together)  # fmt: skip
            elif isinstance(order, Kill):
                self._tell(order.node, "kill", worker=order.worker)
            elif isinstance(order, Abort):
                self._disturbed = self._clock.now
                _log.warning("generation %d: %s", order.generation, order.reason)
                self._tell_all("abort", generation=order.generation, reason=order.reason)
            elif isinstance(order, Go):
                self._go(order.generation)
            elif isinstance(order, End):
                if order.reason and not self._over:
                    _log.error("%s", order.reason)
                self._over = True
                self._tell_all("end", **_told(order))

    def _go(self, generation: int) -> None:
        assert self._store is not None and self._state is not None  # it has taken over
        if self._store.address:  # else as soon as it is there
            told = {"epoch": self._election.epoch, "job": self._state.job, "store": self._store.address}
            self._tell_all("go", generation=generation, **told)

    def _go_at_last(self) -> None:
        if self._state is not None and self._membership.running:
            self._go(self._membership.generation)

    def _remember(self) -> None:
        """Before anybody hears of it: what was ordered is known to all, and what was counted is counted."""
        assert self._state is not None  # only who has taken over orders
        if self._state.changes(self._membership.state_dict()):
            self._tell_all("state", **self._state.told)

    def _tell_all(self, kind: str, **what) -> None:
        for node in list(self._agents):
            self._tell(node, kind, **what)

    def _tell(self, node: int, kind: str, **what) -> None:
        peer = self._agents.get(node)
        if peer is not None and peer.admitted:
            self._post(peer, kind, **what)

    @staticmethod
    def _post(peer: Peer, kind: str, **what) -> None:
        try:
            peer.connection.post(Message({"kind": kind} | what))
        except WireError:
            pass  # it is gone, and whoever serves it will say so


def _told(end: End) -> dict:
    return {"code": end.code, "leaving": end.leaving, "gives_back": end.gives_back}


async def _end(task: asyncio.Task) -> None:
    task.cancel()
    await asyncio.wait([task])


@dataclass(eq=False)
class Gone:
    """A node has no connection.

    Attributes:
        lost_at: when its workers have ended for certain.
        instance: of its agent; empty if that is not known.
    """

    lost_at: float
    instance: str = ""


@dataclass
class Waiting:
    """Nodes are missing.

    Attributes:
        since: when.
        tell_at: when to say so next.
    """

    since: float
    tell_at: float


def waiting_for(missing: list[int], left_s: float, limit: str) -> str:
    """The sentence that says which nodes are missing, and what to do about it."""
    commands = ", ".join(f"`mocrun ... --node-rank {node}`" for node in missing)
    return f"{nodes(missing)} missing: waiting for a spare, or for {commands}; giving up in {left_s:.0f} s ({limit})"


def parser() -> argparse.ArgumentParser:
    """The command line of a controller on a machine of its own; those of its job's launchers that it needs."""
    flags = argparse.ArgumentParser("python -m moc.runtime.controller", description=(__doc__ or "").partition("\n")[0])
    add: Callable = flags.add_argument
    add("--listen", required=True, metavar="HOST:PORT", help="where agents find it: their --rdzv-endpoint")
    add("--nnodes", type=int, required=True, help="as the launchers'")
    add("--nproc-per-node", type=int, required=True, help="as the launchers'")
    add("--spares", type=int, default=0, help="as the launchers' (default: 0)")
    add("--max-restarts", type=int, default=1000, help="as the launchers' (default: 1000)")
    add("--silence-timeout", type=float, default=30.0, help="as the launchers' (default: 30)")
    add("--max-wait", type=float, default=1800.0, help="as the launchers' (default: 1800)")
    add("--candidate", default="0/1", metavar="I/N", help="which of N controllers this one is (default: 0/1)")
    add("--listen-fd", type=int, help=argparse.SUPPRESS)
    add("--beyond-loopback", action="store_true", help="--listen may be an address that other machines can reach")
    return flags


def main() -> None:
    """Runs the controller as a process of its own."""
    own = parser().parse_args()
    if own.listen_fd is not None:  # a launcher has started it; else it stands for itself
        belong()
    logging.basicConfig(format="mocrun: %(message)s", stream=sys.stderr)
    index, candidates = map(int, own.candidate.split("/"))
    size = own.nnodes * own.nproc_per_node
    membership = Membership(size, own.nproc_per_node, own.max_restarts)
    election = Election(index, candidates, own.nnodes + own.spares, Times(own.silence_timeout))
    controller = Controller(membership, election, own.max_wait)
    listener = None if own.listen_fd is None else socket.socket(fileno=own.listen_fd)
    serving = controller.run(own.listen, token_from_environment(), own.beyond_loopback, listener)
    sys.exit(asyncio.run(serving))


if __name__ == "__main__":
    main()
