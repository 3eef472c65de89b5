"""Copies a snapshot from another node's memory: files first, the manifest last, so that it is complete or absent.

A copy of only some operators has its own files.  Their headers have the tensor chunks and hashes of the original
headers; each byte of data is read once.

With replicated optimizer state, several nodes save the same tensor chunks (:mod:`moc.recovery.redundancy`).  A copy
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
from moc.files.tree import Tree, open_single
from moc.runtime import async_connections as wire
from moc.runtime.protocol import Message, PeerGoneError
from moc.state.detail import Detail
from moc.state.operators import operator_of
from moc.state.region import Region
from moc.store import manifest as manifests
from moc.store import slots
from moc.store.boxes import StoredBox, read_boxes
from moc.store.digest import digest_of
from moc.store.errors import NO_ROOM, CheckpointError, DamagedRegionError, NoRoomError
from moc.store.layout import extract
from moc.store.manifest import FileEntry, Manifest
from moc.store.storage import LocalPlace
from moc.store.store import Store, directory_of, file_of, is_by_rank, part_of_file, rank_of

_CHUNK = 4 << 20
"""Bytes copied per turn of the event loop, as in a remote read (:data:`moc.runtime.replica_transfer.CHUNK`)."""


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


CHUNK = 4 << 20
"""Bytes per request, and maximum bytes requested ahead of it."""

_REQUESTS = 16  # maximum pending: they must fit into the sockets' buffers, since both ends wait for reads

SILENCE_S = 30.0
"""Seconds without a received byte after which a node counts as lost."""

_NODE = re.compile(r"[0-9A-Za-z]+")
_FILE = re.compile(r"\w+(?:\.\w+)*\.safetensors|" + re.escape(manifests.NAME))  # file of a rank or an expert


class AbsentError(UserError, RuntimeError):
    """The other node has not yet committed the snapshot, or no longer has it."""

    code = "copy-refused"


@dataclass(frozen=True)
class Wanted:
    """A snapshot of one node, to be copied here."""

    iteration: int  # iterations completed when it was taken
    of: str  # node whose part of the snapshot it is
    held_by: str  # node that has it in memory
    address: str  # ``host:port`` of that node's replica server
    rate: float | None = None  # maximum bytes per second; None for no limit
    patient: bool = False  # retry while the snapshot is absent or its holder does not answer
    operators: Mapping[str, str] | None = None  # operators to copy, each with its state subset; None for all


class Pulled(NamedTuple):
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


class _Piece(NamedTuple):
    """A file of a copy: its name and manifest entry, bytes to write as header, and byte ranges of the original."""

    name: str
    entry: FileEntry
    header: bytes
    spans: list[tuple[int, int]]


def part_of(root: Path, node: str, of: str) -> Path:
    """Returns the directory in a node's memory with a node's snapshots: its own, or copies kept for another node.

    Raises:
        ValueError: a node name is invalid.
    """
    if not (_NODE.fullmatch(node) and _NODE.fullmatch(of)):
        raise ValueError(f"nodes are called by letters and digits, not {node!r} and {of!r}")
    return root if node == of else root / f"of_{of}"


def file_in(root: Path, node: str, of: str, iteration: int, file: str) -> Path:
    """Returns the path of a snapshot file in a node's memory; raises ValueError for the name of any other file."""
    if type(iteration) is not int or iteration < 0 or not _FILE.fullmatch(file):
        raise ValueError(f"{file!r} of iteration {iteration!r} is no file of a snapshot")
    return part_of(root, node, of) / directory_of(iteration) / file


