"""Retains the newest version of each expert in memory, from partial snapshots (*retained experts*).

MoC-System (section 5.1, Figure 8) recovers each expert from its newest state in memory, in any snapshot. While a
snapshot is copied into its buffer, experts that it lacks are *retained*: each is copied out of an older snapshot to
its own file in that snapshot's directory, with its existing hashes.

* When the new snapshot is durable, older ones are *reduced* to these files, which frees their buffers.
* When a newer snapshot contains an expert, its retained file is removed.

So memory has the newest snapshot and one version of each expert that it lacks: together at most one full state. Every
version is copied once. A version can be a full save and the gradients of all later iterations (MoEtion, section 5.2).

A background process can apply a chain's gradients to its base (:mod:`moc.recovery.gradient_folding`). The new
base is *installed*: it replaces these gradients. A snapshot with both an expert's state and the gradients that led to
it is used to *compare* the two. Until then the chain is retained, as if the newer state did not exist.

Other nodes may receive copies of fewer experts than a node's own memory has (:func:`to_copy`). So an expert's newest
copy may be older than its newest state. If several nodes save parts of an expert, its copies are complete only with all
parts. So each node's memory, and each node with copies, retains the copied version until a newer one has copies.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from moc.errors import cause_of
from moc.recovery.gradient_chains import Chain, applicable_chains, is_operator_file, operator_file_name, updated_store
from moc.recovery.inventory import NodeInventory, Summary, summary
from moc.recovery.sources import MASTER, MEMORY, MOMENTS, PARTS, AvailableCheckpoint
from moc.state.operators import Detail, Operator, operator_of
from moc.store.errors import CheckpointError, MissingTensorError
from moc.store.header import FileLayout, StoredBox, read_boxes
from moc.store.manifest import MANIFEST_FILE, FileEntry, Manifest, compute_digest
from moc.store.storage import Blob, LocalStorage
from moc.store.store import Store, checkpoint_name, is_shard_file_or_part

RETAINED_MANIFEST = ".carried.json"
"""Name of the manifest of retained experts, in the snapshot's directory; on reduction it replaces the original one."""

_DETAILS = {frozenset({MASTER, MOMENTS}): Detail.FULL, frozenset({MASTER}): Detail.MASTER}
_DETAILS[frozenset({MOMENTS})] = Detail.MOMENTS
_GRADIENTS = frozenset({Detail.GRAD.value})


def newest_versions(
    checkpoints: Iterable[AvailableCheckpoint], experts: Collection[str]
) -> dict[int, dict[str, Detail]]:
    """Returns, by snapshot, the experts whose newest state, or later gradients, it has.

    State is master weights, moments or both. A run would resume with these versions. ``experts`` names the operators
    that may be older than the rest.
    """
    seen: set[tuple[str, str]] = set()
    versions: dict[int, dict[str, Detail]] = {}
    for checkpoint in sorted(checkpoints, key=lambda checkpoint: -checkpoint.iteration):
        versions[checkpoint.iteration] = {}
        for name in experts & checkpoint.operators.keys():
            parts = {part for part in PARTS.get(checkpoint.operators[name], ()) if (name, part) not in seen}
            if checkpoint.operators[name] == Detail.GRAD.value and seen.isdisjoint({(name, MASTER), (name, MOMENTS)}):
                versions[checkpoint.iteration][name] = Detail.GRAD
            elif detail := _DETAILS.get(frozenset(parts)):
                versions[checkpoint.iteration][name] = detail
                seen |= {(name, part) for part in parts}
    return versions


def slot_of(detail: Detail) -> str:
    """Returns the name of the slots for experts at a detail; their files have nearly the same size."""
    return f"expert_{detail.value}"


