"""What memory keeps of older partial snapshots: each expert's newest version, and nothing else.

MoC-System (section 5.1, Figure 8) recovers an expert from the newest state in memory, whichever snapshot that is in.
So while a snapshot is copied into its buffer, the experts that only older ones have are *carried* out of these: copied
into a file of their own each, beside the rank's files, with the hashes that they have.  When the new snapshot is safe,
what is older is *reduced* to these files, so that the buffer is free again; and when an expert is in a newer snapshot,
its file goes.  So beside the newest snapshot memory has one version of each expert that is not in it, which together
are no more than one full state, and every version is copied once.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from moc.recovery.sources import MASTER, MEMORY, MOMENTS, PARTS, AvailableCheckpoint
from moc.state.detail import Detail
from moc.state.operators import operator_of
from moc.store.digest import digest_of
from moc.store.errors import CheckpointError
from moc.store.manifest import NAME, FileEntry, Manifest, OperatorEntry
from moc.store.regions import FileLayout, MissingRegionError, Source, read_sources
from moc.store.store import Store, directory_of, is_of_rank

CARRIED = ".carried.json"
"""The manifest of what was carried out of a snapshot, beside its own, whose place it takes when that is reduced."""

_DETAILS = {frozenset({MASTER, MOMENTS}): Detail.FULL, frozenset({MASTER}): Detail.MASTER}
_DETAILS[frozenset({MOMENTS})] = Detail.MOMENTS


def of_use(held: Iterable[AvailableCheckpoint], experts: Collection[str]) -> dict[int, dict[str, Detail]]:
    """By snapshot, what no newer one has: the versions of experts that a run would go on with.

    Args:
        held: snapshots in one place.
        experts: names of the operators that may be older than the rest.

    Returns:
        By iteration, the experts of which the snapshot has the newest master weights, moments or both.
    """
    seen: set[tuple[str, str]] = set()
    found: dict[int, dict[str, Detail]] = {}
    for one in sorted(held, key=lambda one: -one.iteration):
        found[one.iteration] = {}
        for name in experts & one.operators.keys():
            parts = {part for part in PARTS.get(one.operators[name], ()) if (name, part) not in seen}
            if detail := _DETAILS.get(frozenset(parts)):
                found[one.iteration][name] = detail
                seen |= {(name, part) for part in parts}
    return found


class Carrier:
    """Of the snapshots of one node in its memory, its own or copies that it keeps for another.

    Args:
        store: the snapshots.
        experts: names of the operators that may be older than the rest; empty where none may.
    """

    def __init__(self, store: Store, experts: Collection[str]):
        self._store, self._experts, self.name = store, frozenset(experts), store.place.name
        self._known: dict[int, tuple[bool, AvailableCheckpoint]] = {}

    def carry(self, coming: AvailableCheckpoint | None = None) -> int:
        """Copies what a snapshot that is about to be safe lacks out of those before it; nothing is removed.

        Args:
            coming: what will be newest; by default the newest that is there.

        Returns:
            Bytes that were copied.

        Raises:
            CheckpointError, OSError: what is there cannot be read, or there is no room.
        """
        held = self._held()
        held = held if coming is None else [*(one for one in held if one.iteration < coming.iteration), coming]
        newest, copied = max((one.iteration for one in held), default=0), 0
        for iteration, wanted in of_use(held, self._experts).items():
            names = self._names(iteration) if wanted and iteration != newest else []
            if CARRIED not in names and any(map(is_of_rank, names)):
                copied += _carry(self._store, self._store.manifest(iteration), wanted)
        return copied

    def retire(self, before: int) -> None:
        """Reduces the snapshots before an iteration to what was carried out of them; quick, since it only renames.

        Raises:
            CheckpointError, OSError: it cannot be written.
        """
        for iteration in self._store.iterations():
            names = self._names(iteration)
            if iteration < before and any(map(is_of_rank, names)):
                self._retire(iteration, names)

    def drop(self, upto: int) -> None:
        """Gives up carried experts that a newer snapshot has.

        Args:
            upto: iteration of the newest snapshot that is safe.

        Raises:
            CheckpointError, OSError: it cannot be written.
        """
        held = [one for one in self._held() if one.iteration <= upto]
        for iteration, wanted in of_use(held, self._experts).items():
            if iteration < upto and not any(map(is_of_rank, self._names(iteration))):
                self._keep_only(iteration, wanted)

    def delete(self) -> None:
        """Gives up what was carried for a snapshot that is not coming any more; to be told when a run goes on."""
        for iteration in self._store.iterations():
            if CARRIED in (names := self._names(iteration)) and any(map(is_of_rank, names)):
                self._store.rewrite(self._store.manifest(iteration))  # which removes what it does not name

    def _names(self, iteration: int) -> list[str]:
        return self._store.place.names(directory_of(iteration))

    def _held(self) -> list[AvailableCheckpoint]:
        """What is there; a manifest is read when it is new, or was reduced."""
        there = {}
        for iteration in self._store.iterations():
            whole = any(map(is_of_rank, self._names(iteration)))
            known = self._known.get(iteration)
            if known is None or known[0] != whole:
                try:
                    operators = self._store.manifest(iteration).operators
                except CheckpointError:
                    continue  # it was removed meanwhile, or cannot be read
                details = {name: entry.detail for name, entry in operators.items()}
                known = whole, AvailableCheckpoint(iteration, MEMORY, details)
            there[iteration] = known
        self._known = there
        return [one for _, one in there.values()]

    def _retire(self, iteration: int, names: Collection[str]) -> None:
        place, directory = self._store.place, directory_of(iteration)
        if CARRIED not in names:
            self._store.remove(iteration)
            return
        place.check_owner()
        place.write(f"{directory}/{NAME}", [place.read(f"{directory}/{CARRIED}")])
        for name in names:
            if is_of_rank(name) or name == CARRIED:
                place.remove(f"{directory}/{name}")

    def _keep_only(self, iteration: int, wanted: Collection[str]) -> None:
        if not self._known[iteration][1].operators.keys() - wanted:
            return
        self._known.pop(iteration)
        manifest = self._store.manifest(iteration)
        operators = {name: entry for name, entry in manifest.operators.items() if name in wanted}
        files = {name: entry for name, entry in manifest.files.items() if name in map(file_of_operator, operators)}
        if not operators:
            self._store.remove(iteration)
        else:
            self._store.rewrite(dataclasses.replace(manifest, files=files, operators=operators))


def file_of_operator(name: str) -> str:
    """Name of the file that holds an operator alone."""
    return f"{name}.safetensors"


def _carry(store: Store, manifest: Manifest, wanted: Mapping[str, Detail]) -> int:
    sources: dict[str, list[Source]] = defaultdict(list)
    try:
        for file, entry in manifest.files.items():
            for source in read_sources(store.blob(manifest.iteration, file, entry)):
                name = operator_of(source.entry.name)
                if name in wanted and wanted[name].holds(source.entry.slot):
                    sources[name].append(source)
    except MissingRegionError as damage:
        raise CheckpointError(str(damage)) from None
    directory, files, operators = directory_of(manifest.iteration), {}, {}
    for name, its in sources.items():
        file = file_of_operator(name)
        files[file] = _write(store, f"{directory}/{file}", its)
        operators[name] = _entry(manifest.operators[name], wanted[name])
    carried = dataclasses.replace(manifest, files=files, operators=operators)
    store.place.write(f"{directory}/{CARRIED}", [carried.to_json().encode()])
    return carried.bytes


def _write(store: Store, path: str, sources: Iterable[Source]) -> FileEntry:
    by_entry = {source.entry: source for source in sources}
    layout = FileLayout(by_entry)
    ordered = [by_entry[entry] for entry in layout.entries]
    header = layout.header([source.digest or digest_of(source.data()) for source in ordered])
    store.place.write(path, [header, *(source.data() for source in ordered)], final=False)
    return FileEntry(layout.nbytes, len(header), digest_of(header))


def _entry(entry: OperatorEntry, detail: Detail) -> OperatorEntry:
    return OperatorEntry(
        detail.value, entry.step, {slot: count for slot, count in entry.elements.items() if detail.holds(slot)}
    )
