"""Copies of snapshots in the memory of other nodes, and their restoration after the loss of a node (Gemini).

Placement is :mod:`moc.recovery.placement`.  The replica server of each node (:mod:`moc.runtime.replica_server`), a
process of its own, moves the bytes when the worker that leads the node asks it to.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from moc.policy import Policy
from moc.recovery.carrying import Carrier
from moc.recovery.inventory import look
from moc.recovery.lost_nodes import NodeInventory, Restore, to_restore
from moc.recovery.placement import Placement, describe, place, survival
from moc.runtime import environment
from moc.runtime.agreement import gather, run_on_all
from moc.runtime.pull import Wanted, part_of
from moc.runtime.replica_client import ReplicaClient
from moc.runtime.wire import PeerGoneError, WireError
from moc.session.carrying import carry, experts_of
from moc.session.engine import Listener
from moc.session.settings import Settings, SettingsError
from moc.session.tiers import Tiers
from moc.store.errors import CheckpointError, MissingRegionError
from moc.store.regions import RegionReader
from moc.store.storage import LocalPlace
from moc.store.store import Store

DEFAULT_REPLICAS = 2


class Copied(NamedTuple):
    """Cost of copying a snapshot to one node: bytes received from other nodes, and seconds."""

    bytes: int = 0
    seconds: float = 0.0


def join_peers(settings: Settings, tiers: Tiers, policy: Policy, log: Listener, again: bool) -> Peers | None:
    """Connects to the replica servers, with ``--ckpt-tier peers``; a collective call.

    Returns:
        None with another tier, and on a single node.

    Raises:
        SettingsError: there are fewer nodes than copies need, or no replica server.
        CheckpointError: on all workers: a replica server does not answer.
    """
    nodes = list(dict.fromkeys(tiers.nodes))
    if settings.tier != "peers":
        return None
    if environment.REPLICA_SERVER not in os.environ:
        raise SettingsError(
            "--ckpt-tier peers needs a replica server on each node: start the job with python -m moc.launch, not with "
            "torchrun."
        )
    replicas = copies_wanted(settings.replicas, len(nodes))
    if not replicas:
        if not again:
            log.message(
                "--ckpt-tier peers: with one node there are no peers, so snapshots are in its own memory alone, and "
                "after the loss of the node the run resumes from --ckpt-dir"
            )
        return None
    placement = place(len(nodes), replicas)
    peers = Peers(tiers, policy, nodes, placement, settings.replication_rate)
    peers.join()
    if not again:
        _tell(placement, nodes, log)
    return peers


def copies_wanted(told: int | None, nodes: int) -> int:
    """Returns how many other nodes keep copies of each node's snapshots: ``--replicas``, or the default.

    Raises:
        SettingsError: there are not that many other nodes.
    """
    if told is None:
        return min(DEFAULT_REPLICAS, nodes - 1)
    if told > nodes - 1:
        raise SettingsError(
            f"--replicas {told} is more than the {nodes - 1} other nodes that could keep copies: lower it, or leave it "
            f"out for as many as there are, up to {DEFAULT_REPLICAS}."
        )
    return told


def _tell(placement: Placement, nodes: list[str], log: Listener) -> None:
    log.message(describe(placement, nodes))
    log.events.write(
        "placement",
        replicas=placement.replicas,
        groups=[[nodes[number] for number in group] for group in placement.groups],
        survival={str(lost): survival(placement, lost) for lost in range(1, len(nodes) + 1)},
    )


class Peers:
    """This node's copies of other nodes' snapshots, and the other nodes' copies of its own.

    On workers that do not lead a node, every operation completes at once.

    Args:
        nodes: names of all nodes, in the order of the placement.
        rate: GB/s that a node copies at, at most; None for no limit.
    """

    def __init__(self, tiers: Tiers, policy: Policy, nodes: list[str], placement: Placement, rate: float | None):
        assert tiers.memory is not None  # copies are in it
        self._memory, self._leads = tiers.memory, tiers.leads_node
        self._operators, self._exact, self._experts = policy.operators, policy.exact, experts_of(policy)
        self._safe = 0
        self._node = tiers.nodes[tiers.node[0]]
        self._kept = [nodes[number] for number in placement.kept_by(nodes.index(self._node))]
        self._rate, self.replicas = None if rate is None else rate * 1e9, placement.replicas
        self._client: ReplicaClient | None = None
        self._addresses: dict[str, str] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot-replicate")
        self._leaving, self._left = threading.Lock(), False

    def join(self) -> None:
        """Connects to this node's replica server, and exchanges addresses with the other nodes; a collective call.

        Raises:
            CheckpointError: on all workers; a replica server does not answer.
        """
        run_on_all(self._connect, "cannot reach a replica server")
        told = gather(None if self._client is None else (self._node, self._client.address))
        self._addresses = dict(filter(None, told))

    def replicate(self, iteration: int, patient: bool = True) -> Future[Copied]:
        """Starts to copy other nodes' parts of a snapshot to this node; returns at once.

        If ``patient``, it waits for nodes that have not published yet, or cannot be reached.

        Returns:
            Done when the copies are here; fails with a CheckpointError if they cannot be had.
        """
        if self._leads:
            return self._thread.submit(self._replicate, iteration, patient)
        done: Future[Copied] = Future()
        done.set_result(Copied())
        return done

    def give_up_older(self, iteration: int) -> None:
        """Gives up copies of snapshots before an iteration: all nodes have the copies of what supersedes them."""
        for copies in self._carriers.values():
            copies.retire(iteration)
        self._safe = iteration

    def restore(self, log: Listener) -> None:
        """Restores to nodes their lost parts of the newest window that all nodes together hold, and of newer snapshots.

        A collective call.  All hashes are compared; if a copy is damaged, another copy or an older window is used.
        """
        spoilt: set[Restore] = set()
        while restores := to_restore(self._inventories(), self._operators, self._exact, spoilt):
            mine = [restore for restore in restores if self._leads and restore.of == self._node]
            told = gather([(restore, self._bring_back(restore)) for restore in mine])
            problems = {restore: problem for one in told for restore, problem in one}
            for restore in restores:
                if problem := problems[restore]:
                    spoilt.add(restore)
                    self._drop_if_damaged(restore)
                    log.message(f"WARNING: the copy of node {restore.of}'s snapshot cannot be used: {problem}")
                else:
                    log.events.write("restore", **restore._asdict())
                    log.message(
                        f"node {restore.of} has its part of the snapshot of iteration {restore.iteration} back, from "
                        f"the memory of node {restore.held_by}"
                    )

    def goes_on_from(self, iterations: Collection[int], log: Listener) -> None:
        """Makes missing copies of the snapshots still needed, and removes all other copies; a collective call."""
        problems = []
        for iteration in iterations:
            try:
                self.replicate(iteration, patient=False).result()
            except (CheckpointError, WireError) as error:
                problems.append((iteration, str(error)))
        for iteration, text in (problem for told in gather(problems) for problem in told):
            log.message(
                f"WARNING: the snapshot of iteration {iteration} has a copy less until a newer one is safe: {text}"
            )
        run_on_all(lambda: self._remove_others(iterations), "cannot tidy up old copies of snapshots")

    def _remove_others(self, iterations: Collection[int]) -> None:
        if not self._leads:
            return
        for name in self._memory.place.names():
            if name.startswith("of_") and name[len("of_") :] not in self._kept:
                self._memory.place.remove(name)
        for copies in self._copies().values():
            for other in copies.iterations():
                if other not in iterations:
                    copies.remove(other)
        for copies in self._carriers.values():
            copies.delete()
        for copies in self._copies().values():
            copies.clear_unpublished()

    def quiesce(self) -> None:
        """Ends pending work for this node; afterwards nothing is written to its memory."""
        self.close()
        if self._leads:
            with contextlib.suppress(WireError):  # a dead replica server writes nothing
                ReplicaClient.connect(self._node, self._root).close()

    def close(self) -> None:
        """Abandons pending work."""
        with self._leaving:
            self._left = True
            if self._client is not None:
                self._client.close()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _connect(self) -> None:
        if not self._leads:
            return
        try:
            client = ReplicaClient.connect(self._node, self._root)
        except WireError as error:
            raise CheckpointError(f"the replica server of node {self._node} does not answer: {error}") from None
        with self._leaving:
            self._client = client
            if self._left:
                client.close()

    def _replicate(self, iteration: int, patient: bool) -> Copied:
        amount, seconds = 0, 0.0
        for node in self._kept:
            copied = self._pull(Wanted(iteration, node, node, self._addresses[node], self._rate, patient))
            amount, seconds = amount + copied[0], seconds + copied[1]
            if patient and self._experts:
                carry(self._carriers[node], self._safe)
        return Copied(amount, seconds)

    def _pull(self, wanted: Wanted) -> tuple[int, float]:
        while True:
            try:
                assert self._client is not None  # only leaders pull
                return self._client.pull(wanted)
            except PeerGoneError:
                if self._left:
                    raise
                self._connect()  # the replica server died, and is restarted

    def _inventories(self) -> dict[str, NodeInventory]:
        mine = None
        if self._leads:
            copies = {node: look(store)[0] for node, store in self._copies().items()}
            mine = self._node, NodeInventory(look(self._memory)[0], copies)
        return dict(filter(None, gather(mine)))

    def _bring_back(self, restore: Restore) -> str | None:
        """Restores a part from a copy; returns what is wrong with the copy, or None."""
        where = restore.iteration, restore.of, restore.held_by, self._addresses[restore.held_by]
        try:
            self._pull(Wanted(*where))
            _verify(self._memory, restore.iteration)
        except (CheckpointError, MissingRegionError, WireError, OSError) as error:
            self._memory.remove(restore.iteration)
            return str(error)
        return None

    def _drop_if_damaged(self, restore: Restore) -> None:
        """Removes this node's copy if it is damaged, after another node could not use it: it is then copied again."""
        if not self._leads or restore.held_by != self._node:
            return
        copies = self._copies()[restore.of]
        try:
            _verify(copies, restore.iteration)
        except (CheckpointError, MissingRegionError):
            copies.remove(restore.iteration)

    def _copies(self) -> dict[str, Store]:
        parts = {node: part_of(self._root, self._node, node) for node in self._kept}
        return {node: Store(LocalPlace(path, in_memory=True), slack=True) for node, path in parts.items()}

    @property
    def _root(self) -> Path:
        place = self._memory.place
        assert isinstance(place, LocalPlace)  # the memory tier is local
        return place.root

    @cached_property
    def _carriers(self) -> dict[str, Carrier]:
        return {node: Carrier(copies, self._experts) for node, copies in self._copies().items()}


def _verify(store: Store, iteration: int) -> None:
    manifest = store.manifest(iteration)
    files = (store.blob(iteration, name, entry) for name, entry in manifest.files.items())
    for source in RegionReader(files).sources():
        if damage := source.damage():
            raise CheckpointError(damage)