def max_retained(
    snapshots: Iterable[AvailableCheckpoint], experts: Collection[str], not_durable: int
) -> dict[Detail, int]:
    """Returns, by detail, the maximum number of experts that are retained at the same time; a pure function.

    Args:
        snapshots: in the order of their iterations.
        experts: as for :func:`newest_versions`.
        not_durable: snapshots before the newest that may not be known to be durable yet.
    """
    retained: dict[str, list[_RetainedVersion]] = defaultdict(list)
    current: Counter[Detail] = Counter()
    maximum: Counter[Detail] = Counter()
    previous: list[dict[str, str]] = []
    for snapshot in snapshots:
        details = {name: detail for name, detail in snapshot.operators.items() if name in experts}
        if (durable := len(previous) - 1 - not_durable) >= 0:
            for name, detail in previous[durable].items():
                before = retained[name]
                reduced = [version.without(detail, durable) for version in before]
                retained[name] = remaining = [version for version in reduced if version.parts]
                current.subtract(version.detail for version in before)
                current.update(version.detail for version in remaining)
        if previous:
            for name, detail in previous[-1].items():
                parts = _parts_in(detail) - _superseded_by(details.get(name))
                if parts:
                    retained[name].append(
                        version := _RetainedVersion(len(previous) - 1, _DETAILS.get(parts, Detail.GRAD), parts)
                    )
                    current[version.detail] += 1
        maximum |= current
        previous.append(details)
    return dict(maximum)


class _RetainedVersion(NamedTuple):
    """An expert copied out of a snapshot: number of the snapshot, detail of the file, and parts still needed."""

    number: int
    detail: Detail
    parts: frozenset[str]

    def without(self, detail: str, number: int) -> _RetainedVersion:
        """Returns the expert with the parts still needed once another snapshot is durable."""
        return self._replace(parts=self.parts - _superseded_by(detail)) if self.number < number else self


def _parts_in(detail: str) -> frozenset[str]:
    return _GRADIENTS if detail == Detail.GRAD.value else frozenset(PARTS.get(detail, ())) & {MASTER, MOMENTS}


def _superseded_by(detail: str | None) -> frozenset[str]:
    parts = frozenset(PARTS.get(detail or "", ())) & {MASTER, MOMENTS}
    return parts | _GRADIENTS if parts else parts


class StoredSnapshot(NamedTuple):
    """A snapshot in memory.

    Attributes:
        complete: the snapshot with all its operators.
        copied: operators that other nodes have copies of, if all nodes' parts are needed.
        compared: experts with both their state and the gradients that led to it.
    """

    complete: AvailableCheckpoint
    copied: AvailableCheckpoint
    compared: frozenset[str] = frozenset()


