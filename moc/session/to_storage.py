"""Copies complete snapshots from the nodes' memory to storage."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moc.policy import Policy, recovers_exactly
from moc.recovery.inventory import whole_in
from moc.recovery.retention import retain
from moc.runtime.collectives import gather, run_on_all, run_on_rank0
from moc.session.tiers import Tiers
from moc.state.operators import operator_of
from moc.state.region import Region
from moc.store.header import FileLayout, StoredBox, SubFile, extract_sub_file, read_boxes
from moc.store.manifest import REPLICAS_KEY, FileEntry, Manifest, compute_digest
from moc.store.store import Store, checkpoint_name

_CHUNK = 16 << 20  # bytes per write


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
    keep = (tiers.storage, policy.operators, recovers_exactly(policy), tiers.keep, max(iterations))
    run_on_rank0(lambda: retain(*keep), "cannot remove old snapshots from storage")


def _copy_one(iteration: int, tiers: Tiers, policy: Policy) -> None:
    manifest, alike, me = None, set(), tiers.node[0]

    def look() -> None:
        nonlocal manifest, alike
        if tiers.leads_node:
            assert tiers.memory is not None  # the source of the copy
            manifest = tiers.memory.read_manifest(iteration)
            alike = _alike(tiers.memory, manifest)

    def copy() -> None:
        nonlocal manifest
        if manifest is not None:
            assert tiers.memory is not None
            if alike:
                manifest = _copy_boxes(
                    tiers.memory, manifest, lambda box: first.get(_key(box), me) == me, tiers.storage
                )
            else:
                tiers.memory.copy_files(manifest, tiers.storage)

    run_on_all(look, "cannot read a snapshot in memory")
    first: dict[_Key, int] = {}
    for rank, keys in enumerate(gather(alike)):
        first = dict.fromkeys(keys, rank) | first
    run_on_all(copy, "cannot write a snapshot to storage")
    manifests = [found for found in gather(manifest) if found is not None]
    operators, why = policy.operators, "cannot publish a snapshot in storage"
    run_on_rank0(lambda: tiers.storage.publish(whole_in(operators, manifests)), why)


def _key(box: StoredBox) -> _Key:
    return _Key(box.name, box.slot, box.region)


def _alike(store: Store, manifest: Manifest) -> set[_Key]:
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
