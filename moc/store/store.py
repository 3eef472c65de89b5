"""Checkpoints of Format v1 in a place: begun, published, read and removed, so that each is whole or not there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
from collections.abc import Iterable

from moc.store import manifest as manifests
from moc.store.blobs import Blob
from moc.store.claims import term_in
from moc.store.digest import digest_of
from moc.store.errors import CheckpointError, DamagedRegionError
from moc.store.manifest import FileEntry, Manifest, RankReport
from moc.store.storage import Storage

_DIRECTORY = re.compile(r"iter_(\d{7,})")
_RANK = re.compile(r"rank_\d{5,}\.safetensors")
_CHUNK = 16 << 20  # bytes written at once
_SET_ASIDE = f"{manifests.NAME}.superseded"
_REMOVED = f"{manifests.NAME}.removed"


def directory_of(iteration: int) -> str:
    """Megatron's name for the checkpoint of an iteration, ``iter_0000100``."""
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """The inverse of :func:`directory_of`; None where the name is another one."""
    match = _DIRECTORY.fullmatch(name)
    return int(match[1]) if match else None


def file_of(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank_{rank:05d}.safetensors"


def is_of_rank(file: str) -> bool:
    """Whether a file is one that a rank wrote: of what it saved, all is in it."""
    return _RANK.fullmatch(file) is not None


class Store:
    """The checkpoints in a place.

    What is published and removed is so in the name of the place's claim, if it has one, and not without it.

    Args:
        place: where.
        slack: files may be longer than what they hold, as buffers are that are used again.
    """

    def __init__(self, place: Storage, slack: bool = False):
        self.place, self._slack = place, slack
        self._taking = threading.Lock()
        self._before: set[int] = set()

    def take(self) -> None:
        """Begins the term of the place's claim, once; what publishes or removes does it, if nobody has before.

        Who goes on from what is here has to do it before looking, so that nothing is published here afterwards by
        those whom it supersedes.

        Raises:
            CheckpointError: another launch has the place, or a newer term.
        """
        if self.place.claim is None:
            return
        with self._taking:
            if not self.place.taken:
                self.place.lock()
                self._before = set(self._directories())

    def iterations(self) -> list[int]:
        """Iterations that have a manifest, ascending."""
        return [iteration for iteration in self._directories() if self._published(iteration)]

    def manifest(self, iteration: int) -> Manifest:
        """What the checkpoint of an iteration holds.

        Raises:
            CheckpointError: it is not there, or the manifest is damaged or another iteration's.
        """
        path = f"{directory_of(iteration)}/{manifests.NAME}"
        try:
            text = self.place.read(path).decode()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.place.path(path)} cannot be read ({error})") from None
        if not self._published(iteration):
            raise CheckpointError(f"{self.place.path(path)} cannot be read (it is set aside, or being removed)")
        manifest = Manifest.from_json(text, self.place.path(path))
        if manifest.iteration != iteration:
            raise CheckpointError(f"{self.place.path(path)} is of iteration {manifest.iteration}: somebody moved it")
        return manifest

    def write_file(self, iteration: int, rank: int, parts: Iterable) -> None:
        """Writes the file of a rank; its name is durable when the checkpoint is published."""
        self.place.write(f"{directory_of(iteration)}/{file_of(rank)}", parts, final=False)

    def copy_files(self, manifest: Manifest, target: Store) -> None:
        """Copies the files of a checkpoint to another place; it is for the caller to publish them there."""
        for name, entry in manifest.files.items():
            path = f"{directory_of(manifest.iteration)}/{name}"
            blob, starts = self.place.blob(path), range(0, entry.bytes, _CHUNK)
            target.place.write(path, (blob.read(i, min(i + _CHUNK, entry.bytes)) for i in starts), final=False)

    def report(self, iteration: int, rank: int, part: RankReport) -> None:
        """Leaves word of what a rank has written, for the one that publishes."""
        claim, path = self.place.claim, f"{directory_of(iteration)}/.rank_{rank:05d}.json"
        if claim is not None:  # each term has its own, so that lives of a job do not write over one another's
            part = dataclasses.replace(part, job=claim.job, term=claim.term)
            path = f"{directory_of(iteration)}/.rank_{rank:05d}.{claim.tag}.json"
        self.place.write(path, [part.to_json().encode()], final=False)

    def reported(self, iteration: int, ranks: Iterable[int]) -> list[RankReport]:
        """What ranks have written; of the place's launch alone, of which each term goes on where the last one was.

        Raises:
            CheckpointError: one of them has left no word, or its file is not what it says.
        """
        names = self.place.names(directory_of(iteration))
        if _REMOVED in names:
            raise CheckpointError(f"{self.place.path(directory_of(iteration))} is being removed: nothing is published")
        return [self._reported(iteration, rank, names) for rank in ranks]

    def has_all(self, iteration: int, ranks: Iterable[int]) -> bool:
        """Whether a checkpoint is published, or could be, since all these ranks have left word."""
        if self._published(iteration):
            return True
        try:
            return bool(self.reported(iteration, ranks))
        except CheckpointError:
            return False

    def publish(self, manifest: Manifest) -> None:
        """Makes a checkpoint of what was written for an iteration, atomically; then removes what it does not name.

        Raises:
            CheckpointError: somebody else has the place, and so it is with all that removes; or a file was written
                over before the term began.
        """
        claim = self.place.claim
        if claim is not None:
            manifest = dataclasses.replace(manifest, run=claim.run, job=claim.job, term=claim.term)
        self.rewrite(manifest)

    def rewrite(self, manifest: Manifest) -> None:
        """The same for files that were published before, in whose name it was: what other nodes have belongs to it."""
        self._check()
        directory = directory_of(manifest.iteration)
        if manifest.iteration in self._before:  # whoever was superseded may have written here until then
            for name, entry in manifest.files.items():
                if damage := self.damage_in_header(manifest.iteration, name, entry):
                    raise CheckpointError(f"{damage}: nothing is published")
        there = self.place.names(directory)  # and not what others write from now on
        self.place.write(f"{directory}/{manifests.NAME}", [manifest.to_json().encode()])
        for name in there:
            if name != manifests.NAME and name not in manifest.files:
                self.place.remove(f"{directory}/{name}")

    def remove(self, iteration: int) -> None:
        """Removes a checkpoint; its manifest first, so that a kill midway leaves none rather than half of one."""
        self._check()
        self.place.discard(directory_of(iteration), manifests.NAME, _REMOVED)

    def move(self, iteration: int, target: Store) -> None:
        """Moves a checkpoint to another place of the same file system, where it must not be yet."""
        self._check()
        directory = directory_of(iteration)
        os.makedirs(target.place.name, exist_ok=True)
        os.rename(self.place.path(directory), target.place.path(directory))

    def set_aside(self, iteration: int) -> None:
        """Takes a checkpoint out of the row without deleting its files, which stay until they are written anew.

        What says so is a copy of its manifest: another one in its place counts at once.
        """
        self._check()
        directory, claim = directory_of(iteration), self.place.claim
        text = self.place.read(f"{directory}/{manifests.NAME}")
        self.place.write(f"{directory}/{_SET_ASIDE}{f'.{claim.tag}' if claim is not None else ''}", [text])

    def clear_unpublished(self) -> None:
        """Removes what killed saves have left behind; of what was set aside, files and manifest stay."""
        for iteration in self._directories():
            self.give_up(iteration)

    def give_up(self, iteration: int) -> None:
        """The same for one iteration, of which a save did not end well."""
        directory = directory_of(iteration)
        names = self.place.names(directory)
        if _REMOVED in names or not any(name.startswith(manifests.NAME) for name in names):
            self.remove(iteration)
        elif hidden := [name for name in names if name.startswith(".")]:
            self._check()
            for name in hidden:  # words of what was written over it, and what nobody has finished
                self.place.remove(f"{directory}/{name}")

    def clear(self) -> None:
        """Removes every checkpoint and all else that is here; at last what tells whose it is, and the place itself."""
        self._check()
        for iteration in self.iterations():
            self.remove(iteration)
        for name in self.place.names():
            if not name.startswith("."):
                self.place.remove(name)
        self._check()
        self.place.remove("")

    def damage_in_header(self, iteration: int, name: str, entry: FileEntry) -> str | None:
        """What is wrong with size or header of a file, if anything is; its data are compared as they are read."""
        try:
            self.blob(iteration, name, entry)
        except DamagedRegionError as damage:
            return str(damage)
        return None

    def blob(self, iteration: int, name: str, entry: FileEntry) -> Blob:
        """A file of which size and header are as they were written.

        Raises:
            DamagedRegionError: they are not.
        """
        path = f"{directory_of(iteration)}/{name}"
        try:
            blob = self.place.blob(path)
        except OSError as error:
            raise DamagedRegionError(f"{self.place.path(path)} cannot be read ({error.strerror or error})") from None
        if blob.size < entry.bytes or (blob.size > entry.bytes and not self._slack):
            raise DamagedRegionError(
                f"{blob.name} has {blob.size} bytes instead of {entry.bytes}: it is truncated or overwritten"
            )
        if digest_of(blob.read(0, entry.header_bytes)) != entry.header_xxh3_128:
            raise DamagedRegionError(f"{blob.name} is damaged: its header does not match its hash")
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
            self.place.check_owner()  # who has taken the place has tidied it up
            raise CheckpointError(f"{self.place.path(path)} cannot be read ({error}): nothing is published") from None
        if claim is not None and part.term != claim.term:
            if damage := self.damage_in_header(iteration, part.name, part.file):
                raise CheckpointError(f"{damage}: nothing is published")
        return part

    def _directories(self) -> list[int]:
        iterations = map(iteration_of, self.place.names())
        return sorted(iteration for iteration in iterations if iteration is not None)

    def _published(self, iteration: int) -> bool:
        return self._counts(iteration, self.place.names(directory_of(iteration)))

    def _counts(self, iteration: int, names: Iterable[str]) -> bool:
        """Whether there is a manifest, of what is neither being removed nor set aside."""
        if manifests.NAME not in names or _REMOVED in names:
            return False
        asides = [name for name in names if name.startswith(_SET_ASIDE)]
        return not asides or self._text(iteration, manifests.NAME) not in {self._text(iteration, n) for n in asides}

    def _text(self, iteration: int, name: str) -> bytes | None:
        with contextlib.suppress(OSError):
            return self.place.read(f"{directory_of(iteration)}/{name}")
        return None
