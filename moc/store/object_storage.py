"""Object storage: S3, S3-compatible stores and Google Cloud Storage, through fsspec."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import fsspec
import fsspec.asyn

from moc.files.safe_directory import MAX_MANIFEST_BYTES, RefusedFileError
from moc.store.errors import CheckpointError, TakenError
from moc.store.ownership import Claim, Holder, refuse_superseded, successors
from moc.store.storage import Blob, Storage

PROTOCOLS = {"s3": "s3fs", "gs": "gcsfs", "memory": "fsspec"}
"""Supported URL schemes, and the package that each requires."""

_OWNER = ".owner.json"
_OWN_PATHS = re.compile(r"[\w.+-]+(/[\w.+-]+)*", re.ASCII)  # paths below the prefix that this package makes
_PART = 32 << 20  # S3 takes up to 10,000 parts of at least 5 MiB: files of up to 312 GiB
_CHUNK = 16 << 20
_CHUNKS_AT_ONCE = 8
_LIBRARIES = {"aiobotocore", "aiohttp", "botocore", "fsspec", "gcsfs", "google", "requests", "s3fs"}

_REMEDIES = {  # by class of the error, or by S3's code for it
    "EndpointConnectionError": "it cannot be reached: check the network, and AWS_ENDPOINT_URL if it is not Amazon's",
    "InvalidAccessKeyId": "these credentials are not known there: check AWS_ACCESS_KEY_ID, or the profile",
    "NoCredentialsError": "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile",
    "NoSuchBucket": "the bucket does not exist: make it, or correct the address",
    "SignatureDoesNotMatch": "the secret key is wrong: check AWS_SECRET_ACCESS_KEY, or the profile",
}

# fsspec's I/O thread does not survive a fork; older versions would wait for it.
os.register_at_fork(after_in_child=fsspec.asyn.reset_lock)


class ObjectStorage(Storage):
    """The objects of a bucket whose names begin with a prefix.

    Objects with names that this package does not make are neither listed nor removed: libraries read ``*``, ``[``, and
    ``?versionId=`` in a name as a reference to other objects.

    The class is thread-safe and fork-safe: each process opens its own connections.  fsspec and the provider's library
    read endpoint, credentials and other settings from their usual sources (``AWS_ENDPOINT_URL``,
    ``AWS_ACCESS_KEY_ID``, ``FSSPEC_S3_...``, profiles).

    Args:
        url: URL such as ``s3://bucket/prefix``; the bucket must exist.
        part_bytes: files of at least this size are uploaded in parts of this size, and never held completely in
            memory; at least 5 MiB, and a multiple of 256 KiB.
        claim: claim under which files are written.

    Raises:
        CheckpointError: the URL is invalid, or its library is not installed.
    """

    def __init__(self, url: str, part_bytes: int = _PART, claim: Claim | None = None):
        self._protocol, _, rest = url.partition("://")
        if self._protocol not in PROTOCOLS or not rest.strip("/"):
            examples = ", ".join(f"{protocol}://bucket/prefix" for protocol in PROTOCOLS if protocol != "memory")
            raise CheckpointError(
                f"{url} cannot hold checkpoints. Fix: give a directory, or {examples}", code="address-invalid"
            )
        try:
            fsspec.get_filesystem_class(self._protocol)
        except ImportError as error:
            raise CheckpointError(
                f"{url} needs a library that cannot be imported ({error}). Fix: run pip install "
                f"{PROTOCOLS[self._protocol]}",
                code="library-missing",
            ) from None
        self._root = rest.strip("/")
        self.name = f"{self._protocol}://{self._root}"
        # fsspec's memory store exposes a file once it is opened, so every file is written in one piece
        self._part_bytes = sys.maxsize if self._protocol == "memory" else part_bytes
        self.claim, self._locking_claim = claim, claim
        self._last_read: weakref.ref[ObjectBlob] | None = None

    def write(self, path: str, parts: Iterable, is_durable: bool = True) -> None:
        """See :class:`Storage`; a kill during the write leaves the object unchanged or absent."""
        chunks = _chunks(parts, self._part_bytes)
        first = next(chunks)
        if len(first) < self._part_bytes:
            with self._translated_errors(path):
                self._fs.pipe_file(self._key(path), bytes(first))
        else:
            self._write_in_parts(path, itertools.chain([first], chunks))

    def create(self, path: str, parts: Iterable) -> bool:
        """See :class:`Storage`; of two concurrent calls, both may return True."""
        try:
            self.read(path)
        except FileNotFoundError:
            self.write(path, parts)
            return True
        return False

    def read(self, path: str, max_bytes: int = MAX_MANIFEST_BYTES) -> bytes:
        """See :class:`Storage`; an object that is too large is not fetched."""
        size = self._size(path)
        if size > max_bytes:
            raise RefusedFileError(
                f"it has {size} bytes, more than {max_bytes}. Fix: restore it from a copy, or name another",
                self.display_path(path),
            )
        if size == 0:
            return b""  # which has no range
        with self._translated_errors(path):
            content = self._fs.cat_file(self._key(path), start=0, end=size)  # it may have been replaced by a larger one
            assert isinstance(content, bytes)
        return content

    def open_blob(self, path: str) -> Blob:
        return ObjectBlob(self, path, self._size(path))

    def list_names(self, directory: str = "") -> list[str]:
        """See :class:`Storage`; never cached."""
        prefix = f"{self._key(directory)}/"
        try:
            with self._translated_errors(directory):
                keys = self._fs.ls(prefix, detail=False)
        except FileNotFoundError as error:
            if "NoSuchBucket" in _causes(error):
                raise
            return []
        keys = [name.lstrip("/") for name in keys]
        below = {name.removeprefix(prefix) for name in keys if name.startswith(prefix)}
        return sorted(filter(_OWN_PATHS.fullmatch, below))

    def remove(self, path: str) -> None:
        """See :class:`Storage`.

        Raises:
            PermissionError: some objects remain; S3 does not report this for bulk removals.
        """
        self._remove(path, lambda key: True)

    def remove_files(self, directory: str, names: Iterable[str]) -> None:
        """See :class:`Storage`; errors as for :meth:`remove`."""
        if keys := {self._key(f"{directory}/{name}") for name in names}:
            self._remove(directory, lambda key: key.lstrip("/") in keys)

    def _remove(self, path: str, selects: Callable[[str], bool]) -> None:
        key = self._key(path)
        with self._translated_errors(path):
            if keys := [name for name in self._fs.find(key) if self._is_own_key(name) and selects(name)]:
                self._fs.rm(list(map(glob.escape, keys)))  # rm() may interpret characters of the prefix as a pattern
                if remaining := set(keys).intersection(self._fs.find(key)):
                    raise PermissionError(f"{len(remaining)} of {len(keys)} objects are not removed")

    def remove_directory(self, directory: str, first: str, mark: str) -> None:
        """See :class:`Storage`; removals take effect immediately, so no mark is needed."""
        self.remove(f"{directory}/{first}")
        self.remove(directory)

    def free_bytes(self) -> None:
        """See :class:`Storage`; always unknown."""
        return None

    def lock(self, make_room: Callable[[], None] = lambda: None) -> None:
        """Takes the location: from now on, :meth:`check_owner` refuses the previous owner.

        Object stores have no locks tied to a process, and a killed job must not block its successor.  So the launch
        that starts last owns the location, and the earlier one is refused permanently: none of its later generations
        can reclaim it.
        """
        claim = self._locking_claim = self._locking_claim or Claim.of_process()
        try:
            now = self._owner()
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            now = None
        holder = Holder.this(claim, successors(claim, now, self.name))
        self.write(_OWNER, [holder.to_json().encode()])
        self.is_locked = True

    def check_owner(self) -> None:
        """See :class:`Storage`; a no-op if the location was never locked."""
        if not self.is_locked:
            return
        try:
            now = self._owner()
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise TakenError(
                f"{self.display_path(_OWNER)} does not name the owner of {self.name} ({error}). Fix: start this job "
                "again",
                code="owner-unreadable",
            ) from None
        assert self._locking_claim is not None  # the location is locked
        refuse_superseded(self._locking_claim, now, self.name)

    def _owner(self) -> Holder:
        return Holder.from_json(self.read(_OWNER).decode())

    @property
    def _fs(self) -> fsspec.AbstractFileSystem:
        # cached by fsspec per process; listings are not cached, since other processes write here too
        return fsspec.filesystem(self._protocol, use_listings_cache=False)

    def _is_own_key(self, key: str) -> bool:
        return bool(_OWN_PATHS.fullmatch(key.lstrip("/").removeprefix(f"{self._root}/")))

    def _key(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/")

    def _size(self, path: str) -> int:
        with self._translated_errors(path):
            info = self._fs.info(self._key(path))
            if info["type"] != "file":
                raise FileNotFoundError(path)
        return info["size"]

    def _write_in_parts(self, path: str, chunks: Iterable[bytearray]) -> None:
        with self._translated_errors(path):
            file: Any = self._fs.open(self._key(path), "wb", block_size=self._part_bytes)
        try:
            for chunk in chunks:
                with self._translated_errors(path):
                    file.write(chunk)
            with self._translated_errors(path):
                file.close()
        except BaseException:
            file.closed = True  # otherwise the garbage collector would close it, and so publish a partial object
            with contextlib.suppress(Exception):  # report the first error
                file.discard()
            raise

    def _drop_other_range(self, blob: ObjectBlob) -> None:
        """Drops the kept bytes of the previously read blob."""
        previous = self._last_read() if self._last_read is not None else None
        if previous is not None and previous is not blob:
            previous._cached_range = None
        self._last_read = weakref.ref(blob)

    def _fetch(self, path: str, start: int, stop: int) -> bytearray:
        data, starts = bytearray(stop - start), range(start, stop, _CHUNK)
        for first in range(0, len(starts), _CHUNKS_AT_ONCE):
            begins = starts[first : first + _CHUNKS_AT_ONCE]
            ends = [min(begin + _CHUNK, stop) for begin in begins]
            with self._translated_errors(path):
                fetched = self._fs.cat_ranges([self._key(path)] * len(begins), list(begins), ends)
                for begin, end, chunk in zip(begins, ends, fetched, strict=True):
                    if isinstance(chunk, Exception):
                        raise chunk
                    if len(chunk) != end - begin:
                        raise OSError(f"received {len(chunk)} instead of {end - begin} bytes: it was overwritten")
                    data[begin - start : end - start] = chunk
        return data

    @contextlib.contextmanager
    def _translated_errors(self, path: str) -> Iterator[None]:
        """Converts the libraries' exceptions to an OSError of one sentence."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] not in _LIBRARIES:
                raise
            kinds = (kind for kind in (FileNotFoundError, PermissionError) if isinstance(error, kind))
            raise next(kinds, OSError)(f"{self.display_path(path).rstrip('/')}: {_reason(error)}") from error


class ObjectBlob:
    """An object whose ranges are fetched on demand."""

    def __init__(self, storage: ObjectStorage, path: str, size: int):
        self.name, self.size = storage.display_path(path), size
        self._storage, self._path = storage, path
        self._cached_range: tuple[int, int, bytearray] | None = None

    def read(self, start: int, stop: int) -> memoryview:
        """See :class:`Blob`; large ranges are fetched in several streams.

        The last range is kept until another range of the location is read.  An entry is read to verify its hash, and
        again for each box that uses it, but fetched once.
        """
        stop, cached = min(stop, self.size), self._cached_range
        if start >= stop:
            return memoryview(bytearray())
        if cached is None or cached[:2] != (start, stop):
            self._storage._drop_other_range(self)
            self._cached_range = cached = start, stop, self._storage._fetch(self._path, start, stop)
        return memoryview(cached[2])

    def will_read(self, start: int, stop: int) -> None:
        """No-op: reading ahead would have to keep an unbounded amount of data."""


def _chunks(parts: Iterable, size: int) -> Iterator[bytearray]:
    """Yields the bytes of some buffers in chunks of ``size``; the last chunk is shorter, possibly empty."""
    chunk = bytearray()
    for part in parts:
        rest = memoryview(part)
        while len(rest):
            taken = rest[: size - len(chunk)]
            chunk += taken
            rest = rest[len(taken) :]
            if len(chunk) == size:
                yield chunk
                chunk = bytearray()
    yield chunk


def _causes(error: BaseException) -> list[str]:
    """Returns class names and S3 codes of an error and its causes."""
    names, cause = [], error
    while cause is not None:
        names.append(type(cause).__name__)
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            names.append(response.get("Error", {}).get("Code"))
        cause = cause.__cause__
    return names


def _reason(error: Exception) -> str:
    causes = _causes(error)
    if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in causes:
        return "there is no such object"
    message = " ".join(str(error).split()) or type(error).__name__
    return next((_REMEDIES[name] for name in causes if name in _REMEDIES), message)
