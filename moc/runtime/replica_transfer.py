"""Copies a snapshot from another node's memory: files first, the manifest last, so that it is complete or absent.

A copy of only some operators has its own files.  Their headers have the tensor chunks and hashes of the original
headers; each byte of data is read once.

With replicated optimizer state, several nodes save the same tensor chunks (:mod:`moc.recovery.copy_placement`).  A copy
reads a chunk from this node's own snapshot if its hash equals the hash in the original's header, and its bytes match
that hash.

Protocol: a *read* names

* the node that has offered its memory to the other replica server;
* the node whose snapshot is requested: the same, or one that it keeps a copy for;
* the iteration, a file, and a byte range.

The answer is *data*, with the size of the file; *absent*, if there is no such file; or *refused*.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import os
import re
import time
from collections.abc import AsyncIterator, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import xxhash

from moc.errors import UserError
from moc.files.safe_directory import SafeDirectory, open_without_links
from moc.runtime import async_connections
from moc.runtime.protocol import Message, PeerGoneError
from moc.state.operators import Detail, Region, operator_of
from moc.store import manifest as manifests
from moc.store import reserved_memory
from moc.store.errors import OUT_OF_SPACE_ERRNOS, CheckpointError, DamagedTensorError, InsufficientMemoryError
from moc.store.header import StoredBox, extract_sub_file, read_boxes
from moc.store.manifest import FileEntry, Manifest, compute_digest
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name, is_shard_file_or_part, parse_rank, shard_file_name, sub_file_name

_LOCAL_COPY_BYTES = 4 << 20
"""Bytes copied per turn of the event loop, as in a remote read (:data:`moc.runtime.replica_transfer.REQUEST_BYTES`)."""


class MissingRange(NamedTuple):
    """Bytes [start, stop) of an original that must be sent, and their offset in the copy."""

    start: int
    stop: int
    offset: int


class _LocalChunk(NamedTuple):
    path: str
    chunk: StoredBox


@dataclass
class IdenticalChunks:
    """Tensor chunks of this node's own snapshot that may be identical on other nodes.

    Attributes:
        chunks: chunks by name, slot and region.
        nbytes: bytes copied locally so far.
        differs: operators whose hash or dtype differs on the other node.
        damaged: operators whose bytes on this node do not match their hash.
    """

    chunks: dict[tuple[str, str, Region], _LocalChunk] = field(default_factory=dict)
    nbytes: int = 0
    differs: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.chunks)

    async def copy_into(
        self, descriptor: int, header: bytes, size: int, spans: Sequence[tuple[int, int]]
    ) -> list[MissingRange]:
        """Copies the data of this node into a file; returns the missing ranges, in order.

        Args:
            descriptor: descriptor of the file.
            header: bytes of the file before its data.
            size: size of the file, in bytes.
            spans: byte ranges [start, stop) of the original that follow the header, each with complete chunks.

        Raises:
            ValueError: the header is malformed.
        """
        chunks = sorted(read_boxes("", size, lambda start, stop: header[start:stop]), key=lambda chunk: chunk.start)
        missing: list[MissingRange] = []
        for chunk, source in _with_source_offsets(chunks, spans):
            if await self._copy_chunk(chunk, descriptor):
                self.nbytes += chunk.nbytes
            elif (
                missing
                and missing[-1].stop == source
                and missing[-1].offset + source - missing[-1].start == chunk.start
            ):
                missing[-1] = missing[-1]._replace(stop=source + chunk.nbytes)
            else:
                missing.append(MissingRange(source, source + chunk.nbytes, chunk.start))
        return missing

    async def _copy_chunk(self, chunk: StoredBox, descriptor: int) -> bool:
        local = self.chunks.get((chunk.name, chunk.slot, chunk.region))
        if local is None or chunk.digest is None:
            return False
        if (local.chunk.digest, local.chunk.stored_as) != (chunk.digest, chunk.stored_as):
            self.differs.add(operator_of(chunk.name))
            return False
        hasher, offset = xxhash.xxh3_128(), chunk.start
        async for data in _read_local_chunk(local):
            hasher.update(data)
            os.pwrite(descriptor, data, offset)
            offset += len(data)
        if hasher.hexdigest() != chunk.digest:
            self.damaged.add(operator_of(chunk.name))
            return False
        return True


def find_identical_chunks(store: Store, remote_manifest: Manifest) -> IdenticalChunks:
    """Returns the chunks of a node's own part of a snapshot that another node's part may share; possibly none."""
    if not (operators := remote_manifest.replica_counts):
        return IdenticalChunks()
    try:
        manifest = store.read_manifest(remote_manifest.iteration)
    except CheckpointError:
        return IdenticalChunks()
    if (manifest.writers, manifest.job) != (remote_manifest.writers, remote_manifest.job):
        return IdenticalChunks()
    chunks = IdenticalChunks()
    for name, entry in manifest.files.items():
        path = store.storage.display_path(f"{checkpoint_name(manifest.iteration)}/{name}")
        for chunk in _read_chunks(Path(path), entry.header_bytes, entry.header_xxh3_128):
            if operator_of(chunk.name) in operators:
                chunks.chunks[chunk.name, chunk.slot, chunk.region] = _LocalChunk(path, chunk)
    return chunks


def _read_chunks(path: Path, header_bytes: int, digest: str) -> list[StoredBox]:
    """Returns the chunks in a file's header; none if it is damaged or unreadable."""
    try:
        with open(SafeDirectory(path.parent).open(path.name), "rb") as file:
            header, size = file.read(header_bytes), os.fstat(file.fileno()).st_size
        if compute_digest(header) != digest:
            return []
        return read_boxes(path.name, size, lambda start, stop: header[start:stop])
    except (OSError, ValueError):
        return []


