"""The process that keeps a job together: hears from the agents who lives, and tells them what the membership wants.

What it knows, the agents can tell it again, so it can die and be started anew while training goes on.  It also has the
store over which process groups find each other, so that no worker has to live for the others.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from datetime import timedelta

from torch.distributed import TCPStore

from moc.runtime import async_connections as wire
from moc.runtime.job_token import token_from_environment
from moc.runtime.membership import Abort, End, Go, Kill, Membership, Order, Start, Worker
from moc.runtime.message import Message
from moc.runtime.wire import WireError
from moc.runtime.zygote import die_with_parent

DOUBT_S = 2.0
"""After a worker has lost connections and no loss was heard of for so long, a generation begins without one."""

_log = logging.getLogger("moc")


class Controller:
    """Takes messages of agents to the membership, and its orders to the agents.

    Args:
        membership: of the job.
        silence_s: an agent that has said nothing for so long is lost with its machine.
    """

    def __init__(self, membership: Membership, silence_s: float):
        self._membership, self._silence_s = membership, silence_s
        self._agents: dict[int, wire.AsyncConnection] = {}
        self._store, self._store_address = None, ""
        self._over = asyncio.Event()

    async def run(self, address: str, token: bytes, beyond_loopback: bool) -> None:
        """Serves agents until the job is over and all of them have left."""
        self._open_store(address.rpartition(":")[0])
        async with await wire.serve(address, token, self._serve_agent, beyond_loopback=beyond_loopback) as server:
            print(server.address, flush=True)  # for the launcher, which may have asked for any free port
            await self._over.wait()
            while self._agents:
                await asyncio.sleep(0.05)

    def _open_store(self, host: str) -> None:
        with socket.create_server((host, 0)) as listener:  # by itself torch would listen on all interfaces
            port, descriptor = listener.getsockname()[1], os.dup(listener.fileno())
        how = dict(is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self._store = TCPStore(host, port, master_listen_fd=descriptor, **how)
        self._store_address = f"{host}:{port}"

    async def _serve_agent(self, connection: wire.AsyncConnection) -> None:
        hello = (await connection.recv()).header
        node = hello["node"]
        self._agents[node] = connection
        workers = [Worker(**worker) for worker in hello["workers"]]
        self._obey(self._membership.joined(node, workers, hello["generation"]))
        try:
            while True:
                self._hear(await asyncio.wait_for(connection.recv(), self._silence_s))
        except asyncio.TimeoutError:
            _log.warning("node %d has said nothing for %g s", node, self._silence_s)
        except WireError:
            pass  # it is gone; what that means follows from what the job is doing
        finally:
            if self._agents.get(node) is connection:
                del self._agents[node]
                self._obey(self._membership.left(node))

    def _hear(self, message: Message) -> None:
        said, membership = message.header, self._membership
        if message.kind == "ended":
            self._obey(membership.ended(said["worker"], said["code"]))
        elif message.kind == "built":
            self._obey(membership.built(said["worker"]))
        elif message.kind == "here":
            self._obey(membership.here(said["worker"], said["generation"]))
        elif message.kind == "suspects":
            asyncio.get_running_loop().call_later(DOUBT_S, self._believe, said["worker"], said["generation"])
        elif message.kind == "stopping":
            self._obey(membership.stopping())

    def _believe(self, worker: str, generation: int) -> None:
        self._obey(self._membership.suspected(worker, generation))

    def _obey(self, orders: list[Order]) -> None:
        for order in orders:
            if isinstance(order, Start):
                self._tell(order.node, "start", worker=order.worker, rank=order.rank,
                           generation=order.generation, together=order.together)  # fmt: skip
            elif isinstance(order, Kill):
                self._tell(order.node, "kill", worker=order.worker)
            elif isinstance(order, Abort):
                _log.warning("generation %d: %s", order.generation, order.reason)
                self._tell_all("abort", generation=order.generation, reason=order.reason)
            elif isinstance(order, Go):
                self._tell_all("go", generation=order.generation, store=self._store_address)
            elif isinstance(order, End):
                self._tell_all("end", code=order.code, reason=order.reason)
                self._over.set()

    def _tell_all(self, kind: str, **what) -> None:
        for node in list(self._agents):
            self._tell(node, kind, **what)

    def _tell(self, node: int, kind: str, **what) -> None:
        try:
            self._agents[node].post(Message({"kind": kind} | what))
        except (KeyError, WireError):
            pass  # it is gone, and whoever serves it will say so


def main() -> None:
    """Runs the controller as a process of its own."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # they may go to all processes; the agents act
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--listen", required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--per-node", type=int, required=True)
    parser.add_argument("--max-restarts", type=int, required=True)
    parser.add_argument("--silence", type=float, required=True)
    parser.add_argument("--beyond-loopback", action="store_true")
    own = parser.parse_args()
    logging.basicConfig(format="mocrun: %(message)s", stream=sys.stderr)
    controller = Controller(Membership(own.size, own.per_node, own.max_restarts), own.silence)
    asyncio.run(controller.run(own.listen, token_from_environment(), own.beyond_loopback))


if __name__ == "__main__":
    main()
