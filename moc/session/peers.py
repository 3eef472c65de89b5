"""Copies snapshots to the memory of other nodes, and restores them after the loss of a node (Gemini).

:mod:`moc.recovery.copy_placement` assigns the copies to nodes.  Each node's replica server
(:mod:`moc.runtime.replica_server`), a separate process, transfers the bytes when the node's leading worker requests it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from moc.errors import UserError, cause_of, with_code
from moc.fault_points import reach
from moc.policy import Policy, recovers_exactly
from moc.recovery.copy_placement import (
    Placement,
    Redundancy,
    Restore,
    describe_placement,
    not_sent,
    place_copies,
    survival,
    to_restore,
    validate_replicas,
)
from moc.recovery.expert_versions import ExpertVersions, newest_copied_iterations, partly_copied, to_copy
from moc.recovery.inventory import Fetch, NodeInventory, list_checkpoints
from moc.recovery.sources import MASTER, MEMORY, RecoveryPath
from moc.runtime import environment
from moc.runtime.collectives import gather, run_on_all
from moc.runtime.protocol import PeerGoneError, WireError
from moc.runtime.replica_server import ReplicaClient
from moc.runtime.replica_transfer import CopyRequest, CopyResult, snapshots_directory
from moc.session.engine import Listener
from moc.session.helpers import BackgroundOptimizer, RemoteExpertVersions, RetentionClient, experts_of, retain_experts
from moc.session.settings import Settings, SettingsError
from moc.session.tiers import Tiers
from moc.state.operators import Detail
from moc.store.errors import CheckpointError, InsufficientMemoryError, MissingTensorError
from moc.store.host_memory import RankMemory
from moc.store.reserved_memory import SLOTS_DIRECTORY, reserve_files
from moc.store.shard_file import ShardReader
from moc.store.storage import LocalStorage
from moc.store.store import Store, shard_file_name

_NAMED = 3  # operators in a message


class CopyOutcome(NamedTuple):
    """Cost of copying a snapshot to one node.

    Attributes:
        bytes: received from other nodes.
        seconds: duration.
        identical: bytes not sent, because this node has identical replicas.
        problems: problems of these replicas, one sentence per other node; the state was sent instead.
        missing: why this node lacks memory for copies, one sentence per other node.
    """

    bytes: int = 0
    seconds: float = 0.0
    identical: int = 0
    problems: Sequence[str] = ()
    missing: Sequence[str] = ()


def join_peers(
    settings: Settings,
    tiers: Tiers,
    policy: Policy,
    redundancy: Redundancy,
    retention_client: RetentionClient,
    log: Listener,
    is_restart: bool,
) -> Peers | None:
    """Connects to the replica servers for ``--ckpt-tier peers``; a collective call.

    Args:
        settings: settings of the session.
        tiers: tiers of its snapshots.
        policy: plans them.
        redundancy: replicated state of nodes.
        retention_client: retains experts from older copies.
        log: receives the placement.
        is_restart: this worker was in an earlier generation, which reported the placement.

    Returns:
        None on a single node.

    Raises:
        SettingsError: there are fewer nodes than copies need, or no replica server.
        CheckpointError: on all workers: a replica server does not answer.
    """
    nodes, replicas = list(dict.fromkeys(tiers.nodes)), copies_of(settings, tiers.nodes)
    if not replicas:
        if not is_restart:
            log.message(
                "--ckpt-tier peers: the only node has no peers, so snapshots are only in its own memory. After the "
                "loss of the node, the run resumes from --ckpt-dir"
            )
        return None
    identical = {frozenset(map(nodes.index, nodes_alike)): amount for nodes_alike, amount in redundancy.nbytes.items()}
    placement = place_copies(len(nodes), replicas, identical)
    peers = Peers(tiers, policy, nodes, placement, settings.replication_rate, retention_client)
    peers.join()
    if not is_restart:
        _report_placement(placement, nodes, not_sent(placement, identical), log)
    return peers


def copies_of(settings: Settings, nodes: Collection[str]) -> int:
    """Returns the number of other nodes that keep copies with ``--ckpt-tier peers``; 0 on a single node.

    Raises:
        SettingsError: there are fewer nodes than copies need, or no replica server.
    """
    if environment.REPLICA_SERVER not in os.environ:
        raise SettingsError(
            "--ckpt-tier peers needs a replica server on each node. Fix: start the job with python -m moc.launch, not "
            "with torchrun",
            code="launcher-missing",
        )
    try:
        return validate_replicas(settings.replicas, len(set(nodes)), environment.min_nodes())
    except UserError as error:
        raise SettingsError(str(error), code=error.code) from None


def _report_placement(placement: Placement, nodes: list[str], unsent: int, log: Listener) -> None:
    log.message(describe_placement(placement, nodes, unsent))
    log.events.write(
        "placement",
        replicas=placement.replicas,
        groups=[[nodes[number] for number in group] for group in placement.groups],
        not_sent_bytes=unsent,
        survival={str(lost): survival(placement, lost) for lost in range(1, len(nodes) + 1)},
    )


class Peers:
    """This node's copies of other nodes' snapshots, and the other nodes' copies of its own.

    On workers that do not lead a node, every operation completes immediately.

    Args:
        nodes: names of all nodes, in the order of the placement.
        rate: maximum copy rate of a node in GB/s; None for no limit.
        retention_client: retains experts from older copies.
    """

    def __init__(
        self,
        tiers: Tiers,
        policy: Policy,
        nodes: list[str],
        placement: Placement,
        rate: float | None,
        retention_client: RetentionClient,
    ):
        assert tiers.memory is not None  # copies are in it
        self._memory, self._leads = tiers.memory, tiers.leads_node
        self._operators, self._exact, self._experts = policy.operators, recovers_exactly(policy), experts_of(policy)
        self._names = frozenset(operator.name for operator in self._experts)
        self._durable, self._retention_client = 0, retention_client
        self.background_optimizer: BackgroundOptimizer | None = None
        """Applies the gradients of chains in copies, if wanted."""
        self._node, self._nodes = tiers.nodes[tiers.node[0]], tiers.nodes
        self.copied_nodes = [nodes[number] for number in placement.kept_by(nodes.index(self._node))]
        self._rate, self.replicas = None if rate is None else rate * 1e9, placement.replicas
        self._client: ReplicaClient | None = None
        self._addresses: dict[str, str] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot-replicate")
        self._closing, self._is_closed = threading.Lock(), False

    def join(self) -> None:
        """Connects to this node's replica server, and exchanges addresses with the other nodes; a collective call.

        Raises:
            CheckpointError: on all workers: a replica server does not answer.
        """
        run_on_all(self._connect, "cannot reach a replica server")
        addresses = gather(None if self._client is None else (self._node, self._client.address))
        self._addresses = dict(filter(None, addresses))

    def replicate(self, iteration: int, operators: Mapping[str, Detail] | None = None) -> Future[CopyOutcome]:
        """Starts to copy operators (default: all) of other nodes' parts of a snapshot to this node; does not block.

        The copy waits for nodes that have not committed yet or are unreachable.

        Returns:
            A future, done when the copies are complete; fails with CheckpointError if they are unavailable.
        """
        if self._leads:
            details = None if operators is None else {name: detail.value for name, detail in operators.items()}
            return self._thread.submit(self._replicate, iteration, details)
        future: Future[CopyOutcome] = Future()
        future.set_result(CopyOutcome())
        return future

    def reserve(self, needed: Sequence[RankMemory], small: int, worker: int, workers: int, remove_unused: bool) -> None:
        """Allocates the memory of this node's copies; each of the node's workers does so for some of the ranks.

        Args:
            needed: by rank.
            small: bytes for manifests.
            worker: number of this worker on its node.
            workers: workers of the node.
            remove_unused: remove memory of another layout; no copy may be in progress.

        Raises:
            OSError: memory is insufficient.
        """
        ranks = [(node, rank) for node in self.copied_nodes for rank, owner in enumerate(self._nodes) if owner == node]
        for node, rank in ranks[worker::workers]:
            directory = snapshots_directory(self._root, self._node, node)
            for name, sizes in {shard_file_name(rank): needed[rank].copies, **needed[rank].experts}.items():
                reserve_files(directory / SLOTS_DIRECTORY, name, sizes, remove_unused)
            LocalStorage(directory, in_memory=True).reserve.allocate(small)

    def fetch(self, fetches: Iterable[Fetch]) -> list[str]:
        """Fetches parts of snapshots, on the worker that leads a node; returns the problems."""
        problems = []
        for iteration, owner, held_by, operators in fetches:
            request = CopyRequest(
                iteration, owner, held_by, self._addresses[held_by], self._rate, False, dict(operators)
            )
            try:
                self._thread.submit(self._pull, request).result()
            except (CheckpointError, WireError) as error:
                problems.append(_describe(error))
        return problems

    def release_before(self, iteration: int) -> None:
        """Reduces copies of snapshots before an iteration, which are superseded by copies on all nodes."""
        for copies in self._versions.values():
            copies.retire(iteration)
        self._durable = iteration

    def remove(self, iteration: int) -> None:
        """Removes this node's copies of an abandoned snapshot."""
        for copies in self._copies().values():
            copies.remove(iteration)

    def restore(self, log: Listener) -> None:
        """Restores lost parts of the newest window that all nodes together hold, and of newer snapshots.

        A collective call.  All hashes are compared.  If a copy is damaged, another copy or an older window is used.
        """
        failed: set[Restore] = set()
        while restores := to_restore(self._inventories(), self._operators, self._exact, failed):
            local = [restore for restore in restores if self._leads and restore.of == self._node]
            outcomes = gather([(restore, self._restore_part(restore)) for restore in local])
            problems = {restore: problem for node_outcomes in outcomes for restore, problem in node_outcomes}
            for restore in restores:
                if problem := problems[restore]:
                    failed.add(restore)
                    self._drop_if_damaged(restore)
                    log.message(f"WARNING: the copy of node {restore.of}'s snapshot cannot be used: {problem}")
                else:
                    log.events.write("restore", **restore._asdict())
                    log.message(
                        f"node {restore.of} has its part of the snapshot of iteration {restore.iteration} back, from "
                        f"the memory of node {restore.held_by}"
                    )

    def continue_from(
        self, resumed: Collection[int], log: Listener, experts: Collection[int] = (), path: RecoveryPath | None = None
    ) -> tuple[int, ...]:
        """Makes missing copies of the snapshots still needed, and removes all other copies; a collective call.

        Args:
            resumed: iterations of the snapshots in memory that the run resumes from.
            log: receives warnings.
            experts: iterations of other snapshots, with experts.
            path: recovery path of the run; None without checkpoints.
        """
        nodes, upto = self._inventories(), 0 if path is None else path.iteration
        is_partial = bool(self._names) and partly_copied(nodes)
        extra = {*experts, *(newest_copied_iterations(nodes, self._names, upto) if is_partial else ())} - {*resumed}
        needed, problems = sorted({*resumed, *extra}), []
        for node in self.copied_nodes if self._leads else ():
            missing: dict[int, dict[str, str] | None] = dict.fromkeys(needed)
            if is_partial:
                own_parts = [part for part in nodes[node].own if part.iteration in needed]
                copies = [part for part in nodes[self._node].copies[node] if part.iteration in needed]
                missing = {**to_copy(own_parts, copies, self._names, resumed, _loaded(path))}
            problems += self._complete(node, missing)
        for iteration, text in (problem for node_problems in gather(problems) for problem in node_problems):
            log.message(
                f"WARNING: the snapshot of iteration {iteration} has a copy less until a newer one is safe: {text}"
            )
        run_on_all(lambda: self._remove_unneeded(needed), "cannot tidy up old copies of snapshots")
        return tuple(sorted(extra))

    def _complete(self, node: str, missing: Mapping[int, Mapping[str, str] | None]) -> list[tuple[int, str]]:
        """Copies the missing parts of a node's snapshots; returns the failures with their iterations."""
        problems = []
        for iteration, operators in missing.items():
            try:
                request = self._request(node, iteration, operators)
                self._thread.submit(self._pull, request).result()
            except (CheckpointError, WireError) as error:
                problems.append((iteration, _describe(error)))
        return problems

    def _remove_unneeded(self, needed: Collection[int]) -> None:
        if not self._leads:
            return
        for name in self._memory.storage.list_names():
            if name.startswith("of_") and name[len("of_") :] not in self.copied_nodes:
                self._memory.storage.remove(name)
        for copies in self._copies().values():
            for iteration in copies.iterations():
                if iteration not in needed:
                    copies.remove(iteration)
        for copies in self._versions.values():
            copies.delete()
        for copies in self._copies().values():
            copies.remove_unpublished()

    def quiesce(self) -> None:
        """Ends pending work for this node; afterwards nothing is written to its memory."""
        self.close()
        if self._leads:
            with contextlib.suppress(WireError):  # a dead replica server writes nothing
                ReplicaClient.connect(self._node, self._root).close()

    def close(self) -> None:
        """Abandons pending work."""
        with self._closing:
            self._is_closed = True
            if self._client is not None:
                self._client.close()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _connect(self) -> None:
        if not self._leads:
            return
        try:
            client = ReplicaClient.connect(self._node, self._root)
        except WireError as error:
            raise CheckpointError(
                f"the replica server of node {self._node} does not answer ({cause_of(error)}). Fix: read its output "
                "above, and start the job again",
                code="replica-server-lost",
            ) from None
        with self._closing:
            self._client = client
            if self._is_closed:
                client.close()

    def _replicate(self, iteration: int, operators: Mapping[str, str] | None) -> CopyOutcome:
        amount, identical, seconds, problems, missing = 0, 0, 0.0, [], []
        for node in self.copied_nodes:
            try:
                result, duration = self._pull(self._request(node, iteration, operators, patient=True))
            except InsufficientMemoryError as error:
                missing.append(str(error))
                self._copies()[node].abandon_save(iteration)
                continue
            amount, identical, seconds = amount + result.bytes, identical + result.alike, seconds + duration
            problems += self._replica_problems(node, iteration, result)
            if self._experts:
                retain_experts(self._versions[node], self._durable, self.background_optimizer)
        reach("peers_committed")
        return CopyOutcome(amount, seconds, identical, problems, missing)

    def _replica_problems(self, node: str, iteration: int, result: CopyResult) -> list[str]:
        """Describes problems of state that this node should hold as an identical replica."""
        problems = []
        if result.differs:
            diverged = CheckpointError(
                f"silent divergence: nodes {node} and {self._node} hold {_shorten(result.differs)} with different bits "
                f"in iteration {iteration}, so one of the nodes may compute wrongly. Fix: test their hardware, and "
                "resume from an earlier snapshot (--ckpt-step)",
                code="replicas-differ",
            )
            problems.append(with_code(diverged))
        if result.damaged:
            damaged = CheckpointError(
                f"the memory of node {self._node} is damaged: {_shorten(result.damaged)} of iteration {iteration} do "
                "not match their hash. Fix: test the memory of the node",
                code="memory-damaged",
            )
            problems.append(with_code(damaged))
        return problems

    def _request(
        self, node: str, iteration: int, operators: Mapping[str, str] | None, patient: bool = False
    ) -> CopyRequest:
        return CopyRequest(iteration, node, node, self._addresses[node], self._rate, patient, operators)

    def _pull(self, request: CopyRequest) -> tuple[CopyResult, float]:
        while True:
            try:
                assert self._client is not None  # only leaders pull
                return self._client.copy(request)
            except PeerGoneError:
                if self._is_closed:
                    raise
                self._connect()  # the replica server died, and is restarted

    def _inventories(self) -> dict[str, NodeInventory]:
        local = None
        if self._leads:
            copies = {node: list_checkpoints(store)[0] for node, store in self._copies().items()}
            local = self._node, NodeInventory(list_checkpoints(self._memory)[0], copies)
        return dict(filter(None, gather(local)))

    def _restore_part(self, restore: Restore) -> str | None:
        """Restores a part from a copy; returns the copy's problem, or None."""
        source = restore.iteration, restore.of, restore.held_by, self._addresses[restore.held_by]
        try:
            self._pull(CopyRequest(*source))
            _verify(self._memory, restore.iteration)
        except (CheckpointError, MissingTensorError, WireError, OSError) as error:
            self._memory.remove(restore.iteration)
            return _describe(error)
        return None

    def _drop_if_damaged(self, restore: Restore) -> None:
        """Removes this node's copy if it is damaged, after another node failed to use it: it is then copied again."""
        if not self._leads or restore.held_by != self._node:
            return
        copies = self._copies()[restore.of]
        try:
            _verify(copies, restore.iteration)
        except (CheckpointError, MissingTensorError):
            copies.remove(restore.iteration)

    def _copies(self) -> dict[str, Store]:
        directories = {node: snapshots_directory(self._root, self._node, node) for node in self.copied_nodes}
        return {
            node: Store(LocalStorage(path, in_memory=True), allows_slack=True) for node, path in directories.items()
        }

    @property
    def _root(self) -> Path:
        storage = self._memory.storage
        assert isinstance(storage, LocalStorage)  # the memory tier is local
        return storage.root

    @cached_property
    def _versions(self) -> dict[str, ExpertVersions]:
        return {
            node: RemoteExpertVersions(self._retention_client, copies, self._experts)
            for node, copies in self._copies().items()
        }


def _loaded(path: RecoveryPath | None) -> dict[str, set[int]]:
    """Returns, by operator, the iterations in memory whose state or gradients a run has resumed with."""
    if path is None:
        return {}
    return {
        name: {
            checkpoint.iteration for checkpoint in (base, *path.gradients.get(name, ())) if checkpoint.tier == MEMORY
        }
        for (name, part), base in path.sources.items()
        if part == MASTER
    }


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _describe(error: Exception) -> str:
    """Returns an error of a copy with its code; a connection error has none of its own."""
    if isinstance(error, WireError):
        error = CheckpointError(
            f"a replica server does not answer ({cause_of(error)}). Fix: read its output above",
            code="replica-server-lost",
        )
    return with_code(error)


def _verify(store: Store, iteration: int) -> None:
    manifest = store.read_manifest(iteration)
    files = (store.open_verified(iteration, name, entry) for name, entry in manifest.files.items())
    for source in ShardReader(files).sources():
        if damage := source.find_damage():
            raise CheckpointError(f"{damage}. Fix: test the memory of the node", code="checkpoint-damaged")
