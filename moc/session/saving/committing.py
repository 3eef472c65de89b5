"""Snapshots in progress, and their commit: once all parts are present, one worker writes the manifest."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from moc.background import GivenUpError, background, with_retries
from moc.errors import warning, with_code
from moc.fault_points import reach
from moc.policy import Policy, SnapshotPlan, recovers_exactly
from moc.recovery.inventory import COPIED, merge_complete, retain
from moc.runtime.collectives import gather, run_on_all, run_on_rank0
from moc.runtime.job import World
from moc.session.engine import Listener
from moc.session.peers import CopyOutcome
from moc.session.tiers import Tiers
from moc.snapshot.saver import Snapshot
from moc.state.operators import Region, operator_of
from moc.store.errors import CheckpointError, InsufficientMemoryError, for_each
from moc.store.header import FileLayout, StoredBox, SubFile, extract_sub_file, read_boxes
from moc.store.manifest import REPLICAS_KEY, FileEntry, Manifest, RankReport, assemble, compute_digest, replicas_entry
from moc.store.store import Store, checkpoint_name

_CHUNK = 16 << 20  # bytes per write


@dataclass(frozen=True)
class SnapshotInProgress:
    """Snapshot that is not yet committed in each of its tiers.

    Attributes:
        plan: plan of the snapshot.
        storage: the part that goes to storage; None if nothing does.
        state: the non-tensor state.
        snapshot: this worker's part.
        replicated: done when this node has its copies of other nodes' parts; None without peers.
        committed: done when the snapshot is committed in storage, or after a failure its files are removed; finished on
            workers other than rank 0.
    """

    plan: SnapshotPlan
    storage: SnapshotPlan | None
    state: dict
    snapshot: Snapshot
    replicated: Future[CopyOutcome] | None = None
    committed: Future[None] | None = None

    @property
    def iteration(self) -> int:
        """Iterations completed when it began."""
        return self.plan.iteration

    @property
    def state_in_memory(self) -> dict:
        """The state, with the names of the operators that other nodes receive copies of, if not all."""
        return self.state if self.plan.remote is None else {**self.state, COPIED: list(self.plan.remote)}

    @property
    def storage_plan(self) -> SnapshotPlan:
        """The part that goes to storage, for snapshots that do."""
        assert self.storage is not None  # only such snapshots reach the stages of storage
        return self.storage

    @property
    def out_of_memory(self) -> InsufficientMemoryError | None:
        """The error if this worker lacked memory for its part; the snapshot is then to be abandoned."""
        finalized = self.snapshot.finalized
        error = finalized.exception() if finalized.done() and not finalized.cancelled() else None
        return error if isinstance(error, InsufficientMemoryError) else None


class Failure:
    """Error of this worker that must end the run; the next all-reduce reports it to the others.

    Attributes:
        reason: the error with its code, if any is known.
        sources: functions that return such an error.
    """

    def __init__(self):
        self.reason: str | None = None
        self.sources: list[Callable[[], str | None]] = []

    def find(self) -> str | None:
        """Returns the first known error, if any; asks all sources until there is one."""
        self.reason = self.reason or next(filter(None, (source() for source in self.sources)), None)
        return self.reason

    @contextlib.contextmanager
    def recording_errors(self) -> Iterator[None]:
        """Context for operations of one worker, whose errors must reach all workers."""
        try:
            yield
        except (CheckpointError, OSError) as error:
            self.reason = with_code(error)


class Committer:
    """Makes snapshots valid by writing their manifests last; communicates with no other worker.

    In memory, the first rank of each node commits before the method returns.  In storage, rank 0 commits in the
    background.  ``replicas`` has the number of nodes that save an operator, if several do.
    """

    def __init__(
        self,
        world: World,
        policy: Policy,
        tiers: Tiers,
        layout: Mapping[str, int],
        log: Listener,
        replicas: Mapping[str, int],
    ):
        self._replicas = replicas
        self._world, self._policy, self._tiers, self._layout, self._log = world, policy, tiers, layout, log
        self._operators = {operator.name: operator for operator in policy.operators}
        self._thread, self._abandoned = background("snapshot-publish"), threading.Event()
        self._pending: list[Future] = []
        self._to_remove: set[int] = set()  # abandoned snapshots that may have files in storage

    def commit_in_memory(self, plan: SnapshotPlan, state: dict, local_report: RankReport) -> None:
        """Commits the parts of this node's workers in its memory before returning.

        ``local_report`` describes this worker's part.

        Raises:
            CheckpointError: a part is missing, or the manifest cannot be written.
        """
        assert self._tiers.memory is not None  # callers have a memory tier
        state = state | replicas_entry(plan.operators, self._replicas)
        self._commit(self._tiers.memory, plan, state, self._tiers.node, {self._world.rank: local_report})

    def commit_reported(self, store: Store, iteration: int, state: dict, ranks: Iterable[int]) -> None:
        """Commits the parts that ranks have reported, whatever the plan was, before returning.

        Raises:
            CheckpointError: the manifest cannot be written.
        """
        parts = store.read_reports(iteration, ranks)
        size = self._world.size
        if self._tiers.memory is not None:
            state = state | replicas_entry({name: None for part in parts for name in part.operators}, self._replicas)
        store.publish(assemble(parts, iteration, self._policy.name, size, [], self._layout, state))

    def commit_in_storage(
        self, plan: SnapshotPlan, state: dict, amount: int, write_s: float, pauses_s: Sequence[float] = ()
    ) -> Future:
        """Starts to commit the parts of all workers in storage, and to remove snapshots that are no longer needed.

        ``amount`` bytes were written in ``write_s`` seconds.  A failed commit is repeated after each of the pauses.
        The result is done when the snapshot is committed.
        """
        return self.in_background(self._commit_in_storage, plan, state, amount, write_s, pauses_s)

    def remove_abandoned(self, iteration: int) -> Future:
        """Starts to remove the written parts of an abandoned snapshot from storage.

        The result is done when they are removed.  A failed removal is repeated with the next one, and after the next
        commit that ends a window.
        """
        return self.in_background(self._remove, iteration)

    def in_background(self, action: Callable[..., None], *args) -> Future:
        """Starts a storage operation once all earlier ones, also of earlier generations, have ended."""
        future = self._thread.submit(action, *args)
        self._pending = [*(pending for pending in self._pending if not pending.done()), future]
        return future

    def close(self, patience: float = 0.0) -> None:
        """Abandons work that does not complete within ``patience`` seconds; it is not committed afterwards."""
        wait([future for future in self._pending if not future.cancel()], timeout=patience)
        self._abandoned.set()

    def _remove(self, iteration: int) -> None:
        self._to_remove.add(iteration)
        self._remove_all()

    def _remove_all(self) -> None:
        for_each(sorted(self._to_remove), self._remove_one)

    def _remove_one(self, iteration: int) -> None:
        self._check_abandoned()
        self._tiers.storage.abandon_save(iteration)
        self._to_remove.remove(iteration)

    def _commit_in_storage(
        self, plan: SnapshotPlan, state: dict, amount: int, write_s: float, pauses_s: Sequence[float]
    ) -> None:
        start, storage = time.perf_counter(), self._tiers.storage
        commit = functools.partial(self._commit, storage, plan, state, range(self._world.size))
        with_retries(commit, pauses_s, self._abandoned)
        reach("committed")
        if plan.ends_window:
            self._retain(plan.iteration)
        publish_s = time.perf_counter() - start
        self._log.events.write("persist", iteration=plan.iteration, bytes=amount, write_s=write_s, publish_s=publish_s)
        self._log.message(f"saved snapshot of iteration {plan.iteration} to {storage.storage.name}")

    def _retain(self, upto: int) -> None:
        storage = self._tiers.storage
        try:
            self._check_abandoned()
            retain(storage, self._policy.operators, recovers_exactly(self._policy), keep=self._tiers.keep, upto=upto)
            self._remove_all()
        except OSError as error:  # the snapshot is durable anyway; the next one retries
            self._log.message(
                warning(
                    f"old snapshots cannot be removed from {storage.storage.name} ({error.strerror or error}). Fix: "
                    "correct its permissions; the next snapshot tries again",
                    code="storage-unwritable",
                )
            )

    def _check_abandoned(self) -> None:
        if self._abandoned.is_set():
            raise GivenUpError

    def _commit(
        self,
        store: Store,
        plan: SnapshotPlan,
        state: dict,
        ranks: Iterable[int],
        local_reports: Mapping[int, RankReport] = MappingProxyType({}),
    ) -> None:
        try:
            parts = store.read_reports(plan.iteration, ranks, local_reports)
            planned = [self._operators[name] for name in plan.operators]
            manifest = assemble(parts, plan.iteration, plan.policy, self._world.size, planned, self._layout, state)
            self._check_abandoned()
            store.publish(manifest)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of iteration {plan.iteration} cannot be published in {store.storage.name} "
                f"({error.strerror or error}), and earlier ones are unchanged. Fix: make room or repair it, and start "
                "again",
                code="storage-unwritable",
            ) from error


class _Key(NamedTuple):
    """Identity of a tensor chunk that several nodes may save."""

    name: str
    slot: str
    region: Region


def copy_to_storage(iterations: Sequence[int], tiers: Tiers, policy: Policy) -> None:
    """Copies the snapshots of a window from the memory of all nodes to storage, and commits them; a collective call.

    The first of the nodes that have saved a replica copies it.

    Raises:
        CheckpointError: on all workers: a snapshot cannot be read or written.
    """
    for iteration in iterations:
        _copy_snapshot(iteration, tiers, policy)
    run_on_rank0(
        lambda: retain(
            tiers.storage, policy.operators, recovers_exactly(policy), keep=tiers.keep, upto=max(iterations)
        ),
        "cannot remove old snapshots from storage",
    )


def _copy_snapshot(iteration: int, tiers: Tiers, policy: Policy) -> None:
    manifest, replicated, me = None, set(), tiers.node[0]

    def read_manifest() -> None:
        nonlocal manifest, replicated
        if tiers.leads_node:
            assert tiers.memory is not None  # the source of the copy
            manifest = tiers.memory.read_manifest(iteration)
            replicated = _replicated(tiers.memory, manifest)

    def copy() -> None:
        nonlocal manifest
        if manifest is not None:
            assert tiers.memory is not None
            if replicated:
                manifest = _copy_chunks(
                    tiers.memory, manifest, lambda chunk: first_rank.get(_key(chunk), me) == me, tiers.storage
                )
            else:
                tiers.memory.copy_files(manifest, tiers.storage)

    run_on_all(read_manifest, "cannot read a snapshot in memory")
    first_rank: dict[_Key, int] = {}
    for rank, keys in enumerate(gather(replicated)):
        first_rank = dict.fromkeys(keys, rank) | first_rank
    run_on_all(copy, "cannot write a snapshot to storage")
    manifests = [node_manifest for node_manifest in gather(manifest) if node_manifest is not None]
    operators, problem = policy.operators, "cannot publish a snapshot in storage"
    run_on_rank0(lambda: tiers.storage.publish(merge_complete(operators, manifests)), problem)


def _key(chunk: StoredBox) -> _Key:
    return _Key(chunk.name, chunk.slot, chunk.region)


def _replicated(store: Store, manifest: Manifest) -> set[_Key]:
    """Returns the tensor chunks of operators with saved replicas on several nodes."""
    if not (names := manifest.replica_counts.keys()):
        return set()
    blobs = (store.open_verified(manifest.iteration, name, entry) for name, entry in manifest.files.items())
    chunks = (chunk for blob in blobs for chunk in read_boxes(blob.name, blob.size, blob.read))
    return {_key(chunk) for chunk in chunks if operator_of(chunk.name) in names}


def _copy_chunks(store: Store, manifest: Manifest, selects: Callable[[StoredBox], bool], target: Store) -> Manifest:
    """Copies the tensor chunks of a snapshot that ``selects`` selects; returns the manifest of the copy."""
    elements: dict[str, Counter[str]] = defaultdict(Counter)
    files: dict[str, FileEntry] = {}
    for name, entry in manifest.files.items():
        blob = store.open_verified(manifest.iteration, name, entry)
        header = bytes(blob.read(0, entry.header_bytes))
        for chunk in filter(selects, read_boxes(name, entry.bytes, blob.read)):
            elements[operator_of(chunk.name)][chunk.slot] += chunk.region.numel
        sub_file = extract_sub_file(name, entry, header, selects) or _empty_sub_file()
        ranges = ((i, min(i + _CHUNK, stop)) for start, stop in sub_file.spans for i in range(start, stop, _CHUNK))
        content = itertools.chain([sub_file.header], (blob.read(*byte_range) for byte_range in ranges))
        target.storage.write(f"{checkpoint_name(manifest.iteration)}/{name}", content, is_durable=False)
        files[name] = sub_file.entry
    operators = {
        name: dataclasses.replace(entry, elements=dict(elements[name]))
        for name, entry in manifest.operators.items()
        if name in elements
    }
    state = {name: value for name, value in manifest.state.items() if name != REPLICAS_KEY}
    return dataclasses.replace(manifest, files=files, operators=operators, state=state)


def _empty_sub_file() -> SubFile:
    layout: FileLayout = FileLayout(())
    header = layout.header(())
    return SubFile(header, [], FileEntry(layout.nbytes, len(header), compute_digest(header)))
