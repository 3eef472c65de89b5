"""Checkpoints of Format v1 in a place: begun, published, read and removed, so that each is whole or not there."""

from __future__ import annotations

import re
from collections.abc import Iterable

from moc.store import manifest as manifests
from moc.store.blobs import Blob
from moc.store.digest import digest_of
from moc.store.errors import CheckpointError, DamagedRegionError
from moc.store.manifest import FileEntry, Manifest, Part
from moc.store.places import Place

_DIRECTORY = re.compile(r"^iter_(\d{7,})$")
_CHUNK = 16 << 20  # bytes written at once
_SET_ASIDE = f"{manifests.NAME}.superseded"


def directory_of(iteration: int) -> str:
    """Megatron's name for the checkpoint of an iteration, ``iter_0000100``."""
    return f"iter_{iteration:07d}"


def file_of(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank_{rank:05d}.safetensors"


class Store:
    """The checkpoints in a place.

    Args:
        place: where.
        slack: files may be longer than what they hold, as buffers are that are used again.
    """

    def __init__(self, place: Place, slack: bool = False):
        self.place, self._slack = place, slack

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

    def report(self, iteration: int, rank: int, part: Part) -> None:
        """Leaves word of what a rank has written, for the one that publishes."""
        self.place.write(self._report(iteration, rank), [part.to_json().encode()], final=False)

    def reported(self, iteration: int, ranks: Iterable[int]) -> list[Part]:
        """What ranks have written.

        Raises:
            CheckpointError: one of them has left no word.
        """
        parts = []
        for rank in ranks:
            path = self._report(iteration, rank)
            try:
                parts.append(Part.from_json(self.place.read(path).decode()))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"{self.place.path(path)} cannot be read ({error}): nothing is published"
                ) from None
        return parts

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
            CheckpointError: another job has taken the place; so it is with all that removes.
        """
        self.place.check_owner()
        directory = directory_of(manifest.iteration)
        self.place.write(f"{directory}/{manifests.NAME}", [manifest.to_json().encode()])
        for name in self.place.names(directory):
            if name != manifests.NAME and name not in manifest.files:
                self.place.remove(f"{directory}/{name}")

    def remove(self, iteration: int) -> None:
        """Removes a checkpoint; its manifest first, so that a kill midway leaves none rather than half of one."""
        self.place.check_owner()
        directory = directory_of(iteration)
        self.place.remove(f"{directory}/{manifests.NAME}")
        self.place.remove(directory)

    def set_aside(self, iteration: int) -> None:
        """Takes a checkpoint out of the row without deleting its files, which stay until they are written anew."""
        self.place.check_owner()
        directory = directory_of(iteration)
        text = self.place.read(f"{directory}/{manifests.NAME}")
        self.place.write(f"{directory}/{_SET_ASIDE}", [text])
        self.place.remove(f"{directory}/{manifests.NAME}")

    def clear_unpublished(self) -> None:
        """Removes what killed saves have left behind; what was set aside stays."""
        for iteration in self._directories():
            names = self.place.names(directory_of(iteration))
            if manifests.NAME not in names and _SET_ASIDE not in names:
                self.remove(iteration)

    def clear(self) -> None:
        """Removes every checkpoint, and all else that is here but for the lock."""
        self.place.check_owner()
        for iteration in self.iterations():
            self.remove(iteration)
        for name in self.place.names():
            if not name.startswith("."):
                self.place.remove(name)

    def remove_before(self, iteration: int) -> None:
        """Removes the checkpoints that are older, the oldest first."""
        for older in [other for other in self.iterations() if other < iteration]:
            self.remove(older)

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

    def _report(self, iteration: int, rank: int) -> str:
        return f"{directory_of(iteration)}/.rank_{rank:05d}.json"

    def _directories(self) -> list[int]:
        matches = map(_DIRECTORY.match, self.place.names())
        return sorted(int(match[1]) for match in matches if match)

    def _published(self, iteration: int) -> bool:
        return manifests.NAME in self.place.names(directory_of(iteration))
