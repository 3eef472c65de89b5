"""A worker's side of the replica server of its node."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

from moc.runtime import environment
from moc.runtime.connections import Connection, connect
from moc.runtime.job_token import token_from_environment
from moc.runtime.message import Message
from moc.runtime.pull import Wanted
from moc.runtime.wire import PeerGoneError
from moc.store.errors import CheckpointError

PATIENCE_S = 60.0
"""How long a replica server may take to start; or, one that hangs, to be started again."""


class ReplicaClient:
    """Gives orders for one node; one thread at a time.  Whatever is under way when it is closed, is given up.

    Args:
        connection: to the replica server.
        node: name of the node that this worker leads.
        root: its memory.

    Attributes:
        address: where replica servers of other nodes read.
    """

    def __init__(self, connection: Connection, node: str, root: Path):
        self._connection = connection
        connection.send(Message({"kind": "offer", "node": node, "root": str(root)}))
        self.address: str = connection.recv().header["address"]

    @classmethod
    def connect(cls, node: str, root: Path) -> ReplicaClient:
        """Offers a node's memory to the replica server that the environment names; nothing is under way for it then.

        Raises:
            PeerGoneError: there is none.
        """
        address, deadline = os.environ[environment.REPLICA_SERVER], time.monotonic() + PATIENCE_S
        while True:
            try:
                return cls(connect(address, token_from_environment()), node, root)
            except PeerGoneError:  # it may just be starting
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def pull(self, wanted: Wanted) -> tuple[int, float]:
        """Has a snapshot brought here.

        Returns:
            Bytes that were copied, and seconds that it took.

        Raises:
            CheckpointError: it cannot be had.
            PeerGoneError: the replica server is gone, or this was closed.
        """
        self._connection.send(Message({"kind": "pull", "wanted": dataclasses.asdict(wanted)}))
        answer = self._connection.recv().header
        if answer["kind"] == "failed":
            raise CheckpointError(answer["why"])
        return answer["bytes"], answer["seconds"]

    def close(self) -> None:
        """From any thread."""
        self._connection.close()
