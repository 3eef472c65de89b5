"""The process that keeps a job together: hears from the agents who lives, and tells them what the membership wants.

What it knows, the agents can tell it again, so it can die and be started anew while training goes on.  It also has the
store over which process groups find each other, so that no worker has to live for the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from moc.runtime import async_connections as wire
from moc.runtime.children import belong
from moc.runtime.job_token import token_from_environment
from moc.runtime.membership import Abort, End, Go, Kill, Membership, Order, Start, Worker, nodes
from moc.runtime.message import Message
from moc.runtime.wire import WireError
from moc.store.durable import write_durably

TELL_FIRST_S, TELL_S = 5.0, 30.0
"""When, and then how often, the console says which nodes are missing."""

BEGIN_S = 600.0
"""How long nodes have to come at the beginning of the job, if ``--max-wait`` is less."""

CALM_S = 600.0
"""After so long without a new generation, suspicions before it do not count any more."""

DOUBT_S = 2.0
"""After a worker has lost connections and no loss was heard of for so long, a generation begins without one."""

_log = logging.getLogger("moc")


class Controller:
    """Takes messages of agents to the membership, and its orders to the agents.

    Args:
        membership: of the job.
        silence_s: an agent that has said nothing for so long is lost with its machine.
        max_wait_s: how long nodes that are missing are waited for.
        state: file for what the agents cannot tell a controller that is started again; taken up if it is there.
    """

    def __init__(self, membership: Membership, silence_s: float, max_wait_s: float, state: Path):
        self._membership, self._silence_s, self._max_wait_s = membership, silence_s, max_wait_s
        self._state, self._written = state, ""
        self._agents: dict[int, wire.AsyncConnection] = {}
        self._gone: dict[int, float] = {}  # nodes that may come back, and since when they are gone
        self._waiting: Waiting | None = None
        self._store, self._store_address = None, ""
        self._over = False  # and the console says why
        self._disturbed = time.monotonic()
        if state.exists():
            membership.load_state_dict(json.loads(state.read_text()))
            self._over = membership.end is not None
            self._gone = dict.fromkeys(membership.places.filled_by.values(), time.monotonic())

    async def run(self, address: str, token: bytes, beyond_loopback: bool) -> None:
        """Serves agents until the job is over and all that may come back have heard of it."""
        self._open_store(address.rpartition(":")[0])
        async with await wire.serve(address, token, self._serve_agent, beyond_loopback=beyond_loopback) as server:
            print(server.address, flush=True)  # for the launcher, which may have asked for any free port
            while not self._membership.end or self._agents or self._gone:
                await asyncio.sleep(0.1)
                self._look_at_clock(time.monotonic())

    def _look_at_clock(self, now: float) -> None:
        """What follows from time alone: nodes that do not come back are lost, and not waited for without end."""
        membership = self._membership
        for node in [node for node, since in self._gone.items() if now - since > self._silence_s]:
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
        if membership.asked is not None and most > self._silence_s:  # lost since then, or no more than its connection
            most, limit = self._silence_s, "--silence-timeout"
        left = waiting.since + most - now
        if left <= 0:
            self._obey(membership.gives_up(f"nobody has come for {most:g} s ({limit})"))
        elif now >= waiting.tell_at:
            waiting.tell_at = now + TELL_S
            _log.warning("%s", waiting_for(missing, left, limit))

    def _open_store(self, host: str) -> None:
        with socket.create_server((host, 0)) as listener:  # by itself torch would listen on all interfaces
            port, descriptor = listener.getsockname()[1], os.dup(listener.fileno())
        how = dict(is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self._store = TCPStore(host, port, master_listen_fd=descriptor, **how)
        self._store_address = f"{host}:{port}"

    async def _serve_agent(self, connection: wire.AsyncConnection) -> None:
        hello = (await connection.recv()).header
        node, generation, asked = hello["node"], hello["generation"], hello["asked"]
        workers = _workers(hello["workers"])
        self._agents[node] = connection
        self._gone.pop(node, None)
        self._obey(self._membership.joined(node, workers, generation, asked))
        if self._membership.places.of(node) is None and not self._over:
            _log.warning("node %d is there, and waits as a spare", node)
        knows_end = False
        try:
            while not knows_end:
                message = await asyncio.wait_for(connection.recv(), self._silence_s)
                knows_end = message.kind == "heard"
                self._hear(message)
        except asyncio.TimeoutError:
            _log.warning("node %d has said nothing for %g s", node, self._silence_s)
        except WireError:
            pass  # it is gone; what that means follows from what the job is doing
        finally:
            if self._agents.get(node) is connection:
                del self._agents[node]
                if not knows_end:
                    self._gone[node] = time.monotonic()
                self._obey(self._membership.left(node))

    def _hear(self, message: Message) -> None:
        said, membership = message.header, self._membership
        if message.kind == "ended":
            self._obey(membership.ended(said["worker"], said["code"], said["why"]))
        elif message.kind == "built":
            self._obey(membership.built(said["worker"]))
        elif message.kind == "here":
            self._obey(membership.here(said["worker"], said["generation"]))
        elif message.kind == "suspects":
            asyncio.get_running_loop().call_later(DOUBT_S, self._believe, said["worker"], said["generation"])
        elif message.kind == "hangs":
            self._obey(membership.suspected(said["worker"], said["generation"], said["how"]))
        elif message.kind == "stopping":
            self._obey(membership.stopping(said["signal"]))

    def _believe(self, worker: str, generation: int) -> None:
        self._obey(self._membership.suspected(worker, generation))

    def _obey(self, orders: list[Order]) -> None:
        self._remember()
        for order in orders:
            if isinstance(order, Start):
                self._tell(order.node, "start", worker=order.worker, rank=order.rank,
                           generation=order.generation, together=order.together)  # fmt: skip
            elif isinstance(order, Kill):
                self._tell(order.node, "kill", worker=order.worker)
            elif isinstance(order, Abort):
                self._disturbed = time.monotonic()
                _log.warning("generation %d: %s", order.generation, order.reason)
                self._tell_all("abort", generation=order.generation, reason=order.reason)
            elif isinstance(order, Go):
                self._tell_all("go", generation=order.generation, store=self._store_address)
            elif isinstance(order, End):
                if order.reason and not self._over:
                    _log.error("%s", order.reason)
                self._over = True
                self._tell_all("end", code=order.code, leaving=order.leaving)

    def _remember(self) -> None:
        """Before anybody hears of it: what was ordered is known, and what was counted is counted."""
        text = json.dumps(self._membership.state_dict())
        if text != self._written:
            write_durably(self._state, text)
            self._written = text

    def _tell_all(self, kind: str, **what) -> None:
        for node in list(self._agents):
            self._tell(node, kind, **what)

    def _tell(self, node: int, kind: str, **what) -> None:
        try:
            self._agents[node].post(Message({"kind": kind} | what))
        except (KeyError, WireError):
            pass  # it is gone, and whoever serves it will say so


def _workers(told: list[dict]) -> list[Worker]:
    try:
        return [Worker(**worker) for worker in told]
    except TypeError as error:
        raise WireError(f"what its hello says of workers cannot be understood ({error})") from None


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


def main() -> None:
    """Runs the controller as a process of its own."""
    belong()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--listen", required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--per-node", type=int, required=True)
    parser.add_argument("--max-restarts", type=int, required=True)
    parser.add_argument("--silence", type=float, required=True)
    parser.add_argument("--max-wait", type=float, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--beyond-loopback", action="store_true")
    own = parser.parse_args()
    logging.basicConfig(format="mocrun: %(message)s", stream=sys.stderr)
    membership = Membership(own.size, own.per_node, own.max_restarts)
    controller = Controller(membership, own.silence, own.max_wait, own.state)
    asyncio.run(controller.run(own.listen, token_from_environment(), own.beyond_loopback))


if __name__ == "__main__":
    main()
