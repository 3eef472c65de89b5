"""Retains the newest version of each expert in memory, from partial snapshots (*carried experts*).

MoC-System (section 5.1, Figure 8) recovers each expert from its newest state in memory, in any snapshot. While a
snapshot is copied into its buffer, experts that it lacks are *carried* out of older snapshots. Each is copied to its
own file in the older snapshot's directory, with its existing hashes.

* When the new snapshot is durable, older ones are *reduced* to these files, which frees their buffers.
* When a newer snapshot contains an expert, its carried file is removed.

So memory has the newest snapshot and one version of each expert that it lacks: together at most one full state. Every
version is copied once. A version can be a full save and the gradients of all later iterations (MoEtion, section 5.2).

A background process can apply a chain's gradients to its base (:mod:`moc.recovery.gradient_folding`). The new
base is *adopted*: it replaces these gradients. A snapshot with both an expert's state and the gradients that led to it
is used to *compare* the two. Until then the chain is retained, as if the newer state did not exist.

Other nodes may receive copies of fewer experts (:func:`to_copy`). If several nodes save parts of an expert, all parts
are needed. So a node's memory also retains its part of the version that was copied.

Selects copies of some operators: those still needed when a run resumes, and missing ones. Other nodes may receive
fewer experts of a snapshot than a node's own memory has. So an expert's newest copy may be older than its newest
state. If several nodes save parts of an expert, its copies are complete only with all parts. So each node's memory,
and each holder, retains the copied version until a newer one has copies.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from moc.errors import cause_of
from moc.recovery.copy_placement import NodeInventory
from moc.recovery.gradient_chains import Chain, applicable_chains, is_operator_file, operator_file_name, updated_store
from moc.recovery.inventory import Summary, summary
from moc.recovery.sources import MASTER, MEMORY, MOMENTS, PARTS, AvailableCheckpoint
from moc.state.operators import Detail, Operator, operator_of
from moc.store.errors import CheckpointError, MissingTensorError
from moc.store.header import FileLayout, StoredBox, read_boxes
from moc.store.manifest import MANIFEST_FILE, FileEntry, Manifest, compute_digest
from moc.store.storage import Blob, LocalStorage
from moc.store.store import Store, checkpoint_name, is_shard_file_or_part

CARRIED = ".carried.json"
"""Name of the manifest of carried experts, in the snapshot's directory; on reduction it replaces the snapshot's own."""

_DETAILS = {frozenset({MASTER, MOMENTS}): Detail.FULL, frozenset({MASTER}): Detail.MASTER}
_DETAILS[frozenset({MOMENTS})] = Detail.MOMENTS
_GRADIENTS = frozenset({Detail.GRAD.value})


def of_use(held: Iterable[AvailableCheckpoint], experts: Collection[str]) -> dict[int, dict[str, Detail]]:
    """Returns, by snapshot, the experts whose newest state, or later gradients, it has.

    State is master weights, moments or both. A run would resume with these versions. ``experts`` names the operators
    that may be older than the rest.
    """
    seen: set[tuple[str, str]] = set()
    found: dict[int, dict[str, Detail]] = {}
    for one in sorted(held, key=lambda one: -one.iteration):
        found[one.iteration] = {}
        for name in experts & one.operators.keys():
            parts = {part for part in PARTS.get(one.operators[name], ()) if (name, part) not in seen}
            if one.operators[name] == Detail.GRAD.value and seen.isdisjoint({(name, MASTER), (name, MOMENTS)}):
                found[one.iteration][name] = Detail.GRAD
            elif detail := _DETAILS.get(frozenset(parts)):
                found[one.iteration][name] = detail
                seen |= {(name, part) for part in parts}
    return found


def slot_of(detail: Detail) -> str:
    """Returns the name of the slots for experts at a detail; their files have nearly the same size."""
    return f"expert_{detail.value}"


def most_carried(snapshots: Iterable[AvailableCheckpoint], experts: Collection[str], behind: int) -> dict[Detail, int]:
    """Returns, by detail, the maximum number of experts that are carried at the same time; a pure function.

    Args:
        snapshots: in the order of their iterations.
        experts: as for :func:`of_use`.
        behind: snapshots before the newest that may not be known to be durable yet.
    """
    carried: dict[str, list[_Carried]] = defaultdict(list)
    now: Counter[Detail] = Counter()
    most: Counter[Detail] = Counter()
    taken: list[dict[str, str]] = []
    for coming in snapshots:
        details = {name: detail for name, detail in coming.operators.items() if name in experts}
        if (safe := len(taken) - 1 - behind) >= 0:
            for name, detail in taken[safe].items():
                before = carried[name]
                carried[name] = left = [kept for one in before if (kept := one.without(detail, safe)).parts]
                now.subtract(one.detail for one in before)
                now.update(one.detail for one in left)
        if taken:
            for name, detail in taken[-1].items():
                parts = _of_use_in(detail) - _superseded_by(details.get(name))
                if parts:
                    carried[name].append(one := _Carried(len(taken) - 1, _DETAILS.get(parts, Detail.GRAD), parts))
                    now[one.detail] += 1
        most |= now
        taken.append(details)
    return dict(most)


class _Carried(NamedTuple):
    """An expert carried out of a snapshot: number of the snapshot, detail of the file, and parts still needed."""

    number: int
    detail: Detail
    parts: frozenset[str]

    def without(self, detail: str, number: int) -> _Carried:
        """Returns the expert with the parts still needed once another snapshot is durable."""
        return self._replace(parts=self.parts - _superseded_by(detail)) if self.number < number else self


def _of_use_in(detail: str) -> frozenset[str]:
    return _GRADIENTS if detail == Detail.GRAD.value else frozenset(PARTS.get(detail, ())) & {MASTER, MOMENTS}


def _superseded_by(detail: str | None) -> frozenset[str]:
    parts = frozenset(PARTS.get(detail or "", ())) & {MASTER, MOMENTS}
    return parts | _GRADIENTS if parts else parts


class Held(NamedTuple):
    """A snapshot in memory.

    Attributes:
        whole: the snapshot with all its operators.
        copied: operators that other nodes have copies of, if all nodes' parts are needed.
        compared: experts with both their state and the gradients that led to it.
    """

    whole: AvailableCheckpoint
    copied: AvailableCheckpoint
    compared: frozenset[str] = frozenset()


class Carrier:
    """Carries experts of one node's snapshots in its memory, either its own or copies for another node.

    ``experts`` are the operators that may be older than the rest; empty if none may.
    """

    def __init__(self, store: Store, experts: Iterable[Operator]):
        self._store, self.name = store, store.storage.name
        self._experts = {one.name: one.parameters for one in experts}
        self._known: dict[int, tuple[bool, Held]] = {}
        self._retired = 0  # snapshots before it are reduced
        self._shared: set[str] = set()  # experts that other nodes save parts of
        self.compares = False
        """Whether chains are retained until they are compared with the state saved with their last gradients."""
        self._uncompared: dict[str, int] = {}  # by expert, the snapshot with this state
        self._compared: dict[str, int] = {}  # the same, after the comparison

    def carry(
        self,
        coming: AvailableCheckpoint | None = None,
        copied: Collection[str] | None = None,
        compared: frozenset[str] = frozenset(),
    ) -> int:
        """Copies the experts that a new snapshot lacks out of earlier snapshots; removes nothing; returns bytes copied.

        Args:
            coming: the new snapshot; by default the newest stored one.
            copied: its operators that other nodes receive copies of; all by default.
            compared: as in :class:`Held`.

        Raises:
            CheckpointError, OSError: a snapshot cannot be read, or memory is insufficient.
        """
        held = self._held()
        if coming is not None:
            earlier = [one for one in held if one.whole.iteration < coming.iteration]
            held = [*earlier, Held(coming, self._copied(coming, copied), compared)]
        self._keep_to_compare(held)
        newest, amount = max((one.whole.iteration for one in held), default=0), 0
        for iteration, wanted in self._of_use(held).items():
            names = self._names(iteration) if wanted and iteration != newest else []
            if CARRIED not in names and any(map(is_shard_file_or_part, names)):
                amount += _carry(self._store, self._store.read_manifest(iteration), wanted)
        return amount

    def retire(self, before: int) -> None:
        """Reduces the snapshots before an iteration to their carried experts; copies no tensors.

        Raises:
            CheckpointError, OSError: a write failed.
        """
        since = self._retired if self._retired <= before else 0  # after a recovery, iterations repeat
        for iteration, names in self._store.list_files(since):
            if iteration < before and any(map(is_shard_file_or_part, names)):
                self._retire(iteration, names)
        self._retired = before

    def whole(self) -> set[int]:
        """Returns the iterations of the snapshots that are not reduced."""
        return {iteration for iteration, names in self._store.list_files() if any(map(is_shard_file_or_part, names))}

    def reduce(self, before: int) -> None:
        """Reduces the snapshots before an iteration whose buffers are in use again, if they have carried experts.

        Raises:
            CheckpointError, OSError: a write failed.
        """
        for iteration in self.whole():
            if iteration < before and CARRIED in (names := self._names(iteration)) and self._is_overwritten(iteration):
                self._retire(iteration, names)

    def _is_overwritten(self, iteration: int) -> bool:
        files = self._store.read_manifest(iteration).files.items()
        return any(self._store.find_header_damage(iteration, name, entry) for name, entry in files)

    def drop(self, upto: int) -> None:
        """Removes carried experts that a newer snapshot contains, up to the newest durable one.

        Raises:
            CheckpointError, OSError: a write failed.
        """
        held = [one for one in self._held() if one.whole.iteration <= upto]
        for iteration, wanted in self._of_use(held).items():
            if iteration < upto and not any(map(is_shard_file_or_part, self._names(iteration))):
                self._keep_only(iteration, wanted)

    def to_compare(self) -> list[Chain]:
        """Returns the chains in reduced snapshots that were not yet compared with the state that they led to."""
        reduced = [self._seen(one.whole) for one in self._reduced()]
        chains = applicable_chains(reduced, self._uncompared.keys(), 1)
        return [
            chain._replace(until=until)
            for chain in chains
            if chain.base < (until := self._uncompared[chain.operator]) <= chain.until
        ]

    def to_fold(self, least: int) -> list[Chain]:
        """Returns the chains of at least ``least`` gradients in reduced snapshots, the longest first."""
        experts = self._experts.keys() - self._shared - self._uncompared.keys()
        return applicable_chains((one.whole for one in self._reduced()), experts, least)

    def is_compared(self, experts: Collection[str]) -> None:
        """Records that the chains of these experts were compared: newer state in snapshots replaces them."""
        for name in self._uncompared.keys() & experts:
            self._compared[name] = self._uncompared.pop(name)

    def compares_no_more(self) -> None:
        """Ends comparisons: newer state in snapshots replaces all chains."""
        self.compares = False
        self._uncompared.clear()

    def adopt(self) -> list[str]:
        """Replaces gradients by the bases that this node's folder has committed; returns the operators.

        Raises:
            CheckpointError, OSError: a read or write failed.
        """
        folded, adopted = updated_store(self._store), []
        for iteration in folded.iterations():
            manifest = folded.read_manifest(iteration)
            if iteration not in self._store.iterations():
                continue  # superseded since then
            here = self._store.read_manifest(iteration)
            operators = {
                name: entry
                for name, entry in manifest.operators.items()
                if (ours := here.operators.get(name)) and (ours.detail, ours.step) == (Detail.GRAD.value, entry.step)
            }
            files = {file: entry for file, entry in manifest.files.items() if is_operator_file(file, operators)}
            for file in files:
                os.link(folded.storage.display_path(f"{checkpoint_name(iteration)}/{file}"), self._new(iteration, file))
            others = {file: entry for file, entry in here.files.items() if not is_operator_file(file, operators)}
            merged = dataclasses.replace(here, files=others | files, operators={**here.operators, **operators})
            self._known.pop(iteration, None)
            self._store.publish_as_is(merged)  # removes the gradients
            adopted += operators
        folded.remove_all()
        return adopted

    def _new(self, iteration: int, file: str) -> str:
        path = f"{checkpoint_name(iteration)}/{file}"
        self._store.storage.remove(path)  # left by a process that was killed before its commit
        return self._store.storage.display_path(path)

    def delete(self) -> None:
        """Removes experts carried for a snapshot that will not follow; called when a run resumes."""
        for iteration in self._store.iterations():
            if CARRIED in (names := self._names(iteration)) and any(map(is_shard_file_or_part, names)):
                self._store.publish_as_is(self._store.read_manifest(iteration))  # removes files that it does not name

    def _names(self, iteration: int) -> list[str]:
        return self._store.storage.list_names(checkpoint_name(iteration))

    def _held(self) -> list[Held]:
        """Returns the stored snapshots; reads a manifest if it is new or was reduced."""
        there = {}
        for iteration, names in self._store.list_files():
            whole = any(map(is_shard_file_or_part, names))
            known = self._known.get(iteration)
            if known is None or known[0] != whole:
                try:
                    manifest = self._store.read_manifest(iteration)
                except CheckpointError:
                    continue  # removed since then, or unreadable
                part, sizes = summary(manifest), self._experts
                self._shared |= {n for n in part.operators if n in sizes and part.shares(n, sizes[n])}
                one = AvailableCheckpoint(iteration, MEMORY, part.details)
                compared = frozenset(n for n, (detail, slots) in part.operators.items() if _has_both(detail, slots))
                known = whole, Held(one, self._copied(one, part.copied), compared)
            there[iteration] = known
        self._known = there
        return [one for _, one in there.values()]

    def _copied(self, one: AvailableCheckpoint, names: Collection[str] | None) -> AvailableCheckpoint:
        its = {n: d for n, d in one.operators.items() if n in self._shared and (names is None or n in names)}
        return dataclasses.replace(one, operators=its)

    def _reduced(self) -> list[Held]:
        return [one for one in self._held() if not self._known[one.whole.iteration][0]]

    def _keep_to_compare(self, held: Iterable[Held]) -> None:
        """Retains chains whose new state is to be compared, unless they have a gap or belong to several nodes."""
        if not self.compares:
            return
        there = {one.whole.iteration: one for one in held}
        newest = {n: i for i in sorted(there) for n, d in there[i].whole.operators.items() if d == Detail.FULL.value}
        self._uncompared = {name: i for name, i in self._uncompared.items() if newest.get(name) == i}
        for iteration, one in sorted(there.items()):
            before = there[iteration - 1].whole.operators if iteration - 1 in there else {}
            for name in one.compared & self._experts.keys() & before.keys() - self._shared:
                if newest[name] == iteration and self._compared.get(name) != iteration:
                    self._uncompared[name] = iteration

    def _seen(self, one: AvailableCheckpoint) -> AvailableCheckpoint:
        """Returns a snapshot without the state that is still to be compared."""
        later = {name for name in one.operators if self._uncompared.get(name) == one.iteration}
        return dataclasses.replace(one, operators={**one.operators, **dict.fromkeys(later, Detail.GRAD.value)})

    def _of_use(self, held: Iterable[Held]) -> dict[int, dict[str, Detail]]:
        held = list(held)
        found = of_use((self._seen(one.whole) for one in held), self._experts.keys())
        for iteration, copied in of_use((one.copied for one in held), self._experts.keys()).items():
            for name, detail in copied.items():
                other = found[iteration].get(name, detail)
                parts = {part for one in (detail, other) for part in PARTS.get(one.value, ())}
                found[iteration][name] = _DETAILS.get(frozenset(parts), detail)
        return found

    def _retire(self, iteration: int, names: Collection[str]) -> None:
        place, directory = self._store.storage, checkpoint_name(iteration)
        if CARRIED not in names:
            self._store.remove(iteration)
            return
        place.check_owner()
        place.write(f"{directory}/{MANIFEST_FILE}", [place.read(f"{directory}/{CARRIED}")])
        for name in names:
            if is_shard_file_or_part(name) or name == CARRIED:
                place.remove(f"{directory}/{name}")

    def _keep_only(self, iteration: int, wanted: Collection[str]) -> None:
        if not self._known[iteration][1].whole.operators.keys() - wanted:
            return
        self._known.pop(iteration)
        manifest = self._store.read_manifest(iteration)
        operators = {name: entry for name, entry in manifest.operators.items() if name in wanted}
        files = {name: entry for name, entry in manifest.files.items() if is_operator_file(name, operators)}
        if not operators:
            self._store.remove(iteration)
        else:
            self._store.publish_as_is(dataclasses.replace(manifest, files=files, operators=operators))


def _has_both(detail: str, slots: Collection[str]) -> bool:
    return detail == Detail.FULL.value and not all(map(Detail.FULL.holds, slots))


def _carry(store: Store, manifest: Manifest, wanted: Mapping[str, Detail]) -> int:
    """Carries operators out; operators wanted as gradients with all that the snapshot has of them."""
    place, parts = store.storage, defaultdict[str, list[tuple[Blob, StoredBox]]](list)
    assert isinstance(place, LocalStorage)  # snapshots in memory are local
    for file, entry in manifest.files.items():
        for blob, box in _boxes(store, manifest.iteration, file, entry):
            name = operator_of(box.name)
            if name in wanted and (wanted[name] is Detail.GRAD or wanted[name].holds(box.slot)):
                parts[name].append((blob, box))
    directory, files, operators = checkpoint_name(manifest.iteration), {}, {}
    for name, its in parts.items():
        file = operator_file_name(name)
        files[file] = _write(place, f"{directory}/{file}", its, slot_of(wanted[name]))
        entry = manifest.operators[name]
        operators[name] = entry if wanted[name] is Detail.GRAD else entry.restricted_to(wanted[name])
    carried = dataclasses.replace(manifest, files=files, operators=operators)
    store.storage.write(f"{directory}/{CARRIED}", [carried.to_json().encode()])
    return carried.nbytes


def _boxes(store: Store, iteration: int, file: str, entry: FileEntry) -> list[tuple[Blob, StoredBox]]:
    try:
        blob = store.open_verified(iteration, file, entry)
        return [(blob, box) for box in read_boxes(blob.name, blob.size, blob.read)]
    except (MissingTensorError, ValueError) as damage:
        raise CheckpointError(
            f"{file} of iteration {iteration} cannot be read ({cause_of(damage)}). Fix: none is needed, unless this "
            "repeats; then test the memory of the node",
            code="checkpoint-unreadable",
        ) from None


def _write(place: LocalStorage, path: str, parts: Iterable[tuple[Blob, StoredBox]], slot: str) -> FileEntry:
    blobs = {box: blob for blob, box in parts}
    layout = FileLayout(blobs)
    data = [blobs[box].read(box.start, box.start + box.nbytes) for box in layout.entries]
    digests = (box.digest or compute_digest(its) for box, its in zip(layout.entries, data, strict=True))
    header = layout.header([*digests])
    place.write_into_reserved_file(path, [header, *data], slot)
    return FileEntry(layout.nbytes, len(header), compute_digest(header))


def partly_copied(nodes: Mapping[str, NodeInventory]) -> bool:
    """Returns whether other nodes received only some operators of any snapshot in memory."""
    return any(part.copied is not None for node in nodes.values() for part in _all(node))


def copies_of_use(nodes: Mapping[str, NodeInventory], experts: Collection[str], upto: int) -> set[int]:
    """Returns the iterations, up to ``upto``, whose copies have the newest copied version of an expert."""
    kept = (
        of_use([_held(part) for part in parts if part.iteration <= upto], experts)
        for node in nodes.values()
        for parts in node.copies.values()
    )
    return {iteration for found in kept for iteration, wanted in found.items() if wanted}


def to_copy(
    own: Iterable[Summary],
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
        own: parts in the node's own memory, none newer than the resumed iteration.
        copies: the holder's copies of the node's parts, none newer than the resumed iteration.
        experts: operators that may be older than the rest.
        resumed: iterations of the snapshots that the run resumes from.
        loaded: by operator, the iterations of the state that the run resumes with, and of later gradients.
    """
    newest: dict[str, int] = {}
    for part in copies:
        newest |= {name: max(part.iteration, newest.get(name, 0)) for name in part.operators}
    found: dict[int, dict[str, str]] = {}
    for part in own:
        i, coming = part.iteration, part.operators.keys() if part.copied is None else part.copied
        wanted = {
            name: detail
            for name, detail in part.details.items()
            if (name in experts and name in coming and newest.get(name, -1) < i)
            or (name not in newest and i in loaded.get(name, ()))
            or (name not in experts and i in resumed)
        }
        if wanted:
            found[i] = wanted
    return found


def _all(node: NodeInventory) -> Iterable[Summary]:
    return (part for parts in (node.own, *node.copies.values()) for part in parts)


def _held(part: Summary) -> AvailableCheckpoint:
    return AvailableCheckpoint(part.iteration, MEMORY, part.details)
