"""Checkpoints of Format v1 in a place: begun, published, read and removed, so that each is whole or not there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from moc.store import manifest as manifests
from moc.store.errors import CheckpointError
from moc.store.manifest import FileEntry, Manifest, Part
from moc.store.places import Place
from moc.store.regions import digest_of

_DIRECTORY = re.compile(r"^iter_(\d{7,})$")
_HIDDEN_PART = re.compile(r"^\.rank_\d+\.json$")


def directory_of(iteration: int) -> str:
    """Megatron's name for the checkpoint of an iteration, ``iter_0000100``."""
    return f"iter_{iteration:07d}"


def file_of(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank_{rank:05d}.safetensors"


class Store:
    """The checkpoints in a place."""

    def __init__(self, place: Place):
        self.place = place

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

    def begin(self, iteration: int) -> None:
        """Makes room for a checkpoint: one that is there for this iteration goes, manifest first."""
        self.remove(iteration)

    def write_file(self, iteration: int, rank: int, parts: Iterable) -> None:
        """Writes the file of a rank, durably."""
        self.place.write(f"{directory_of(iteration)}/{file_of(rank)}", parts)

    def report(self, iteration: int, rank: int, part: Part) -> None:
        """Leaves word of what a rank has written, for the one that publishes."""
        self.place.write(self._report(iteration, rank), [part.to_json().encode()])

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

    def publish(self, manifest: Manifest) -> None:
        """Makes a checkpoint of what was written for an iteration, atomically."""
        directory = directory_of(manifest.iteration)
        self.place.write(f"{directory}/{manifests.NAME}", [manifest.to_json().encode()])
        for name in self.place.names(directory):
            if _HIDDEN_PART.match(name):
                self.place.remove(f"{directory}/{name}")

    def remove(self, iteration: int) -> None:
        """Removes a checkpoint; its manifest first, so that a kill midway leaves none rather than half of one."""
        directory = directory_of(iteration)
        self.place.remove(f"{directory}/{manifests.NAME}")
        self.place.remove(directory)

    def clear_unpublished(self) -> None:
        """Removes what killed saves have left behind."""
        for iteration in self._directories():
            if not self._published(iteration):
                self.remove(iteration)

    def retain(self, keep: Callable[[list[int]], Iterable[int]]) -> None:
        """Removes the published checkpoints that ``keep`` does not choose, the oldest first."""
        published = self.iterations()
        kept = set(keep(published))
        for iteration in published:
            if iteration not in kept:
                self.remove(iteration)

    def damage_in_header(self, iteration: int, name: str, entry: FileEntry) -> str | None:
        """What is wrong with size or header of a file, if anything is; its data are compared as they are read."""
        path = f"{directory_of(iteration)}/{name}"
        try:
            blob = self.place.blob(path)
        except OSError as error:
            return f"{self.place.path(path)} cannot be read ({error.strerror or error})"
        if blob.size != entry.bytes:
            return f"{blob.name} has {blob.size} bytes instead of {entry.bytes}: it is truncated or overwritten"
        if digest_of(blob.read(0, entry.header_bytes)) != entry.header_xxh3_128:
            return f"{blob.name} is damaged: its header does not match its hash"
        return None

    def _report(self, iteration: int, rank: int) -> str:
        return f"{directory_of(iteration)}/.rank_{rank:05d}.json"

    def _directories(self) -> list[int]:
        matches = map(_DIRECTORY.match, self.place.names())
        return sorted(int(match[1]) for match in matches if match)

    def _published(self, iteration: int) -> bool:
        return manifests.NAME in self.place.names(directory_of(iteration))


def newest(count: int, every: int | None = None) -> Callable[[list[int]], list[int]]:
    """Which checkpoints to keep: the newest ``count``, and those whose iteration ``every`` divides."""

    def keep(published: list[int]) -> list[int]:
        multiples = [iteration for iteration in published if every and iteration % every == 0]
        return published[-count:] + multiples

    return keep
