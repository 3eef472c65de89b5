"""Finds data of another node's snapshot in this node's own snapshot, so that it need not be sent.

With replicated optimizer state, several nodes save the same tensor chunks (:mod:`moc.recovery.redundancy`).  A copy
reads a chunk locally if its hash equals the hash in the original's header, and its bytes match that hash.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import xxhash

from moc.files.tree import Tree
from moc.state.operators import operator_of
from moc.state.region import Region
from moc.store.boxes import StoredBox, read_boxes
from moc.store.digest import digest_of
from moc.store.errors import CheckpointError
from moc.store.manifest import Manifest
from moc.store.store import Store, directory_of

_CHUNK = 4 << 20
"""Bytes copied per turn of the event loop, as in a remote read (:data:`moc.runtime.pull.CHUNK`)."""


class Missing(NamedTuple):
    """Bytes [start, stop) of an original that must be sent, and their offset in the copy."""

    start: int
    stop: int
    place: int


class _Own(NamedTuple):
    path: str
    box: StoredBox


@dataclass
class HeldAlike:
    """Tensor chunks of this node's own snapshot that may be identical on other nodes.

    Attributes:
        boxes: chunks by name, slot and region.
        nbytes: bytes copied locally so far.
        differs: operators whose hash or dtype differs on the other node.
        damaged: operators whose bytes on this node do not match their hash.
    """

    boxes: dict[tuple[str, str, Region], _Own] = field(default_factory=dict)
    nbytes: int = 0
    differs: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.boxes)

    async def fill(self, descriptor: int, header: bytes, size: int, spans: Sequence[tuple[int, int]]) -> list[Missing]:
        """Copies the data of this node into a file; returns the missing ranges, in order.

        Args:
            descriptor: descriptor of the file.
            header: bytes of the file before its data.
            size: size of the file, in bytes.
            spans: byte ranges [start, stop) of the original that follow the header, each with complete chunks.

        Raises:
            ValueError: the header is malformed.
        """
        boxes = sorted(read_boxes("", size, lambda start, stop: header[start:stop]), key=lambda box: box.start)
        missing: list[Missing] = []
        for box, source in _with_sources(boxes, spans):
            if await self._copy(box, descriptor):
                self.nbytes += box.nbytes
            elif missing and missing[-1].stop == source and missing[-1].place + source - missing[-1].start == box.start:
                missing[-1] = missing[-1]._replace(stop=source + box.nbytes)
            else:
                missing.append(Missing(source, source + box.nbytes, box.start))
        return missing

    async def _copy(self, box: StoredBox, descriptor: int) -> bool:
        own = self.boxes.get((box.name, box.slot, box.region))
        if own is None or box.digest is None:
            return False
        if (own.box.digest, own.box.stored_as) != (box.digest, box.stored_as):
            self.differs.add(operator_of(box.name))
            return False
        hasher, place = xxhash.xxh3_128(), box.start
        async for data in _read(own):
            hasher.update(data)
            os.pwrite(descriptor, data, place)
            place += len(data)
        if hasher.hexdigest() != box.digest:
            self.damaged.add(operator_of(box.name))
            return False
        return True


def held_alike(store: Store, theirs: Manifest) -> HeldAlike:
    """Returns the chunks of a node's own part of a snapshot that another node's part may share; possibly none."""
    if not (alike := theirs.alike):
        return HeldAlike()
    try:
        mine = store.manifest(theirs.iteration)
    except CheckpointError:
        return HeldAlike()
    if (mine.writers, mine.job) != (theirs.writers, theirs.job):
        return HeldAlike()
    found = HeldAlike()
    for name, entry in mine.files.items():
        path = store.place.path(f"{directory_of(mine.iteration)}/{name}")
        for box in _boxes(Path(path), entry.header_bytes, entry.header_xxh3_128):
            if operator_of(box.name) in alike:
                found.boxes[box.name, box.slot, box.region] = _Own(path, box)
    return found


def _boxes(path: Path, header_bytes: int, digest: str) -> list[StoredBox]:
    """Returns the chunks in a file's header; none if it is damaged or unreadable."""
    try:
        with open(Tree(path.parent).open(path.name), "rb") as file:
            header, size = file.read(header_bytes), os.fstat(file.fileno()).st_size
        if digest_of(header) != digest:
            return []
        return read_boxes(path.name, size, lambda start, stop: header[start:stop])
    except (OSError, ValueError):
        return []


def _with_sources(boxes: Sequence[StoredBox], spans: Sequence[tuple[int, int]]) -> Iterator[tuple[StoredBox, int]]:
    """Yields the chunks of a copy in order, each with its offset in the original."""
    rest = list(reversed(spans))
    for box in boxes:
        if not box.nbytes:
            continue
        start, stop = rest.pop()
        yield box, start
        if start + box.nbytes < stop:
            rest.append((start + box.nbytes, stop))


async def _read(own: _Own) -> AsyncIterator[bytes]:
    try:
        descriptor = os.open(own.path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return  # removed meanwhile: the hash check fails without bytes
    try:
        for start in range(own.box.start, own.box.start + own.box.nbytes, _CHUNK):
            yield os.pread(descriptor, min(_CHUNK, own.box.start + own.box.nbytes - start), start)
            await asyncio.sleep(0)
    finally:
        os.close(descriptor)