def _with_source_offsets(
    chunks: Sequence[StoredBox], spans: Sequence[tuple[int, int]]
) -> Iterator[tuple[StoredBox, int]]:
    """Yields the chunks of a copy in order, each with its offset in the original."""
    remaining = list(reversed(spans))
    for chunk in chunks:
        if not chunk.nbytes:
            continue
        start, stop = remaining.pop()
        yield chunk, start
        if start + chunk.nbytes < stop:
            remaining.append((start + chunk.nbytes, stop))


async def _read_local_chunk(local: _LocalChunk) -> AsyncIterator[bytes]:
    try:
        descriptor = os.open(local.path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return  # removed meanwhile: the hash check fails without bytes
    try:
        for start in range(local.chunk.start, local.chunk.start + local.chunk.nbytes, _LOCAL_COPY_BYTES):
            yield os.pread(descriptor, min(_LOCAL_COPY_BYTES, local.chunk.start + local.chunk.nbytes - start), start)
            await asyncio.sleep(0)
    finally:
        os.close(descriptor)


REQUEST_BYTES = 4 << 20
"""Bytes per request, and maximum bytes requested ahead of it."""

_MAX_PENDING = 16  # maximum pending: they must fit into the sockets' buffers, since both ends wait for reads

SILENCE_TIMEOUT_S = 30.0
"""Seconds without a received byte after which a node counts as lost."""

_NODE = re.compile(r"[0-9A-Za-z]+")
_FILE = re.compile(r"\w+(?:\.\w+)*\.safetensors|" + re.escape(manifests.MANIFEST_FILE))  # file of a rank or an expert


class AbsentError(UserError, RuntimeError):
    """The other node has not yet committed the snapshot, or no longer has it."""

    code = "copy-refused"


@dataclass(frozen=True)
class CopyRequest:
    """A snapshot of one node, to be copied here."""

    iteration: int  # iterations completed when it was taken
    of: str  # node whose part of the snapshot it is
    held_by: str  # node that has it in memory
    address: str  # ``host:port`` of that node's replica server
    rate: float | None = None  # maximum bytes per second; None for no limit
    patient: bool = False  # retry while the snapshot is absent or its holder does not answer
    operators: Mapping[str, str] | None = None  # operators to copy, each with its state subset; None for all


class CopyResult(NamedTuple):
    """Result of a copy, and faults found in this node's identical data.

    Attributes:
        bytes: bytes sent by the other node.
        alike: bytes not sent, since this node has identical ones.
        differs: operators that should be identical, and are not.
        damaged: operators whose bytes in this node's own snapshot do not match their hash.
    """

    bytes: int = 0
    alike: int = 0
    differs: Sequence[str] = ()
    damaged: Sequence[str] = ()


class _FileCopy(NamedTuple):
    """A file of a copy: its name and manifest entry, bytes to write as header, and byte ranges of the original."""

    name: str
    entry: FileEntry
    header: bytes
    spans: list[tuple[int, int]]


def snapshots_directory(root: Path, node: str, of: str) -> Path:
    """Returns the directory in a node's memory with a node's snapshots: its own, or copies kept for another node.

    Raises:
        ValueError: a node name is invalid.
    """
    if not (_NODE.fullmatch(node) and _NODE.fullmatch(of)):
        raise ValueError(f"nodes are called by letters and digits, not {node!r} and {of!r}")
    return root if node == of else root / f"of_{of}"


def snapshot_file(root: Path, node: str, of: str, iteration: int, file: str) -> Path:
    """Returns the path of a snapshot file in a node's memory; raises ValueError for the name of any other file."""
    if type(iteration) is not int or iteration < 0 or not _FILE.fullmatch(file):
        raise ValueError(f"{file!r} of iteration {iteration!r} is no file of a snapshot")
    return snapshots_directory(root, node, of) / checkpoint_name(iteration) / file


async def copy_snapshot(
    request: CopyRequest, token: bytes, destination: Path, own_directory: Path | None = None
) -> CopyResult:
    """Copies a snapshot, unless an identical one is present.

    Args:
        request: the snapshot.
        token: the job's secret.
        destination: directory of that node's snapshots in this node's memory.
        own_directory: directory of this node's own snapshots, if they may have identical data.

    Raises:
        AbsentError: the holder does not have it.
        PeerGoneError: the holder does not answer.
        InsufficientMemoryError: this node lacks memory for it.
        DamagedTensorError, CheckpointError: its contents contradict its manifest, or it cannot be written.
    """
    async with _RemoteSnapshot(request, await async_connections.open_connection(request.address, token)) as remote:
        name = f"{manifests.MANIFEST_FILE} of iteration {request.iteration} in the memory of node {request.held_by}"
        text, manifest = await remote.manifest(name)
        if manifest.iteration != request.iteration or not all(map(_FILE.fullmatch, manifest.files)):
            raise CheckpointError(
                f"{name} is of iteration {manifest.iteration}. Fix: start without the snapshots of this node's memory",
                code="checkpoint-moved",
            )
        store = Store(LocalStorage(destination, in_memory=True), allows_slack=True)
        if own_directory is not None:
            remote.identical = find_identical_chunks(
                Store(LocalStorage(own_directory, in_memory=True), allows_slack=True), manifest
            )
        if request.operators is not None:
            return remote.result(await _copy_operators(remote, manifest, request.operators, store, destination))
        manifest_path = f"{checkpoint_name(request.iteration)}/{manifests.MANIFEST_FILE}"
        if request.iteration in store.iterations() and store.storage.read(manifest_path) == text:
            return CopyResult()
        store.remove(request.iteration)
        for file, entry in manifest.files.items():
            header = await remote.header(file, entry) if remote.identical else b""
            await _copy_file(remote, file, _FileCopy(file, entry, header, [(len(header), entry.bytes)]), destination)
        store.storage.write(manifest_path, [text])
        return remote.result(manifest.nbytes)


async def _copy_operators(
    remote: _RemoteSnapshot, manifest: Manifest, operators: Mapping[str, str], store: Store, destination: Path
) -> int:
    """Copies the requested operators that the local copy lacks; returns the bytes copied."""
    local = _local_manifest(store, manifest)
    details = {name: Detail(operators[name]) for name in manifest.operators.keys() & operators - local.operators.keys()}
    if not details:
        return 0
    if not local.files:
        store.remove(manifest.iteration)  # another snapshot's, or unfinished
    files, amount = dict(local.files), 0
    for file, entry in manifest.files.items():
        header = await remote.header(file, entry)
        file_copy = _select_chunks(remote, file, entry, header, details, files)
        amount += len(header)
        if file_copy is not None:
            await _copy_file(remote, file, file_copy, destination)
            files[file_copy.name] = file_copy.entry
            amount += sum(stop - start for start, stop in file_copy.spans)
    added = {name: entry.restricted_to(details[name]) for name, entry in manifest.operators.items() if name in details}
    merged = dataclasses.replace(manifest, files=files, operators={**local.operators, **added})
    store.storage.write(f"{checkpoint_name(manifest.iteration)}/{manifests.MANIFEST_FILE}", [merged.to_json().encode()])
    return amount


def _local_manifest(store: Store, manifest: Manifest) -> Manifest:
    """Returns the manifest of the local copy of the same snapshot; empty if there is none."""
    empty = dataclasses.replace(manifest, files={}, operators={})
    try:
        manifest = store.read_manifest(manifest.iteration)
    except CheckpointError:
        return empty
    return manifest if dataclasses.replace(manifest, files={}, operators={}) == empty else empty


def _select_chunks(
    remote: _RemoteSnapshot,
    file: str,
    entry: FileEntry,
    header: bytes,
    details: Mapping[str, Detail],
    used_names: Container[str],
) -> _FileCopy | None:
    def is_selected(chunk: StoredBox) -> bool:
        detail = details.get(operator_of(chunk.name))
        return detail is not None and detail.holds(chunk.slot)

    try:
        extracted = extract_sub_file(file, entry, header, is_selected)
    except ValueError as error:
        raise _damaged(remote, file, str(error)) from None
    if extracted is None:
        return None
    names = itertools.chain(
        [file] if extracted.entry == entry else [], (sub_file_name(file, n) for n in itertools.count())
    )
    return _FileCopy(
        next(name for name in names if name not in used_names), extracted.entry, extracted.header, extracted.spans
    )


async def _copy_file(remote: _RemoteSnapshot, file: str, file_copy: _FileCopy, destination: Path) -> None:
    name = (
        shard_file_name(parse_rank(file_copy.name)) if is_shard_file_or_part(file_copy.name) else file_copy.name
    )  # parts use their rank's buffers
    slot, entry = _allocate_buffer(destination, name, file_copy.entry, remote.request), file_copy.entry
    descriptor = open_without_links(slot, os.O_RDWR)
    try:
        os.pwrite(descriptor, file_copy.header, 0)
        missing = await _copy_identical(remote, file, file_copy, descriptor)
        offsets = (target + i for start, stop, target in missing for i in range(0, stop - start, REQUEST_BYTES))
        async for data in remote.read(file, [(start, stop) for start, stop, _ in missing]):
            os.pwrite(descriptor, data, next(offsets))
        if compute_digest(os.pread(descriptor, entry.header_bytes, 0)) != entry.header_xxh3_128:
            raise _damaged(remote, file, "its header does not match its hash")
    finally:
        os.close(descriptor)
    name = f"{checkpoint_name(remote.request.iteration)}/{file_copy.name}"  # replaces a file of an unfinished copy
    SafeDirectory(destination, is_owned=True).link(slot.relative_to(destination).as_posix(), name)


async def _copy_identical(
    remote: _RemoteSnapshot, file: str, file_copy: _FileCopy, descriptor: int
) -> list[MissingRange]:
    """Copies this node's identical data into a file; returns the ranges that must be sent."""
    if remote.identical:
        try:
            return await remote.identical.copy_into(
                descriptor, file_copy.header, file_copy.entry.bytes, file_copy.spans
            )
        except ValueError as error:
            raise _damaged(remote, file, str(error)) from None
    sizes = (stop - start for start, stop in file_copy.spans)
    offsets = itertools.accumulate(sizes, initial=len(file_copy.header))
    return [MissingRange(*span, target) for span, target in zip(file_copy.spans, offsets, strict=False)]


def _allocate_buffer(destination: Path, file: str, entry: FileEntry, request: CopyRequest) -> Path:
    try:
        return reserved_memory.find_free_file(destination / reserved_memory.SLOTS_DIRECTORY, file, entry.bytes)
    except OSError as error:
        raise (InsufficientMemoryError if error.errno in OUT_OF_SPACE_ERRNOS else CheckpointError)(
            f"{destination} has no room for the copy of {file} of node {request.of}, of {entry.bytes:,} bytes "
            f"({error.strerror}). Fix: enlarge it (Docker: --shm-size), name another memory file system with "
            "--ckpt-memory-dir, or keep fewer copies with --replicas",
            code="memory-full",
        ) from None


def _damaged(remote: _RemoteSnapshot, file: str, problem: str) -> DamagedTensorError:
    return DamagedTensorError(f"{remote.name(file)} is damaged: {problem}. Fix: test the memory of that node")


class _RemoteSnapshot:
    """A snapshot in another node's memory."""

    def __init__(self, request: CopyRequest, connection: async_connections.AsyncConnection):
        self.request, self._connection, self.identical = request, connection, IdenticalChunks()
        self._start, self._bytes = time.monotonic(), 0

    async def __aenter__(self) -> _RemoteSnapshot:
        return self

    async def __aexit__(self, *_) -> None:
        self._connection.abort()

    def result(self, amount: int) -> CopyResult:
        """Returns the result of a copy: bytes received, and bytes skipped because this node already had them."""
        identical = self.identical
        return CopyResult(
            amount - identical.nbytes, identical.nbytes, sorted(identical.differs), sorted(identical.damaged)
        )

    def name(self, file: str) -> str:
        """Returns the name of a file, for messages."""
        request = self.request
        return f"{file} of iteration {request.iteration} of node {request.of}, in the memory of node {request.held_by},"

    async def manifest(self, name: str) -> tuple[bytes, Manifest]:
        """Returns the manifest and its bytes.

        The other node may replace it between two requests, so that their parts do not fit together. It is damaged only
        if it has the same bytes when it is read again.

        Raises:
            CheckpointError: the manifest is damaged.
        """
        before: bytes | None = None
        while True:
            text = await self._read_file(manifests.MANIFEST_FILE)
            try:
                return text, Manifest.from_json(text.decode(errors="replace"), name)
            except CheckpointError:
                if text == before:
                    raise
            before = text

    async def _read_file(self, file: str) -> bytes:
        """Reads a file whose size is unknown; of one version if it has at most :data:`REQUEST_BYTES`."""
        await self._send_request(file, 0, REQUEST_BYTES)
        reply = await self._receive_data()
        start = len(reply.body)
        return b"".join(
            [bytes(reply.body), *[bytes(data) async for data in self.read(file, [(start, reply.header["size"])])]]
        )

    async def header(self, file: str, entry: FileEntry) -> bytes:
        """Reads the bytes before a file's data; raises DamagedTensorError if they do not match their hash."""
        header = b"".join([bytes(data) async for data in self.read(file, [(0, entry.header_bytes)])])
        if compute_digest(header) != entry.header_xxh3_128:
            raise _damaged(self, file, "its header does not match its hash")
        return header

    async def read(self, file: str, spans: list[tuple[int, int]]) -> AsyncIterator[bytes | bytearray | memoryview]:
        """Reads ranges of a file, in pieces; up to two chunks are requested at a time."""
        waiting = collections.deque(
            (start, min(REQUEST_BYTES, stop - start))
            for span_start, stop in spans
            for start in range(span_start, stop, REQUEST_BYTES)
        )
        pending: collections.deque[tuple[int, int]] = collections.deque()
        ahead = 0
        while waiting or pending:
            while waiting and len(pending) < _MAX_PENDING and ahead + waiting[0][1] <= 2 * REQUEST_BYTES:
                await self._send_request(file, *waiting[0])
                ahead += waiting[0][1]
                pending.append(waiting.popleft())
            start, length = pending.popleft()
            data = (await self._receive_data()).body
            if len(data) != length:
                raise _damaged(self, file, f"it is truncated before byte {start + length}")
            await self._limit_rate(length)
            ahead -= length
            yield data

    async def _send_request(self, file: str, start: int, nbytes: int) -> None:
        request = self.request
        location = {"node": request.held_by, "of": request.of, "iteration": request.iteration, "file": file}
        await self._connection.send(Message({"kind": "read", "start": start, "bytes": nbytes, **location}))

    async def _receive_data(self) -> Message:
        try:
            reply = await self._connection.recv(silence_s=SILENCE_TIMEOUT_S)
        except TimeoutError:
            raise PeerGoneError(f"node {self.request.held_by} has sent nothing for {SILENCE_TIMEOUT_S:g} s") from None
        if reply.kind == "data":
            return reply
        snapshot = f"the snapshot of iteration {self.request.iteration} of node {self.request.of}"
        if reply.kind == "absent":
            raise AbsentError(
                f"node {self.request.held_by} does not have {snapshot}. Fix: read the output of that node"
            )
        raise CheckpointError(
            f"node {self.request.held_by} does not give {snapshot}: {reply.header.get('why')}. Fix: read the "
            "output of that node",
            code="copy-refused",
        )

    async def _limit_rate(self, nbytes: int) -> None:
        self._bytes += nbytes
        if self.request.rate is not None:
            ahead = self._start + self._bytes / self.request.rate - time.monotonic()
            if ahead > 0:
                await asyncio.sleep(ahead)