class ExpertVersions:
    """Versions of the experts in one node's snapshots in memory: its own, or copies for another node.

    ``experts`` are the operators that may be older than the rest; empty if none may.
    """

    def __init__(self, store: Store, experts: Iterable[Operator]):
        self._store, self.name = store, store.storage.name
        self._experts = {operator.name: operator.parameters for operator in experts}
        self._snapshots: dict[int, tuple[bool, StoredSnapshot]] = {}
        self._retired = 0  # snapshots before it are reduced
        self._shared: set[str] = set()  # experts that other nodes save parts of
        self.is_comparing = False
        """Whether chains are retained until they are compared with the state saved with their last gradients."""
        self._uncompared: dict[str, int] = {}  # by expert, the snapshot with this state
        self._compared: dict[str, int] = {}  # the same, after the comparison

    def retain(
        self,
        snapshot: AvailableCheckpoint | None = None,
        copied: Collection[str] | None = None,
        compared: frozenset[str] = frozenset(),
    ) -> int:
        """Copies the experts that a new snapshot lacks out of earlier snapshots; removes nothing; returns bytes copied.

        Args:
            snapshot: the new snapshot; by default the newest stored one.
            copied: its operators that other nodes receive copies of; all by default.
            compared: as in :class:`StoredSnapshot`.

        Raises:
            CheckpointError, OSError: a snapshot cannot be read, or memory is insufficient.
        """
        stored = self._list_stored()
        if snapshot is not None:
            earlier = [other for other in stored if other.complete.iteration < snapshot.iteration]
            stored = [*earlier, StoredSnapshot(snapshot, self._copied(snapshot, copied), compared)]
        self._retain_for_comparison(stored)
        newest, amount = max((other.complete.iteration for other in stored), default=0), 0
        for iteration, versions in self._newest_versions(stored).items():
            names = self._names(iteration) if versions and iteration != newest else []
            if RETAINED_MANIFEST not in names and any(map(is_shard_file_or_part, names)):
                amount += _copy_out(self._store, self._store.read_manifest(iteration), versions)
        return amount

    def retire(self, before: int) -> None:
        """Reduces the snapshots before an iteration to their retained experts; copies no tensors.

        Raises:
            CheckpointError, OSError: a write failed.
        """
        since = self._retired if self._retired <= before else 0  # after a recovery, iterations repeat
        for iteration, names in self._store.list_files(since):
            if iteration < before and any(map(is_shard_file_or_part, names)):
                self._reduce(iteration, names)
        self._retired = before

    def unreduced(self) -> set[int]:
        """Returns the iterations of the snapshots that are not reduced."""
        return {iteration for iteration, names in self._store.list_files() if any(map(is_shard_file_or_part, names))}

    def reduce(self, before: int) -> None:
        """Reduces the snapshots before an iteration whose buffers are in use again, if they have retained experts.

        Raises:
            CheckpointError, OSError: a write failed.
        """
        for iteration in self.unreduced():
            if (
                iteration < before
                and RETAINED_MANIFEST in (names := self._names(iteration))
                and self._is_overwritten(iteration)
            ):
                self._reduce(iteration, names)

    def _is_overwritten(self, iteration: int) -> bool:
        files = self._store.read_manifest(iteration).files.items()
        return any(self._store.find_header_damage(iteration, name, entry) for name, entry in files)

    def remove_outdated(self, upto: int) -> None:
        """Removes retained experts that a newer snapshot contains, up to the newest durable one.

        Raises:
            CheckpointError, OSError: a write failed.
        """
        stored = [snapshot for snapshot in self._list_stored() if snapshot.complete.iteration <= upto]
        for iteration, versions in self._newest_versions(stored).items():
            if iteration < upto and not any(map(is_shard_file_or_part, self._names(iteration))):
                self._keep_only(iteration, versions)

    def chains_to_compare(self) -> list[Chain]:
        """Returns the chains in reduced snapshots that were not yet compared with the state that they led to."""
        reduced = [self._without_uncompared(snapshot.complete) for snapshot in self._reduced()]
        chains = applicable_chains(reduced, self._uncompared.keys(), 1)
        return [
            chain._replace(until=until)
            for chain in chains
            if chain.base < (until := self._uncompared[chain.operator]) <= chain.until
        ]

    def chains_to_apply(self, least: int) -> list[Chain]:
        """Returns the chains of at least ``least`` gradients in reduced snapshots, the longest first."""
        experts = self._experts.keys() - self._shared - self._uncompared.keys()
        return applicable_chains((snapshot.complete for snapshot in self._reduced()), experts, least)

    def on_compared(self, experts: Collection[str]) -> None:
        """Records that the chains of these experts were compared: newer state in snapshots replaces them."""
        for name in self._uncompared.keys() & experts:
            self._compared[name] = self._uncompared.pop(name)

    def stop_comparing(self) -> None:
        """Ends comparisons: newer state in snapshots replaces all chains."""
        self.is_comparing = False
        self._uncompared.clear()

    def install_bases(self) -> list[str]:
        """Replaces gradients by the bases that this node's background optimizer has committed; returns the operators.

        Raises:
            CheckpointError, OSError: a read or write failed.
        """
        updated, installed = updated_store(self._store), []
        for iteration in updated.iterations():
            manifest = updated.read_manifest(iteration)
            if iteration not in self._store.iterations():
                continue  # superseded since then
            stored = self._store.read_manifest(iteration)
            operators = {
                name: entry
                for name, entry in manifest.operators.items()
                if (current := stored.operators.get(name))
                and (current.detail, current.step) == (Detail.GRAD.value, entry.step)
            }
            files = {file: entry for file, entry in manifest.files.items() if is_operator_file(file, operators)}
            for file in files:
                os.link(
                    updated.storage.display_path(f"{checkpoint_name(iteration)}/{file}"),
                    self._new_path(iteration, file),
                )
            kept_files = {file: entry for file, entry in stored.files.items() if not is_operator_file(file, operators)}
            merged = dataclasses.replace(stored, files=kept_files | files, operators={**stored.operators, **operators})
            self._snapshots.pop(iteration, None)
            self._store.publish_as_is(merged)  # removes the gradients
            installed += operators
        updated.remove_all()
        return installed

    def _new_path(self, iteration: int, file: str) -> str:
        path = f"{checkpoint_name(iteration)}/{file}"
        self._store.storage.remove(path)  # left by a process that was killed before its commit
        return self._store.storage.display_path(path)

    def delete(self) -> None:
        """Removes experts retained for a snapshot that will not follow; called when a run resumes."""
        for iteration in self._store.iterations():
            if RETAINED_MANIFEST in (names := self._names(iteration)) and any(map(is_shard_file_or_part, names)):
                self._store.publish_as_is(self._store.read_manifest(iteration))  # removes files that it does not name

    def _names(self, iteration: int) -> list[str]:
        return self._store.storage.list_names(checkpoint_name(iteration))

    def _list_stored(self) -> list[StoredSnapshot]:
        """Returns the stored snapshots; reads a manifest if it is new or was reduced."""
        snapshots = {}
        for iteration, names in self._store.list_files():
            is_complete = any(map(is_shard_file_or_part, names))
            snapshot = self._snapshots.get(iteration)
            if snapshot is None or snapshot[0] != is_complete:
                try:
                    manifest = self._store.read_manifest(iteration)
                except CheckpointError:
                    continue  # removed since then, or unreadable
                part_summary, sizes = summary(manifest), self._experts
                self._shared |= {n for n in part_summary.operators if n in sizes and part_summary.shares(n, sizes[n])}
                checkpoint = AvailableCheckpoint(iteration, MEMORY, part_summary.details)
                compared = frozenset(
                    n for n, (detail, slots) in part_summary.operators.items() if _has_both(detail, slots)
                )
                snapshot = (
                    is_complete,
                    StoredSnapshot(checkpoint, self._copied(checkpoint, part_summary.copied), compared),
                )
            snapshots[iteration] = snapshot
        self._snapshots = snapshots
        return [checkpoint for _, checkpoint in snapshots.values()]

    def _copied(self, checkpoint: AvailableCheckpoint, names: Collection[str] | None) -> AvailableCheckpoint:
        copied = {n: d for n, d in checkpoint.operators.items() if n in self._shared and (names is None or n in names)}
        return dataclasses.replace(checkpoint, operators=copied)

    def _reduced(self) -> list[StoredSnapshot]:
        return [snapshot for snapshot in self._list_stored() if not self._snapshots[snapshot.complete.iteration][0]]

    def _retain_for_comparison(self, stored: Iterable[StoredSnapshot]) -> None:
        """Retains chains whose new state is to be compared, unless they have a gap or belong to several nodes."""
        if not self.is_comparing:
            return
        by_iteration = {snapshot.complete.iteration: snapshot for snapshot in stored}
        newest = {
            n: i
            for i in sorted(by_iteration)
            for n, d in by_iteration[i].complete.operators.items()
            if d == Detail.FULL.value
        }
        self._uncompared = {name: i for name, i in self._uncompared.items() if newest.get(name) == i}
        for iteration, snapshot in sorted(by_iteration.items()):
            before = by_iteration[iteration - 1].complete.operators if iteration - 1 in by_iteration else {}
            for name in snapshot.compared & self._experts.keys() & before.keys() - self._shared:
                if newest[name] == iteration and self._compared.get(name) != iteration:
                    self._uncompared[name] = iteration

    def _without_uncompared(self, checkpoint: AvailableCheckpoint) -> AvailableCheckpoint:
        """Returns a snapshot without the state that is still to be compared."""
        uncompared = {name for name in checkpoint.operators if self._uncompared.get(name) == checkpoint.iteration}
        return dataclasses.replace(
            checkpoint, operators={**checkpoint.operators, **dict.fromkeys(uncompared, Detail.GRAD.value)}
        )

    def _newest_versions(self, stored: Iterable[StoredSnapshot]) -> dict[int, dict[str, Detail]]:
        stored = list(stored)
        versions = newest_versions(
            (self._without_uncompared(snapshot.complete) for snapshot in stored), self._experts.keys()
        )
        for iteration, copied in newest_versions(
            (snapshot.copied for snapshot in stored), self._experts.keys()
        ).items():
            for name, detail in copied.items():
                own = versions[iteration].get(name, detail)
                parts = {part for snapshot in (detail, own) for part in PARTS.get(snapshot.value, ())}
                versions[iteration][name] = _DETAILS.get(frozenset(parts), detail)
        return versions

    def _reduce(self, iteration: int, names: Collection[str]) -> None:
        storage, directory = self._store.storage, checkpoint_name(iteration)
        if RETAINED_MANIFEST not in names:
            self._store.remove(iteration)
            return
        storage.check_owner()
        storage.write(f"{directory}/{MANIFEST_FILE}", [storage.read(f"{directory}/{RETAINED_MANIFEST}")])
        for name in names:
            if is_shard_file_or_part(name) or name == RETAINED_MANIFEST:
                storage.remove(f"{directory}/{name}")

    def _keep_only(self, iteration: int, retained: Collection[str]) -> None:
        if not self._snapshots[iteration][1].complete.operators.keys() - retained:
            return
        self._snapshots.pop(iteration)
        manifest = self._store.read_manifest(iteration)
        operators = {name: entry for name, entry in manifest.operators.items() if name in retained}
        files = {name: entry for name, entry in manifest.files.items() if is_operator_file(name, operators)}
        if not operators:
            self._store.remove(iteration)
        else:
            self._store.publish_as_is(dataclasses.replace(manifest, files=files, operators=operators))