async def pull(wanted: Wanted, token: bytes, into: Path, own: Path | None = None) -> Pulled:
    """Copies a snapshot, unless an identical one is present.

    Args:
        wanted: the snapshot.
        token: the job's secret.
        into: directory of that node's snapshots in this node's memory.
        own: directory of this node's own snapshots, if they may have identical data.

    Raises:
        AbsentError: the holder does not have it.
        PeerGoneError: the holder does not answer.
        NoRoomError: this node lacks memory for it.
        DamagedRegionError, CheckpointError: its contents contradict its manifest, or it cannot be written.
    """
    async with _Remote(wanted, await wire.open(wanted.address, token)) as remote:
        size = await remote.size(manifests.NAME)
        text = b"".join([bytes(data) async for data in remote.read(manifests.NAME, [(0, size)])])
        name = f"{manifests.NAME} of iteration {wanted.iteration} in the memory of node {wanted.held_by}"
        manifest = Manifest.from_json(text.decode(errors="replace"), name)
        if manifest.iteration != wanted.iteration or not all(map(_FILE.fullmatch, manifest.files)):
            raise CheckpointError(
                f"{name} is of iteration {manifest.iteration}. Fix: start without the snapshots of this node's memory",
                code="checkpoint-moved",
            )
        store = Store(LocalPlace(into, in_memory=True), slack=True)
        if own is not None:
            remote.alike = held_alike(Store(LocalPlace(own, in_memory=True), slack=True), manifest)
        if wanted.operators is not None:
            return remote.pulled(await _pull_some(remote, manifest, wanted.operators, store, into))
        published = f"{directory_of(wanted.iteration)}/{manifests.NAME}"
        if wanted.iteration in store.iterations() and store.place.read(published) == text:
            return Pulled()
        store.remove(wanted.iteration)
        for file, entry in manifest.files.items():
            header = await remote.header(file, entry) if remote.alike else b""
            await _pull_file(remote, file, _Piece(file, entry, header, [(len(header), entry.bytes)]), into)
        store.place.write(published, [text])
        return remote.pulled(manifest.bytes)


async def _pull_some(
    remote: _Remote, manifest: Manifest, operators: Mapping[str, str], store: Store, into: Path
) -> int:
    """Copies the requested operators that the local copy lacks; returns the bytes copied."""
    here = _here(store, manifest)
    details = {name: Detail(operators[name]) for name in manifest.operators.keys() & operators - here.operators.keys()}
    if not details:
        return 0
    if not here.files:
        store.remove(manifest.iteration)  # another snapshot's, or unfinished
    files, amount = dict(here.files), 0
    for file, entry in manifest.files.items():
        header = await remote.header(file, entry)
        piece = _some(remote, file, entry, header, details, files)
        amount += len(header)
        if piece is not None:
            await _pull_file(remote, file, piece, into)
            files[piece.name] = piece.entry
            amount += sum(stop - start for start, stop in piece.spans)
    added = {name: entry.at(details[name]) for name, entry in manifest.operators.items() if name in details}
    whole = dataclasses.replace(manifest, files=files, operators={**here.operators, **added})
    store.place.write(f"{directory_of(manifest.iteration)}/{manifests.NAME}", [whole.to_json().encode()])
    return amount


def _here(store: Store, manifest: Manifest) -> Manifest:
    """Returns the manifest of the local copy of the same snapshot; empty if there is none."""
    nothing = dataclasses.replace(manifest, files={}, operators={})
    try:
        here = store.manifest(manifest.iteration)
    except CheckpointError:
        return nothing
    return here if dataclasses.replace(here, files={}, operators={}) == nothing else nothing


def _some(
    remote: _Remote, file: str, entry: FileEntry, header: bytes, details: Mapping[str, Detail], taken: Container[str]
) -> _Piece | None:
    def keeps(box: StoredBox) -> bool:
        detail = details.get(operator_of(box.name))
        return detail is not None and detail.holds(box.slot)

    try:
        found = extract(file, entry, header, keeps)
    except ValueError as error:
        raise _damaged(remote, file, str(error)) from None
    if found is None:
        return None
    names = itertools.chain([file] if found.entry == entry else [], (part_of_file(file, n) for n in itertools.count()))
    return _Piece(next(name for name in names if name not in taken), found.entry, found.header, found.spans)


async def _pull_file(remote: _Remote, file: str, piece: _Piece, into: Path) -> None:
    name = file_of(rank_of(piece.name)) if is_by_rank(piece.name) else piece.name  # parts use their rank's buffers
    slot, entry = _slot(into, name, piece.entry, remote.wanted), piece.entry
    descriptor = open_single(slot, os.O_RDWR)
    try:
        os.pwrite(descriptor, piece.header, 0)
        missing = await _missing(remote, file, piece, descriptor)
        places = (place + i for start, stop, place in missing for i in range(0, stop - start, CHUNK))
        async for data in remote.read(file, [(start, stop) for start, stop, _ in missing]):
            os.pwrite(descriptor, data, next(places))
        if digest_of(os.pread(descriptor, entry.header_bytes, 0)) != entry.header_xxh3_128:
            raise _damaged(remote, file, "its header does not match its hash")
    finally:
        os.close(descriptor)
    name = f"{directory_of(remote.wanted.iteration)}/{piece.name}"  # replaces a file of an unfinished copy
    Tree(into, ours=True).link(slot.relative_to(into).as_posix(), name)


