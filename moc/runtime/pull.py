"""Copies a snapshot from another node's memory: files first, the manifest last, so that it is whole or absent.

Protocol: a *read* names the node that has offered its memory to the other replica server, the node whose snapshot is
wanted (the same, or one that it keeps a copy for), the iteration, a file and a range of bytes.  The answer is *data*,
with the size of the file; *absent*, if there is no such file; or *refused*.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from moc.runtime import async_connections as wire
from moc.runtime.message import Message
from moc.runtime.wire import PeerGoneError
from moc.store import manifest as manifests
from moc.store.digest import digest_of
from moc.store.errors import CheckpointError, DamagedRegionError
from moc.store.manifest import FileEntry, Manifest
from moc.store.slots import free_slot
from moc.store.storage import LocalPlace
from moc.store.store import Store, directory_of

CHUNK = 4 << 20
"""Bytes per request."""

SILENCE_S = 30.0
"""Seconds without a byte after which a node counts as gone; a slow one does not."""

_NODE = re.compile(r"[0-9A-Za-z]+")
_FILE = re.compile(r"\w+(?:\.\w+)*\.safetensors|" + re.escape(manifests.NAME))  # of a rank, or of one expert


class AbsentError(RuntimeError):
    """The other node has not yet published the snapshot, or no longer has it."""


@dataclass(frozen=True)
class Wanted:
    """A snapshot of one node, to be copied here."""

    iteration: int  # iterations completed when it was taken
    of: str  # the node whose part of the snapshot it is
    held_by: str  # the node that has it in memory
    address: str  # ``host:port`` of that node's replica server
    rate: float | None = None  # most bytes per second; None for no limit
    patient: bool = False  # retry while the snapshot is absent or its holder does not answer


def part_of(root: Path, node: str, of: str) -> Path:
    """Directory in a node's memory with a node's snapshots: its own, or copies kept for another node.

    Raises:
        ValueError: a node name is invalid.
    """
    if not (_NODE.fullmatch(node) and _NODE.fullmatch(of)):
        raise ValueError(f"nodes are called by letters and digits, not {node!r} and {of!r}")
    return root if node == of else root / f"of_{of}"


def file_in(root: Path, node: str, of: str, iteration: int, file: str) -> Path:
    """Path of a snapshot file in a node's memory; raises ValueError for the name of any other file."""
    if type(iteration) is not int or iteration < 0 or not _FILE.fullmatch(file):
        raise ValueError(f"{file!r} of iteration {iteration!r} is no file of a snapshot")
    return part_of(root, node, of) / directory_of(iteration) / file


async def pull(wanted: Wanted, token: bytes, into: Path) -> int:
    """Copies a snapshot, unless an identical one is present; returns the bytes copied.

    Args:
        wanted: the snapshot.
        token: the job's secret.
        into: directory of that node's snapshots in this node's memory.

    Raises:
        AbsentError: the holder does not have it.
        PeerGoneError: the holder does not answer.
        DamagedRegionError, CheckpointError: its contents contradict its manifest, or this node lacks room.
    """
    async with _Remote(wanted, await wire.open(wanted.address, token)) as remote:
        size = await remote.size(manifests.NAME)
        text = b"".join([bytes(data) async for _, data in remote.read(manifests.NAME, size)])
        name = f"{manifests.NAME} of iteration {wanted.iteration} in the memory of node {wanted.held_by}"
        manifest = Manifest.from_json(text.decode(errors="replace"), name)
        if manifest.iteration != wanted.iteration or not all(map(_FILE.fullmatch, manifest.files)):
            raise CheckpointError(f"{name} is of iteration {manifest.iteration}: somebody moved it")
        store = Store(LocalPlace(into, in_memory=True), slack=True)
        published = f"{directory_of(wanted.iteration)}/{manifests.NAME}"
        if wanted.iteration in store.iterations() and store.place.read(published) == text:
            return 0
        store.remove(wanted.iteration)
        for file, entry in manifest.files.items():
            await _pull_file(remote, file, entry, into)
        store.place.write(published, [text])
        return manifest.bytes


