"""Writes, publishes, reads and removes checkpoints of Format v1 atomically."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from moc.errors import cause_of
from moc.store import manifest as manifests
from moc.store.claims import term_in
from moc.store.errors import CheckpointError, DamagedRegionError
from moc.store.manifest import FileEntry, Manifest, RankReport, digest_of
from moc.store.storage import Blob, Storage

SUFFIX = ".safetensors"

_DIRECTORY = re.compile(r"iter_(\d{7,})")
_RANK = re.compile(r"rank_(?P<rank>\d{5,})(?P<part>\.\d+)?\.safetensors")
_CHUNK = 16 << 20  # bytes written at once
_SET_ASIDE = f"{manifests.MANIFEST_FILE}.superseded"
_REMOVED = f"{manifests.MANIFEST_FILE}.removed"


def directory_of(iteration: int) -> str:
    """Returns Megatron's directory name for the checkpoint of an iteration, such as ``iter_0000100``."""
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """Inverts :func:`directory_of`; None for other names."""
    match = _DIRECTORY.fullmatch(name)
    return int(match[1]) if match else None


def file_of(rank: int) -> str:
    """Returns the name of a rank's file."""
    return f"rank_{rank:05d}{SUFFIX}"


def rank_of(file: str) -> int:
    """Returns the rank whose file, or part of a file, has this name; raises ValueError for other names."""
    match = _RANK.fullmatch(file)
    if match is None:
        raise ValueError(f"{file!r} is no file of a rank")
    return int(match["rank"])


def part_of_file(file: str, number: int) -> str:
    """Returns the name of a file with some of the operators of a file; a copy may have several."""
    return f"{file.removesuffix(SUFFIX)}.{number}{SUFFIX}"


def is_of_rank(file: str) -> bool:
    """Returns whether a file name is that of a rank's file, which holds all that the rank saved."""
    match = _RANK.fullmatch(file)
    return match is not None and match["part"] is None


def is_by_rank(file: str) -> bool:
    """Returns whether a file name is that of a rank's file, or of a part of one."""
    return _RANK.fullmatch(file) is not None