async def _missing(remote: _Remote, file: str, piece: _Piece, descriptor: int) -> list[Missing]:
    """Copies this node's identical data into a file; returns the ranges that must be sent."""
    if remote.alike:
        try:
            return await remote.alike.fill(descriptor, piece.header, piece.entry.bytes, piece.spans)
        except ValueError as error:
            raise _damaged(remote, file, str(error)) from None
    sizes = (stop - start for start, stop in piece.spans)
    places = itertools.accumulate(sizes, initial=len(piece.header))
    return [Missing(*span, place) for span, place in zip(piece.spans, places, strict=False)]


def _slot(into: Path, file: str, entry: FileEntry, wanted: Wanted) -> Path:
    try:
        return slots.free_slot(into / slots.DIRECTORY, file, entry.bytes)
    except OSError as error:
        raise (NoRoomError if error.errno in NO_ROOM else CheckpointError)(
            f"{into} has no room for the copy of {file} of node {wanted.of}, of {entry.bytes:,} bytes "
            f"({error.strerror}). Fix: enlarge it (Docker: --shm-size), name another memory file system with "
            "--ckpt-memory-dir, or keep fewer copies with --replicas",
            code="memory-full",
        ) from None


def _damaged(remote: _Remote, file: str, why: str) -> DamagedRegionError:
    return DamagedRegionError(f"{remote.name(file)} is damaged: {why}. Fix: test the memory of that node")


class _Remote:
    """A snapshot in another node's memory."""

    def __init__(self, wanted: Wanted, connection: wire.AsyncConnection):
        self.wanted, self._connection, self.alike = wanted, connection, HeldAlike()
        self._begun, self._bytes = time.monotonic(), 0

    async def __aenter__(self) -> _Remote:
        return self

    async def __aexit__(self, *_) -> None:
        self._connection.abort()

    def pulled(self, amount: int) -> Pulled:
        """Returns the result of a copy: bytes received, and bytes skipped because this node already had them."""
        alike = self.alike
        return Pulled(amount - alike.nbytes, alike.nbytes, sorted(alike.differs), sorted(alike.damaged))

    def name(self, file: str) -> str:
        """Returns the name of a file, for messages."""
        wanted = self.wanted
        return f"{file} of iteration {wanted.iteration} of node {wanted.of}, in the memory of node {wanted.held_by},"

    async def size(self, file: str) -> int:
        """Returns the size of a file, in bytes."""
        await self._ask(file, 0, 0)
        return (await self._answer()).header["size"]

    async def header(self, file: str, entry: FileEntry) -> bytes:
        """Reads the bytes before a file's data; raises DamagedRegionError if they do not match their hash."""
        header = b"".join([bytes(data) async for data in self.read(file, [(0, entry.header_bytes)])])
        if digest_of(header) != entry.header_xxh3_128:
            raise _damaged(self, file, "its header does not match its hash")
        return header

    async def read(self, file: str, spans: list[tuple[int, int]]) -> AsyncIterator[bytes | bytearray | memoryview]:
        """Reads ranges of a file, in pieces; up to two chunks are requested at a time."""
        waiting = collections.deque(
            (start, min(CHUNK, stop - start)) for begin, stop in spans for start in range(begin, stop, CHUNK)
        )
        asked: collections.deque[tuple[int, int]] = collections.deque()
        ahead = 0
        while waiting or asked:
            while waiting and len(asked) < _REQUESTS and ahead + waiting[0][1] <= 2 * CHUNK:
                await self._ask(file, *waiting[0])
                ahead += waiting[0][1]
                asked.append(waiting.popleft())
            start, length = asked.popleft()
            data = (await self._answer()).body
            if len(data) != length:
                raise _damaged(self, file, f"it is truncated before byte {start + length}")
            await self._keep_pace(length)
            ahead -= length
            yield data

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
            raise AbsentError(f"node {self.wanted.held_by} does not have {about}. Fix: read the output of that node")
        raise CheckpointError(
            f"node {self.wanted.held_by} does not give {about}: {answer.header.get('why')}. Fix: read the "
            "output of that node",
            code="copy-refused",
        )

    async def _keep_pace(self, nbytes: int) -> None:
        self._bytes += nbytes
        if self.wanted.rate is not None:
            ahead = self._begun + self._bytes / self.wanted.rate - time.monotonic()
            if ahead > 0:
                await asyncio.sleep(ahead)