async def _pull_file(remote: _Remote, file: str, entry: FileEntry, into: Path) -> None:
    slot = _slot(into, file, entry, remote.wanted)
    descriptor = os.open(slot, os.O_RDWR)
    try:
        async for start, data in remote.read(file, entry.bytes):
            os.pwrite(descriptor, data, start)
        if digest_of(os.pread(descriptor, entry.header_bytes, 0)) != entry.header_xxh3_128:
            raise DamagedRegionError(f"{remote.name(file)} is damaged: its header does not match its hash")
    finally:
        os.close(descriptor)
    target = into / directory_of(remote.wanted.iteration) / file
    target.parent.mkdir(parents=True, exist_ok=True)
    os.link(slot, target)


def _slot(into: Path, file: str, entry: FileEntry, wanted: Wanted) -> Path:
    try:
        return free_slot(into / "slots", file, entry.bytes)
    except OSError as error:
        raise CheckpointError(
            f"{into} has no room for the copy of {file} of node {wanted.of}, of {entry.bytes:,} bytes "
            f"({error.strerror}): enlarge it (Docker: --shm-size), name another memory file system with "
            "--ckpt-memory-dir, or keep fewer copies with --replicas"
        ) from None


class _Remote:
    """A snapshot in another node's memory."""

    def __init__(self, wanted: Wanted, connection: wire.AsyncConnection):
        self.wanted, self._connection = wanted, connection
        self._begun, self._bytes = time.monotonic(), 0

    async def __aenter__(self) -> _Remote:
        return self

    async def __aexit__(self, *_) -> None:
        self._connection.abort()

    def name(self, file: str) -> str:
        """Name of a file, for messages."""
        wanted = self.wanted
        return f"{file} of iteration {wanted.iteration} of node {wanted.of}, in the memory of node {wanted.held_by},"

    async def size(self, file: str) -> int:
        """Size of a file, in bytes."""
        await self._ask(file, 0, 0)
        return (await self._answer()).header["size"]

    async def read(self, file: str, nbytes: int) -> AsyncIterator[tuple[int, bytes | bytearray | memoryview]]:
        """Reads the first bytes of a file as pairs of offset and piece; one piece is prefetched."""
        spans = [(start, min(CHUNK, nbytes - start)) for start in range(0, nbytes, CHUNK)]
        for span in spans[:1]:
            await self._ask(file, *span)
        for (start, length), following in zip(spans, [*spans[1:], None], strict=True):
            if following:
                await self._ask(file, *following)
            data = (await self._answer()).body
            if len(data) != length:
                raise DamagedRegionError(f"{self.name(file)} ends before byte {start + length}: it is truncated")
            await self._keep_pace(length)
            yield start, data

    async def _ask(self, file: str, start: int, nbytes: int) -> None:
        wanted = self.wanted
        where = {"node": wanted.held_by, "of": wanted.of, "iteration": wanted.iteration, "file": file}
        await self._connection.send(Message({"kind": "read", "start": start, "bytes": nbytes, **where}))

    async def _answer(self) -> Message:
        try:
            answer = await self._connection.recv(silence=SILENCE_S)
        except TimeoutError:
            raise PeerGoneError(f"node {self.wanted.held_by} has sent nothing for {SILENCE_S:g} s") from None
        if answer.kind == "data":
            return answer
        about = f"the snapshot of iteration {self.wanted.iteration} of node {self.wanted.of}"
        if answer.kind == "absent":
            raise AbsentError(f"node {self.wanted.held_by} does not have {about}")
        raise CheckpointError(f"node {self.wanted.held_by} does not give {about}: {answer.header.get('why')}")

    async def _keep_pace(self, nbytes: int) -> None:
        self._bytes += nbytes
        if self.wanted.rate is not None:
            ahead = self._begun + self._bytes / self.wanted.rate - time.monotonic()
            if ahead > 0:
                await asyncio.sleep(ahead)