class Store:
    """The checkpoints in a storage location.

    If the location has a claim, checkpoints are published and removed only under it.

    Args:
        place: location of the checkpoints.
        slack: files may be longer than their contents, as reused buffers are.
    """

    def __init__(self, place: Storage, slack: bool = False):
        self.place, self._slack = place, slack
        self._taking = threading.Lock()
        self._before: set[int] = set()

    def take(self) -> None:
        """Begins the term of the location's claim, once; publishing and removing do so implicitly.

        A run that resumes from this location must call it before looking for checkpoints, so that superseded workers
        publish nothing afterwards.

        Raises:
            CheckpointError: another launch, or a newer term, owns the location.
        """
        if self.place.claim is None:
            return
        with self._taking:
            if not self.place.taken:
                self.place.lock()
                self._before = set(self._directories())

    def iterations(self) -> list[int]:
        """Returns the iterations that have a manifest, ascending."""
        return [iteration for iteration, _ in self.listed()]

    def listed(self, since: int = 0) -> Iterator[tuple[int, list[str]]]:
        """Yields the iterations that have a manifest, from the given one, ascending, and the names of their files."""
        for iteration in self._directories():
            if iteration < since:
                continue
            names = self.place.names(directory_of(iteration))
            if self._counts(iteration, names):
                yield iteration, names

    def refused(self) -> list[str]:
        """Reports entries with a checkpoint's name that are not directories: they are neither read nor removed."""
        names = [name for name in self.place.refused() if iteration_of(name) is not None]
        return [f"{self.place.path(name)} is a link or a special file, which is not read" for name in names]

    def manifest(self, iteration: int) -> Manifest:
        """Returns the manifest of an iteration's checkpoint.

        Raises:
            CheckpointError: the manifest is missing, set aside, damaged or of another iteration.
        """
        path = f"{directory_of(iteration)}/{manifests.MANIFEST_FILE}"
        try:
            text = self.place.read(path).decode()
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.place.path(path)} cannot be read ({cause_of(error)}). Fix: restore it or its permissions, or "
                "load another checkpoint (--ckpt-step)",
                code="checkpoint-unreadable",
            ) from None
        if not self._published(iteration):
            raise CheckpointError(
                f"{self.place.path(path)} is set aside or being removed. Fix: load another checkpoint (--ckpt-step)",
                code="checkpoint-removed",
            )
        manifest = Manifest.from_json(text, self.place.path(path))
        if manifest.iteration != iteration:
            raise CheckpointError(
                f"{self.place.path(path)} is of iteration {manifest.iteration}. Fix: move it back to "
                f"{directory_of(manifest.iteration)}",
                code="checkpoint-moved",
            )
        return manifest

    def write_file(self, iteration: int, rank: int, parts: Iterable) -> None:
        """Writes a rank's file; its name becomes durable when the checkpoint is published."""
        self.place.write(f"{directory_of(iteration)}/{file_of(rank)}", parts, final=False)

    def copy_files(self, manifest: Manifest, target: Store) -> None:
        """Copies the files of a checkpoint to another location, where the caller must publish them."""
        for name, entry in manifest.files.items():
            path = f"{directory_of(manifest.iteration)}/{name}"
            blob, starts = self.place.blob(path), range(0, entry.bytes, _CHUNK)
            target.place.write(path, (blob.read(i, min(i + _CHUNK, entry.bytes)) for i in starts), final=False)

    def report(self, iteration: int, rank: int, part: RankReport) -> RankReport:
        """Stores a rank's report for the publisher; returns the stored report."""
        claim, path = self.place.claim, f"{directory_of(iteration)}/.rank_{rank:05d}.json"
        if claim is not None:  # one file per term, so that generations do not overwrite each other's
            part = dataclasses.replace(part, job=claim.job, term=claim.term)
            path = f"{directory_of(iteration)}/.rank_{rank:05d}.{claim.tag}.json"
        self.place.write(path, [part.to_json().encode()], final=False)
        return part

    def reported(
        self, iteration: int, ranks: Iterable[int], known: Mapping[int, RankReport] = MappingProxyType({})
    ) -> list[RankReport]:
        """Returns ranks' reports of the location's launch, the newest term's of each rank.

        Newer terms continue the saves of older terms.

        The reports ``known``, by rank, are from this process, and are not read again.

        Raises:
            CheckpointError: a rank has not reported, its file does not match, or the checkpoint is being removed.
        """
        names = self.place.names(directory_of(iteration))
        if _REMOVED in names:
            raise CheckpointError(
                f"nothing is published: {self.place.path(directory_of(iteration))} is being removed. Fix: save again",
                code="checkpoint-removed",
            )
        return [known.get(rank) or self._reported(iteration, rank, names) for rank in ranks]

    def has_all(self, iteration: int, ranks: Iterable[int]) -> bool:
        """Returns whether a checkpoint is published, or could be because all these ranks have reported."""
        if self._published(iteration):
            return True
        try:
            return bool(self.reported(iteration, ranks))
        except CheckpointError:
            return False

    def publish(self, manifest: Manifest) -> None:
        """Publishes the files of an iteration atomically; then removes files that the manifest does not list.

        Raises:
            CheckpointError: another claim owns the location (as for every method that removes), or a file was
                overwritten before the term began.
        """
        claim = self.place.claim
        if claim is not None:
            manifest = dataclasses.replace(manifest, run=claim.run, job=claim.job, term=claim.term)
        self.rewrite(manifest)

    def rewrite(self, manifest: Manifest) -> None:
        """Like :meth:`publish`, but keeps the manifest's author, whose files other nodes hold too."""
        self._check()
        directory = directory_of(manifest.iteration)
        if manifest.iteration in self._before:  # superseded workers may have written here until the term began
            for name, entry in manifest.files.items():
                if damage := self.damage_in_header(manifest.iteration, name, entry):
                    raise CheckpointError(f"nothing is published: {damage}. Fix: save again", code="part-overwritten")
        there = self.place.names(directory)  # before publishing: files written later are not removed
        self.place.write(f"{directory}/{manifests.MANIFEST_FILE}", [manifest.to_json().encode()])
        for name in there:
            if name != manifests.MANIFEST_FILE and name not in manifest.files:
                self.place.remove(f"{directory}/{name}")

    def remove(self, iteration: int) -> None:
        """Removes a checkpoint, manifest first, so that a kill midway leaves no partial checkpoint."""
        self._check()
        self.place.discard(directory_of(iteration), manifests.MANIFEST_FILE, _REMOVED)

    def move(self, iteration: int, target: Store) -> None:
        """Moves a checkpoint to another location of the same file system, where it must not exist."""
        self._check()
        directory = directory_of(iteration)
        os.makedirs(target.place.name, exist_ok=True)
        os.rename(self.place.path(directory), target.place.path(directory))

    def set_aside(self, iteration: int) -> None:
        """Hides a checkpoint without deleting its files, which stay until overwritten.

        The marker is a copy of its manifest, so publishing a different manifest makes the checkpoint visible again.
        """
        self._check()
        directory, claim = directory_of(iteration), self.place.claim
        text = self.place.read(f"{directory}/{manifests.MANIFEST_FILE}")
        self.place.write(f"{directory}/{_SET_ASIDE}{f'.{claim.tag}' if claim is not None else ''}", [text])

    def clear_unpublished(self) -> None:
        """Removes the leftovers of killed saves; files and manifests that were set aside stay."""
        for iteration in self._directories():
            self.give_up(iteration)

    def give_up(self, iteration: int) -> None:
        """Like :meth:`clear_unpublished`, for one iteration whose save failed."""
        directory = directory_of(iteration)
        names = self.place.names(directory)
        if _REMOVED in names or not any(name.startswith(manifests.MANIFEST_FILE) for name in names):
            self.remove(iteration)
        elif hidden := [name for name in names if name.startswith(".")]:
            self._check()
            for name in hidden:  # reports of overwritten files, and unfinished files
                self.place.remove(f"{directory}/{name}")

    def clear(self) -> None:
        """Removes all checkpoints and other files, and last the ownership files and the location itself."""
        self._check()
        for iteration in self.iterations():
            self.remove(iteration)
        for name in self.place.names():
            if not name.startswith("."):
                self.place.remove(name)
        self._check()
        self.place.remove("")

    def damage_in_header(self, iteration: int, name: str, entry: FileEntry) -> str | None:
        """Describes damage of a file's size or header, if any; its data are verified when read."""
        try:
            self.blob(iteration, name, entry)
        except DamagedRegionError as damage:
            return cause_of(damage)
        return None

    def blob(self, iteration: int, name: str, entry: FileEntry) -> Blob:
        """Returns a file whose size and header are verified.

        Raises:
            DamagedRegionError: the file is unreadable, or its size or header is wrong.
        """
        path = f"{directory_of(iteration)}/{name}"
        try:
            blob = self.place.blob(path)
        except OSError as error:
            raise DamagedRegionError(
                f"{self.place.path(path)} cannot be read ({error.strerror or error}). Fix: restore it or its "
                "permissions, or load another checkpoint (--ckpt-step)",
                code="checkpoint-unreadable",
            ) from None
        if blob.size < entry.bytes or (blob.size > entry.bytes and not self._slack):
            raise DamagedRegionError(
                f"{blob.name} has {blob.size} bytes instead of {entry.bytes}: it is truncated or overwritten. Fix: "
                "restore it from a copy, or load another checkpoint (--ckpt-step)"
            )
        if digest_of(blob.read(0, entry.header_bytes)) != entry.header_xxh3_128:
            raise DamagedRegionError(
                f"{blob.name} is damaged: its header does not match its hash. Fix: restore it from a copy, or load "
                "another checkpoint (--ckpt-step)"
            )
        return blob

    def _check(self) -> None:
        self.take()
        self.place.check_owner()

    def _reported(self, iteration: int, rank: int, names: Iterable[str]) -> RankReport:
        claim, word = self.place.claim, f".rank_{rank:05d}."
        name = f"{word}json"
        if claim is not None:
            told = [n for n in names if n.startswith(word) and n.endswith(".json") and claim.made(n)]
            name = max(told, key=lambda one: term_in(one) or ("", (0, 0)), default=f"{word}{claim.tag}.json")
        path = f"{directory_of(iteration)}/{name}"
        try:
            part = RankReport.from_json(self.place.read(path).decode())
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.place.check_owner()  # a new owner may have removed it
            raise CheckpointError(
                f"nothing is published: {self.place.path(path)} cannot be read ({cause_of(error)}). Fix: repair the "
                "directory, and save again",
                code="report-unreadable",
            ) from None
        if claim is not None and part.term != claim.term:
            if damage := self.damage_in_header(iteration, part.name, part.file):
                raise CheckpointError(f"nothing is published: {damage}. Fix: save again", code="part-overwritten")
        return part

    def _directories(self) -> list[int]:
        refused = set(self.place.refused())
        iterations = (iteration_of(name) for name in self.place.names() if name not in refused)
        return sorted(iteration for iteration in iterations if iteration is not None)

    def _published(self, iteration: int) -> bool:
        return self._counts(iteration, self.place.names(directory_of(iteration)))

    def _counts(self, iteration: int, names: Iterable[str]) -> bool:
        """Returns whether there is a manifest, neither being removed nor set aside."""
        if manifests.MANIFEST_FILE not in names or _REMOVED in names:
            return False
        asides = [name for name in names if name.startswith(_SET_ASIDE)]
        return not asides or self._text(iteration, manifests.MANIFEST_FILE) not in {
            self._text(iteration, n) for n in asides
        }

    def _text(self, iteration: int, name: str) -> bytes | None:
        with contextlib.suppress(OSError):
            return self.place.read(f"{directory_of(iteration)}/{name}")
        return None
