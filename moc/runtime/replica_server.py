"""The replica server of a node: copies other nodes' snapshots into this node's memory, and serves its own.

Each node has one, started by its agent, so that copies take no time of the workers' interpreters.  It listens on:

* a Unix socket, for workers of this node (:class:`ReplicaClient`): *offer* registers a directory in memory and cancels
  pending orders for that node, and *pull* copies a snapshot into it.  The agent's health check is *ask*;
* a port, for the replica servers of other nodes: only reads of snapshot files in the offered directories.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import sys
import time
from pathlib import Path

from moc.cli_output import Parser, log_to_stderr
from moc.errors import UserError, cause_of, with_code
from moc.runtime import async_connections, child_processes, environment
from moc.runtime.connections import Connection, connect, interface_address, local_address_towards, retry_connect
from moc.runtime.protocol import Message, WireError, token_from_environment
from moc.runtime.replica_transfer import (
    REQUEST_BYTES,
    AbsentError,
    CopyRequest,
    CopyResult,
    copy_snapshot,
    snapshot_file,
    snapshots_directory,
)
from moc.runtime.termination import FAILED
from moc.store.errors import OUT_OF_SPACE_ERRNOS, CheckpointError, DamagedTensorError, InsufficientMemoryError

_RETRY_S = 0.02
_WARN_AFTER_S = 5.0
_HEALTH_CHECK_S = 5.0
_HANG_TIMEOUT_S = 15.0

_log = logging.getLogger("moc")


class ReplicaServerError(UserError, OSError):
    """The replica server of this node cannot be started."""


class ReplicaServer:
    """Answers reads at its ``address``, and executes orders, one at a time for each node."""

    def __init__(self, token: bytes, address: str = ""):
        self._token, self.address = token, address
        self._roots: dict[str, Path] = {}
        self._clients: dict[str, async_connections.AsyncConnection] = {}
        self._pending: dict[str, set[asyncio.Task]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def serve_reads(self, connection: async_connections.AsyncConnection) -> None:
        """Serves another replica server."""
        while True:
            await connection.send(self._read((await connection.recv()).header))

    async def serve_orders(self, connection: async_connections.AsyncConnection) -> None:
        """Executes the orders of the worker that leads a node; cancels pending ones when it disconnects."""
        node = None
        try:
            while True:
                order = (await connection.recv()).header
                if order["kind"] == "ask":  # answered immediately, even while copies are in progress
                    connection.post(Message({"kind": "well"}))
                elif order["kind"] == "offer":
                    node = order["node"]
                    await self._cancel_orders(node)
                    self._roots[node], self._clients[node] = Path(order["root"]), connection
                    connection.post(Message({"kind": "offered", "address": self.address}))
                elif node is None:
                    raise WireError("the worker gives an order before it has offered anything")
                elif order["kind"] == "pull":
                    task = asyncio.create_task(self._execute(node, CopyRequest(**order["wanted"]), connection))
                    self._pending[node].add(task)
                    task.add_done_callback(self._pending[node].discard)
        finally:
            if node is not None and self._clients.get(node) is connection:
                await self._cancel_orders(node)

    async def _cancel_orders(self, node: str) -> None:
        """Cancels all orders for a node, and waits until none is pending."""
        orders = list(self._pending.setdefault(node, set()))
        for order in orders:
            order.cancel()
        await asyncio.gather(*orders, return_exceptions=True)
        self._locks[node] = asyncio.Lock()

    async def _execute(self, node: str, request: CopyRequest, connection: async_connections.AsyncConnection) -> None:
        async with self._locks[node]:
            start = time.perf_counter()
            try:
                pulled = await self._copy(node, request)
                reply = {"kind": "pulled", "seconds": time.perf_counter() - start, **pulled._asdict()}
            except (AbsentError, CheckpointError, DamagedTensorError, WireError, ValueError, OSError) as error:
                lacks_memory = (
                    isinstance(error, InsufficientMemoryError)
                    or isinstance(error, OSError)
                    and error.errno in OUT_OF_SPACE_ERRNOS
                )
                reply = {"kind": "failed", "why": with_code(error), "no_room": lacks_memory}
        with contextlib.suppress(WireError):
            connection.post(Message(reply))

    async def _copy(self, node: str, request: CopyRequest) -> CopyResult:
        root, local = self._roots[node], None if node == request.of else self._roots[node]
        warn_at = time.monotonic() + _WARN_AFTER_S
        while True:
            try:
                return await copy_snapshot(request, self._token, snapshots_directory(root, node, request.of), local)
            except (AbsentError, WireError) as error:  # the holder may still commit, or be restarted
                if not request.patient:
                    raise
                if time.monotonic() > warn_at:
                    _log.warning("node %s waits for the snapshot of node %s: %s", node, request.of, error)
                    warn_at = float("inf")
                await asyncio.sleep(_RETRY_S)

    def _read(self, request: dict) -> Message:
        try:
            root = self._roots[request["node"]]
        except (KeyError, TypeError):
            return Message({"kind": "absent"})
        try:
            location = (request[name] for name in ("node", "of", "iteration", "file"))
            return _read_range(snapshot_file(root, *location), request["start"], min(request["bytes"], REQUEST_BYTES))
        except FileNotFoundError:
            return Message({"kind": "absent"})
        except (KeyError, TypeError, ValueError, OverflowError, OSError) as error:
            _log.warning("the replica server of copies has refused to read: %s", error)
            return Message({"kind": "refused", "why": cause_of(error)})


def _read_range(path: Path, start: int, nbytes: int) -> Message:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        return Message({"kind": "data", "size": os.fstat(descriptor).st_size}, os.pread(descriptor, nbytes, start))
    finally:
        os.close(descriptor)


async def run_replica_server(
    controllers: list[str], orders: str, token: bytes, timeout_s: float = _HANG_TIMEOUT_S, interface: str | None = None
) -> None:
    """Runs a replica server as a child process, restarted at the same address when it dies or hangs.

    Args:
        controllers: addresses; reads are served on the interface that routes to the first one that resolves.
        orders: ``unix:/path`` for the workers of this node.
        token: the job's secret.
        timeout_s: seconds without an answer after which it is killed.
        interface: name of another network interface for reads.

    Raises:
        OSError: it cannot be started, or there is no such interface.
    """
    host = interface_address(interface) if interface is not None else await _local_address_towards(controllers)
    listen = f"{host}:0"
    while True:
        command = "moc.runtime.replica_server", "--listen", listen, "--orders", orders
        process = await child_processes.start_reporting(*command)
        try:
            assert process.stdout is not None  # a pipe
            address = (await process.stdout.readline()).decode().strip()
            if address:
                listen = address
                reason = await child_processes.wait_or_kill(
                    process, orders, token, min(_HEALTH_CHECK_S, timeout_s), timeout_s
                )
            elif listen.endswith(":0"):
                raise ReplicaServerError(
                    f"the replica server does not start at {listen}. Fix: look at what it wrote above",
                    code="replica-server-cannot-start",
                )
            else:  # another process has taken its port
                reason, listen = "cannot listen where it was", f"{listen.rpartition(':')[0]}:0"
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        _log.warning("the replica server %s: it is started again", reason)


async def _local_address_towards(controllers: list[str]) -> str:
    while True:
        for controller in controllers:
            with contextlib.suppress(OSError):  # the host may not resolve yet; the agent reports it if it never does
                return await asyncio.to_thread(local_address_towards, controller)
        await asyncio.sleep(0.5)


async def _serve(listen: str, orders: str, token: bytes) -> None:
    replica_server = ReplicaServer(token)
    # reads use the interface towards the controller, which is loopback only if the controller's is
    async with (
        await async_connections.serve(listen, token, replica_server.serve_reads, beyond_loopback=True) as reads,
        await async_connections.serve(orders, token, replica_server.serve_orders),
    ):
        replica_server.address = reads.address
        with open(child_processes.report_descriptor(), "w") as agent:
            agent.write(f"{reads.address}\n")
        await asyncio.Event().wait()


def main() -> None:
    """Runs a replica server as a separate process."""
    child_processes.attach_to_parent()
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--listen", required=True)
    parser.add_argument("--orders", required=True)
    flags = parser.parse_args()
    log_to_stderr()
    try:
        asyncio.run(_serve(flags.listen, flags.orders, token_from_environment()))
    except FileNotFoundError:  # the launcher has exited meanwhile, and removed its socket directory
        sys.exit(FAILED)


if __name__ == "__main__":
    main()


class ReplicaClient:
    """Sends orders for the node that this worker leads, from one thread at a time; closing it cancels pending ones.

    Args:
        connection: connection to the replica server.
        node: name of the node.
        root: directory of its memory.

    Attributes:
        address: address for reads by other nodes' replica servers.
    """

    def __init__(self, connection: Connection, node: str, root: Path):
        self._connection = connection
        connection.send(Message({"kind": "offer", "node": node, "root": str(root)}))
        self.address: str = connection.recv().header["address"]

    @classmethod
    def connect(cls, node: str, root: Path) -> ReplicaClient:
        """Offers a node's memory to the replica server that the environment names; cancels its earlier orders.

        Raises:
            PeerGoneError: no replica server answers.
        """
        address, token = os.environ[environment.REPLICA_SERVER], token_from_environment()
        return retry_connect(lambda: cls(connect(address, token), node, root))

    def copy(self, request: CopyRequest) -> tuple[CopyResult, float]:
        """Copies a snapshot to this node; returns the result and the duration in seconds.

        Raises:
            InsufficientMemoryError: this node lacks memory for the copy.
            CheckpointError: the copy failed.
            PeerGoneError: the replica server has disconnected, or this client was closed.
        """
        self._connection.send(Message({"kind": "pull", "wanted": dataclasses.asdict(request)}))
        reply = self._connection.recv().header
        if reply["kind"] == "failed":
            raise (InsufficientMemoryError if reply["no_room"] else CheckpointError)(reply["why"])
        return CopyResult(*(reply[name] for name in CopyResult._fields)), reply["seconds"]

    def close(self) -> None:
        """Closes the connection; any thread may call it."""
        self._connection.close()