def _has_both(detail: str, slots: Collection[str]) -> bool:
    return detail == Detail.FULL.value and not all(map(Detail.FULL.holds, slots))


def _copy_out(store: Store, manifest: Manifest, versions: Mapping[str, Detail]) -> int:
    """Copies operators to their own files; operators as gradients with all that the snapshot has of them."""
    storage, chunks_of = store.storage, defaultdict[str, list[tuple[Blob, StoredBox]]](list)
    assert isinstance(storage, LocalStorage)  # snapshots in memory are local
    for file, entry in manifest.files.items():
        for blob, chunk in _stored_chunks(store, manifest.iteration, file, entry):
            name = operator_of(chunk.name)
            if name in versions and (versions[name] is Detail.GRAD or versions[name].holds(chunk.slot)):
                chunks_of[name].append((blob, chunk))
    directory, files, operators = checkpoint_name(manifest.iteration), {}, {}
    for name, chunks in chunks_of.items():
        file = operator_file_name(name)
        files[file] = _write(storage, f"{directory}/{file}", chunks, slot_of(versions[name]))
        entry = manifest.operators[name]
        operators[name] = entry if versions[name] is Detail.GRAD else entry.restricted_to(versions[name])
    retained = dataclasses.replace(manifest, files=files, operators=operators)
    store.storage.write(f"{directory}/{RETAINED_MANIFEST}", [retained.to_json().encode()])
    return retained.nbytes


