"""Connects a worker to its node's replica server."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from moc.runtime import environment
from moc.runtime.connections import Connection, connect, patiently
from moc.runtime.job_token import token_from_environment
from moc.runtime.message import Message
from moc.runtime.pull import Pulled, Wanted
from moc.store.errors import CheckpointError, NoRoomError


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
        return patiently(lambda: cls(connect(address, token), node, root))

    def pull(self, wanted: Wanted) -> tuple[Pulled, float]:
        """Copies a snapshot to this node; returns the result and the duration in seconds.

        Raises:
            NoRoomError: this node lacks memory for the copy.
            CheckpointError: the copy failed.
            PeerGoneError: the replica server has disconnected, or this client was closed.
        """
        self._connection.send(Message({"kind": "pull", "wanted": dataclasses.asdict(wanted)}))
        answer = self._connection.recv().header
        if answer["kind"] == "failed":
            raise (NoRoomError if answer["no_room"] else CheckpointError)(answer["why"])
        return Pulled(*(answer[name] for name in Pulled._fields)), answer["seconds"]

    def close(self) -> None:
        """Closes the connection; any thread may call it."""
        self._connection.close()
