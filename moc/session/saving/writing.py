"""Writes snapshots to storage, in the background, and at the end of a run also directly from the nodes' memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, override

from moc.policy import Policy, recovers_exactly
from moc.recovery.inventory import retain, whole_in
from moc.runtime.collectives import gather, run_on_all, run_on_rank0
from moc.session.saving.committing import Committing, Removing
from moc.session.saving.metrics import Meter, SnapshotReport
from moc.session.saving.reservation import Reservation
from moc.session.saving.stage import SnapshotInProgress, started
from moc.session.saving.storage import StorageStage
from moc.session.tiers import Tiers
from moc.session.tokens import TokenTracker
from moc.snapshot.saver import Saver
from moc.state.operators import Detail, Region, operator_of
from moc.store.header import FileLayout, StoredBox, SubFile, extract_sub_file, read_boxes
from moc.store.manifest import REPLICAS_KEY, FileEntry, Manifest, compute_digest
from moc.store.store import Store, checkpoint_name

_CHUNK = 16 << 20  # bytes per write


class Writing(StorageStage):
    """Third stage: writes this worker's part of a snapshot to storage.

    Storage needs no all-reduce to begin, so a snapshot enters this stage when it begins.

    Args:
        workers: number of workers.
        policy: plans snapshots.
        saver: writes this worker's parts.
        reservation: buffers, and the memory that they take.
        tokens: token ledger; None if no policy needs it.
        meter: measurement of an iteration.
        report: report of the cost.
        committing: next stage.
        removing: stage of snapshots that cannot be written.
        pauses_s: pauses before the repetitions of a failed write.
    """

    entry = "snapshot_written"

    def __init__(
        self,
        *,
        workers: int,
        policy: Policy,
        saver: Saver,
        reservation: Reservation,
        tokens: TokenTracker | None,
        meter: Meter,
        report: SnapshotReport,
        committing: Committing,
        removing: Removing,
        pauses_s: Sequence[float],
    ):
        super().__init__(workers)
        self._policy, self._saver, self._reservation, self._tokens = policy, saver, reservation, tokens
        self._meter, self._report, self._pauses_s = meter, report, pauses_s
        self._committing, self._removing = committing, removing

    def begin(self, snapshot: SnapshotInProgress) -> None:
        """Starts to write a snapshot once it is finalized, without waiting."""
        plan, storage = snapshot.plan, snapshot.storage_plan
        is_everything = storage.operators == plan.operators and not plan.compared
        self._saver.persist(snapshot.snapshot, None if is_everything else storage.operators, self._pauses_s)
        self.queue.append(snapshot)

    def begin_from_memory(self, snapshot: SnapshotInProgress) -> None:
        """Starts to write a snapshot of this iteration that is only in memory.

        Gradients are not written, because they need other snapshots.
        """
        plan = snapshot.plan.without(Detail.GRAD)
        self._reservation.rotation = self._reservation.rotation.persist(plan.iteration)
        self._policy.storage.on_write_begun(plan)
        if self._tokens is not None:
            self._tokens.brought_to_storage(plan)
        self.begin(dataclasses.replace(snapshot, storage=plan))

    @override
    def work(self, snapshot: SnapshotInProgress) -> Future:
        return started(snapshot.snapshot.persisted)

    @override
    def entries(self, snapshot: SnapshotInProgress | None) -> dict[str, float]:
        mine = None if snapshot is None else snapshot.snapshot
        return {
            "snapshot_written": float(mine is not None),
            "snapshot_written_bytes": float(mine.persisted_bytes if mine else 0),
            "snapshot_write_s": mine.persist_s if mine else 0.0,
            "snapshot_retries": float(mine.retries if mine else 0),
            "snapshot_unwritten": float(snapshot is not None and self.tolerates(snapshot)),
        }

    @override
    def complete(self, snapshot: SnapshotInProgress, totals: Mapping[str, float]) -> None:
        """Passes the snapshot to the commit in storage, or abandons it if some rank could not write its part."""
        self._reservation.rotation = self._reservation.rotation.persisted(snapshot.iteration)
        if totals["snapshot_unwritten"]:
            self._removing.begin(snapshot, self.work(snapshot))
            return
        self._meter.written(totals)
        if totals["snapshot_retries"]:
            self._report.retried(snapshot.iteration, int(totals["snapshot_retries"]))
        amount, write_s = int(totals["snapshot_written_bytes"]), totals["snapshot_write_s"] / self._workers
        self._committing.begin(snapshot, amount, write_s)


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
        _copy_one(iteration, tiers, policy)
    run_on_rank0(
        lambda: retain(
            tiers.storage, policy.operators, recovers_exactly(policy), keep=tiers.keep, upto=max(iterations)
        ),
        "cannot remove old snapshots from storage",
    )


def _copy_one(iteration: int, tiers: Tiers, policy: Policy) -> None:
    manifest, replicated, me = None, set(), tiers.node[0]

    def look() -> None:
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
                manifest = _copy_boxes(
                    tiers.memory, manifest, lambda box: first.get(_key(box), me) == me, tiers.storage
                )
            else:
                tiers.memory.copy_files(manifest, tiers.storage)

    run_on_all(look, "cannot read a snapshot in memory")
    first: dict[_Key, int] = {}
    for rank, keys in enumerate(gather(replicated)):
        first = dict.fromkeys(keys, rank) | first
    run_on_all(copy, "cannot write a snapshot to storage")
    manifests = [found for found in gather(manifest) if found is not None]
    operators, why = policy.operators, "cannot publish a snapshot in storage"
    run_on_rank0(lambda: tiers.storage.publish(whole_in(operators, manifests)), why)


def _key(box: StoredBox) -> _Key:
    return _Key(box.name, box.slot, box.region)


def _replicated(store: Store, manifest: Manifest) -> set[_Key]:
    """Returns the tensor chunks of operators with saved replicas on several nodes."""
    if not (names := manifest.replica_counts.keys()):
        return set()
    blobs = (store.open_verified(manifest.iteration, name, entry) for name, entry in manifest.files.items())
    boxes = (box for blob in blobs for box in read_boxes(blob.name, blob.size, blob.read))
    return {_key(box) for box in boxes if operator_of(box.name) in names}


def _copy_boxes(store: Store, manifest: Manifest, keeps: Callable[[StoredBox], bool], target: Store) -> Manifest:
    """Copies the tensor chunks of a snapshot that ``keeps`` selects; returns the manifest of the copy."""
    elements: dict[str, Counter[str]] = defaultdict(Counter)
    files: dict[str, FileEntry] = {}
    for name, entry in manifest.files.items():
        blob = store.open_verified(manifest.iteration, name, entry)
        header = bytes(blob.read(0, entry.header_bytes))
        for box in filter(keeps, read_boxes(name, entry.bytes, blob.read)):
            elements[operator_of(box.name)][box.slot] += box.region.numel
        found = extract_sub_file(name, entry, header, keeps) or _nothing()
        pieces = ((i, min(i + _CHUNK, stop)) for start, stop in found.spans for i in range(start, stop, _CHUNK))
        content = itertools.chain([found.header], (blob.read(*piece) for piece in pieces))
        target.storage.write(f"{checkpoint_name(manifest.iteration)}/{name}", content, is_durable=False)
        files[name] = found.entry
    operators = {
        name: dataclasses.replace(entry, elements=dict(elements[name]))
        for name, entry in manifest.operators.items()
        if name in elements
    }
    state = {name: value for name, value in manifest.state.items() if name != REPLICAS_KEY}
    return dataclasses.replace(manifest, files=files, operators=operators, state=state)


def _nothing() -> SubFile:
    layout: FileLayout = FileLayout(())
    header = layout.header(())
    return SubFile(header, [], FileEntry(layout.nbytes, len(header), compute_digest(header)))