def _stored_chunks(store: Store, iteration: int, file: str, entry: FileEntry) -> list[tuple[Blob, StoredBox]]:
    try:
        blob = store.open_verified(iteration, file, entry)
        return [(blob, chunk) for chunk in read_boxes(blob.name, blob.size, blob.read)]
    except (MissingTensorError, ValueError) as damage:
        raise CheckpointError(
            f"{file} of iteration {iteration} cannot be read ({cause_of(damage)}). Fix: none is needed, unless this "
            "repeats; then test the memory of the node",
            code="checkpoint-unreadable",
        ) from None


def _write(storage: LocalStorage, path: str, chunks: Iterable[tuple[Blob, StoredBox]], slot: str) -> FileEntry:
    blobs = {chunk: blob for blob, chunk in chunks}
    layout = FileLayout(blobs)
    data = [blobs[chunk].read(chunk.start, chunk.start + chunk.nbytes) for chunk in layout.entries]
    digests = (chunk.digest or compute_digest(values) for chunk, values in zip(layout.entries, data, strict=True))
    header = layout.header([*digests])
    storage.write_into_reserved_file(path, [header, *data], slot)
    return FileEntry(layout.nbytes, len(header), compute_digest(header))


def partly_copied(nodes: Mapping[str, NodeInventory]) -> bool:
    """Returns whether other nodes received only some operators of any snapshot in memory."""
    return any(summary_of_part.copied is not None for node in nodes.values() for summary_of_part in _all_parts(node))


