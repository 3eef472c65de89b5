"""Workers that each lead a node, and keep copies for one another; no model is trained."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from moc.policy import Every
from moc.policy.interface import Full
from moc.recovery.copy_placement import place_copies
from moc.runtime import environment, protocol
from moc.runtime.collectives import gather
from moc.session.helpers import RetentionClient
from moc.session.peers import Peers
from moc.session.tiers import Tiers
from moc.state.operators import Operator, Region
from moc.store.manifest import FileEntry, Manifest, OperatorEntry, compute_digest
from moc.store.shard_file import BoxTensor, FileLayout, write_shard_file
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name, shard_file_name
from tests.worlds import REPOSITORY


class Node:
    """One worker, its node's memory and its replica server."""

    def __init__(self, memory: Path, directory: Path):
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        os.environ[protocol.TOKEN_VARIABLE] = "ab" * 32
        os.environ[environment.REPLICA_SERVER] = f"unix:{directory}/{self.rank}"
        self.address = "127.0.0.1:0"
        self.start_replica_server()
        self.store = Store(LocalStorage(memory / str(self.rank), in_memory=True), allows_slack=True)
        self.messages: list[str] = []
        self.events, self.written = self, []
        self.peers: Peers | None = None

    def start_replica_server(self) -> None:
        """The first time, or again where it was."""
        command = (
            "-m",
            "moc.runtime.replica_server",
            "--listen",
            self.address,
            "--orders",
            os.environ[environment.REPLICA_SERVER],
        )
        self.replica_server = subprocess.Popen(
            [sys.executable, *command], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        )
        self.address = self.replica_server.stdout.readline().strip()

    def end_replica_server(self) -> None:
        """It dies."""
        self.replica_server.kill()
        self.replica_server.wait()
        self.replica_server.stdout.close()

    def message(self, text: str) -> None:
        """As a log."""
        self.messages.append(text)

    def write(self, event: str, **fields) -> None:
        """As a log's events."""
        self.written.append([event, fields])

    def join(self) -> None:
        """As a worker does when it begins, the first time or again."""
        if self.peers is not None:
            self.peers.close()
        names = tuple(map(str, range(self.size)))
        tiers = Tiers(self.store, self.store, names, True, (self.rank,), None, 2)
        policy = Full([Operator("w", "output", None, None, 300)], Every(1))
        self.peers = Peers(
            tiers,
            policy,
            list(names),
            place_copies(self.size, self.size - 1),
            rate=None,
            retention_client=RetentionClient(),
        )
        self.peers.join()

    def publish(self, iteration: int) -> None:
        """This node's part of a snapshot."""
        values = torch.full((100,), float(10 * iteration + self.rank))
        tensor = BoxTensor("w", "master", (300,), Region((100 * self.rank,), (100,)), values)
        path = Path(self.store.storage.root) / checkpoint_name(iteration) / shard_file_name(self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_shard_file(path, [tensor])
        header_bytes = FileLayout([tensor.box]).header_bytes
        header = compute_digest(path.read_bytes()[:header_bytes])
        file = FileEntry(path.stat().st_size, header_bytes, header)
        operators = {"w": OperatorEntry("full", None, {"master": 100})}
        self.store.publish(Manifest(iteration, "full", self.size, {path.name: file}, operators))

    def lose_memory(self) -> None:
        """All of it."""
        shutil.rmtree(self.store.storage.root)
        self.store.storage.root.mkdir()

    def damage_copy(self, of: int, iteration: int) -> None:
        """Changes the last byte of a copy."""
        path = self.store.storage.root / f"of_{of}" / checkpoint_name(iteration) / shard_file_name(of)
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    def has(self) -> dict[str, list[int]]:
        """By directory, the iterations that are published there."""
        root = self.store.storage.root
        found = {path.name: Store(LocalStorage(path)).iterations() for path in root.glob("of_*")}
        return dict(sorted({"own": self.store.iterations(), **found}.items()))

    def value(self, iteration: int) -> float:
        """The last value of its own part."""
        path = self.store.storage.root / checkpoint_name(iteration) / shard_file_name(self.rank)
        size = self.store.read_manifest(iteration).files[path.name].bytes
        return torch.frombuffer(bytearray(path.read_bytes()[size - 4 : size]), dtype=torch.float32).item()


def lose_and_restore(memory: str, directory: str) -> dict:
    """Three nodes keep copies for each other; the first loses its memory, copies are damaged, replica servers die.

    Returns:
        What this node had at each stage, and what was said.
    """
    node, told = Node(Path(memory), Path(directory)), {}
    node.join()
    for iteration in (1, 2):
        node.publish(iteration)
        node.peers.replicate(iteration).result(60)
    told["copied"] = node.has()
    _all_are_here()

    _lose_first(node, damaged={1: 2})
    told["another copy"] = node.has() | {"value": node.value(2)}
    node.peers.continue_from([2], node)
    told["gone on"] = node.has()

    node.end_replica_server()
    node.start_replica_server()
    node.publish(3)
    node.peers.replicate(3).result(60)
    _all_are_here()
    _lose_first(node, damaged={1: 3, 2: 3})
    told["older"] = node.has() | {"value": node.value(2)}

    node.end_replica_server()
    told["messages"], told["events"] = node.messages, node.written
    return told


def _lose_first(node: Node, damaged: dict[int, int]) -> None:
    if node.rank == 0:
        node.lose_memory()
    if node.rank in damaged:
        node.damage_copy(of=0, iteration=damaged[node.rank])
    _all_are_here()
    node.join()
    node.peers.restore(node)


def _all_are_here() -> None:
    gather(None)  # a barrier