def newest_copied_iterations(nodes: Mapping[str, NodeInventory], experts: Collection[str], upto: int) -> set[int]:
    """Returns the iterations, up to ``upto``, whose copies have the newest copied version of an expert."""
    versions_of_copies = (
        newest_versions([_as_checkpoint(part) for part in parts if part.iteration <= upto], experts)
        for node in nodes.values()
        for parts in node.copies.values()
    )
    return {iteration for versions in versions_of_copies for iteration, experts_at in versions.items() if experts_at}


def to_copy(
    own_parts: Iterable[Summary],
    copies: Iterable[Summary],
    experts: Collection[str],
    resumed: Collection[int],
    loaded: Mapping[str, Collection[int]],
) -> dict[int, dict[str, str]]:
    """Returns, by iteration, the operators of a node's snapshots that a holder still lacks, with their details.

    These are:

    * dense operators of the snapshots that the run resumes from,
    * experts that were being copied,
    * operators without any version at the holder, in the version that the run resumes with.

    Args:
        own_parts: parts in the node's own memory, none newer than the resumed iteration.
        copies: the holder's copies of the node's parts, none newer than the resumed iteration.
        experts: operators that may be older than the rest.
        resumed: iterations of the snapshots that the run resumes from.
        loaded: by operator, the iterations of the state that the run resumes with, and of later gradients.
    """
    newest: dict[str, int] = {}
    for part in copies:
        newest |= {name: max(part.iteration, newest.get(name, 0)) for name in part.operators}
    missing: dict[int, dict[str, str]] = {}
    for part in own_parts:
        i, copied = part.iteration, part.operators.keys() if part.copied is None else part.copied
        needed = {
            name: detail
            for name, detail in part.details.items()
            if (name in experts and name in copied and newest.get(name, -1) < i)
            or (name not in newest and i in loaded.get(name, ()))
            or (name not in experts and i in resumed)
        }
        if needed:
            missing[i] = needed
    return missing


def _all_parts(node: NodeInventory) -> Iterable[Summary]:
    return (part for parts in (node.own, *node.copies.values()) for part in parts)


def _as_checkpoint(part: Summary) -> AvailableCheckpoint:
    return AvailableCheckpoint(part.iteration, MEMORY, part.details)
