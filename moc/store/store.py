"""Writes, publishes, reads and removes checkpoints of Format v1 atomically."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

from moc.cli_output import print_once
from moc.errors import cause_of
from moc.files import decode
from moc.files.safe_directory import MAX_SMALL_FILE_BYTES, RefusedFileError
from moc.store import manifest as manifests
from moc.store.errors import CheckpointError, DamagedTensorError, for_each
from moc.store.manifest import FileEntry, Manifest, RankReport, compute_digest
from moc.store.object_storage import ObjectStorage
from moc.store.ownership import Claim, term_in
from moc.store.storage import Blob, LocalStorage, Storage

SUFFIX = ".safetensors"

_DIRECTORY = re.compile(r"iter_(\d{7,})")
_REPORT = re.compile(r"\.rank_(\d{5,})\.(?:.+\.)?json")
_RANK = re.compile(r"rank_(?P<rank>\d{5,})(?P<part>\.\d+)?\.safetensors")
_CHUNK = 16 << 20  # bytes per write
_HIDDEN_MARK = f"{manifests.MANIFEST_FILE}.superseded"
_REMOVAL_MARK = f"{manifests.MANIFEST_FILE}.removed"

RUN_FILE = ".run.json"

_URL = re.compile(r"^([a-z][a-z0-9+.-]*):/(/?)")


def checkpoint_name(iteration: int) -> str:
    """Returns Megatron's directory name for the checkpoint of an iteration, such as ``iter_0000100``."""
    return f"iter_{iteration:07d}"


def parse_iteration(name: str) -> int | None:
    """Inverts :func:`checkpoint_name`; None for other names."""
    match = _DIRECTORY.fullmatch(name)
    return int(match[1]) if match else None


def shard_file_name(rank: int) -> str:
    """Returns the name of a rank's file."""
    return f"rank_{rank:05d}{SUFFIX}"


def parse_rank(file: str) -> int:
    """Returns the rank whose file, or part of a file, has this name; raises ValueError for other names."""
    match = _RANK.fullmatch(file)
    if match is None:
        raise ValueError(f"{file!r} is no file of a rank")
    return int(match["rank"])


def sub_file_name(file: str, number: int) -> str:
    """Returns the name of a file with some of the operators of a file; a copy may have several."""
    return f"{file.removesuffix(SUFFIX)}.{number}{SUFFIX}"


def is_shard_file(file: str) -> bool:
    """Returns whether a file name belongs to a rank's file, which holds all that the rank saved."""
    match = _RANK.fullmatch(file)
    return match is not None and match["part"] is None


def is_shard_file_or_part(file: str) -> bool:
    """Returns whether a file name belongs to a rank's file, or to a part of one."""
    return _RANK.fullmatch(file) is not None


def _is_unpublished(names: Collection[str]) -> bool:
    """Returns whether a checkpoint with these files was never published, or is being removed."""
    return _REMOVAL_MARK in names or not any(name.startswith(manifests.MANIFEST_FILE) for name in names)


class Store:
    """The checkpoints in a storage location.

    If the location has a claim, checkpoints are published and removed only under it.

    Args:
        storage: location of the checkpoints.
        allows_slack: files may be longer than their contents, as reused buffers are.
    """

    def __init__(self, storage: Storage, allows_slack: bool = False):
        self.storage, self._allows_slack = storage, allows_slack
        self._locking = threading.Lock()
        self._iterations_before_term: set[int] = set()

    def take(self) -> None:
        """Begins the term of the location's claim, once; publishing and removing do so implicitly.

        A run that resumes from this location must call it before looking for checkpoints, so that superseded workers
        publish nothing afterwards.

        Raises:
            CheckpointError: another launch, or a newer term, owns the location.
        """
        if self.storage.claim is None:
            return
        with self._locking:
            if not self.storage.is_locked:
                self.storage.lock(self._make_room)
                self._iterations_before_term = set(self._list_iterations())

    def iterations(self) -> list[int]:
        """Returns the iterations that have a manifest, ascending."""
        return [iteration for iteration, _ in self.list_files()]

    def list_files(self, since: int = 0) -> Iterator[tuple[int, list[str]]]:
        """Yields the iterations that have a manifest, from the given one, ascending, and the names of their files."""
        for iteration in self._list_iterations():
            if iteration < since:
                continue
            names = self.storage.list_names(checkpoint_name(iteration))
            if self._is_visible(iteration, names):
                yield iteration, names

    def describe_refused(self) -> list[str]:
        """Reports entries with a checkpoint's name that are not directories: they are neither read nor removed."""
        names = [name for name in self.storage.list_refused() if parse_iteration(name) is not None]
        return [f"{self.storage.display_path(name)} is a link or a special file, which is not read" for name in names]

    def read_manifest(self, iteration: int) -> Manifest:
        """Returns the manifest of an iteration's checkpoint.

        Raises:
            CheckpointError: the manifest is missing, set aside, damaged or of another iteration.
        """
        path = f"{checkpoint_name(iteration)}/{manifests.MANIFEST_FILE}"
        try:
            text = self.storage.read(path).decode()
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.storage.display_path(path)} cannot be read ({cause_of(error)}). Fix: restore it or its "
                "permissions, or load another checkpoint (--ckpt-step)",
                code="checkpoint-unreadable",
            ) from None
        if not self._is_published(iteration):
            raise CheckpointError(
                f"{self.storage.display_path(path)} is set aside or being removed. Fix: load another checkpoint "
                "(--ckpt-step)",
                code="checkpoint-removed",
            )
        manifest = Manifest.from_json(text, self.storage.display_path(path))
        if manifest.iteration != iteration:
            raise CheckpointError(
                f"{self.storage.display_path(path)} is of iteration {manifest.iteration}. Fix: move it back to "
                f"{checkpoint_name(manifest.iteration)}",
                code="checkpoint-moved",
            )
        return manifest

    def write_file(self, iteration: int, rank: int, parts: Iterable) -> None:
        """Writes a rank's file; its name becomes durable when the checkpoint is published."""
        self.storage.write(f"{checkpoint_name(iteration)}/{shard_file_name(rank)}", parts, is_durable=False)

    def copy_files(self, manifest: Manifest, target: Store) -> None:
        """Copies the files of a checkpoint to another location, where the caller must publish them."""
        for name, entry in manifest.files.items():
            path = f"{checkpoint_name(manifest.iteration)}/{name}"
            blob, starts = self.storage.open_blob(path), range(0, entry.bytes, _CHUNK)
            target.storage.write(path, (blob.read(i, min(i + _CHUNK, entry.bytes)) for i in starts), is_durable=False)

    def store_report(self, iteration: int, rank: int, part: RankReport) -> RankReport:
        """Stores a rank's report for the publisher; returns the stored report."""
        claim, path = self.storage.claim, f"{checkpoint_name(iteration)}/.rank_{rank:05d}.json"
        if claim is not None:  # one file per term, so that generations do not overwrite each other's
            part = dataclasses.replace(part, job=claim.job, term=claim.term)
            path = f"{checkpoint_name(iteration)}/.rank_{rank:05d}.{claim.tag}.json"
        self.storage.write(path, [part.to_json().encode()], is_durable=False)
        return part

    def read_reports(
        self, iteration: int, ranks: Iterable[int], known_reports: Mapping[int, RankReport] = MappingProxyType({})
    ) -> list[RankReport]:
        """Returns ranks' reports of the location's launch, the newest term's of each rank.

        Newer terms continue the saves of older terms.

        The reports ``known_reports``, by rank, are from this process, and are not read again.

        Raises:
            CheckpointError: a rank has not reported, its file does not match, or the checkpoint is being removed.
        """
        names = self.storage.list_names(checkpoint_name(iteration))
        if _REMOVAL_MARK in names:
            raise CheckpointError(
                f"nothing is published: {self.storage.display_path(checkpoint_name(iteration))} is being removed. Fix: "
                "save again",
                code="checkpoint-removed",
            )
        names_by_rank: dict[int, list[str]] = defaultdict(list)
        for name in names:
            if match := _REPORT.fullmatch(name):
                names_by_rank[int(match[1])].append(name)
        return [known_reports.get(rank) or self._read_report(iteration, rank, names_by_rank[rank]) for rank in ranks]

    def is_publishable(self, iteration: int, ranks: Iterable[int]) -> bool:
        """Returns whether a checkpoint is published, or could be because all these ranks have reported."""
        if self._is_published(iteration):
            return True
        try:
            return bool(self.read_reports(iteration, ranks))
        except CheckpointError:
            return False

    def publish(self, manifest: Manifest) -> None:
        """Publishes the files of an iteration atomically; then removes files that the manifest does not list.

        Raises:
            CheckpointError: another claim owns the location (as for every method that removes), or a file was
                overwritten before the term began.
        """
        claim = self.storage.claim
        if claim is not None:
            manifest = dataclasses.replace(manifest, run=claim.run, job=claim.job, term=claim.term)
        self.publish_as_is(manifest)

    def publish_as_is(self, manifest: Manifest) -> None:
        """Like :meth:`publish`, but keeps the manifest's author, whose files other nodes hold too."""
        self._check()
        directory = checkpoint_name(manifest.iteration)
        if (
            manifest.iteration in self._iterations_before_term
        ):  # superseded workers may have written here until the term began
            for name, entry in manifest.files.items():
                if damage := self.find_header_damage(manifest.iteration, name, entry):
                    raise CheckpointError(f"nothing is published: {damage}. Fix: save again", code="part-overwritten")
        names = self.storage.list_names(directory)  # before publishing: files written later are not removed
        self.storage.write(f"{directory}/{manifests.MANIFEST_FILE}", [manifest.to_json().encode()])
        superseded = [name for name in names if name != manifests.MANIFEST_FILE and name not in manifest.files]
        try:
            self.storage.remove_files(directory, superseded)
        except OSError:  # readers ignore these files, except marks
            if not self._is_published(manifest.iteration):
                raise

    def remove(self, iteration: int) -> None:
        """Removes a checkpoint, manifest first, so that a kill midway leaves no partial checkpoint."""
        self._check()
        self.storage.remove_directory(checkpoint_name(iteration), manifests.MANIFEST_FILE, _REMOVAL_MARK)

    def move(self, iteration: int, target: Store) -> None:
        """Moves a checkpoint to another location of the same file system, where it must not exist."""
        self._check()
        directory = checkpoint_name(iteration)
        os.makedirs(target.storage.name, exist_ok=True)
        os.rename(self.storage.display_path(directory), target.storage.display_path(directory))

    def hide(self, iteration: int) -> None:
        """Hides a checkpoint without deleting its files, which stay until overwritten.

        The marker is a copy of its manifest, so publishing a different manifest makes the checkpoint visible again.
        """
        self._check()
        directory, claim = checkpoint_name(iteration), self.storage.claim
        text = self.storage.read(f"{directory}/{manifests.MANIFEST_FILE}")
        self.storage.write(f"{directory}/{_HIDDEN_MARK}{f'.{claim.tag}' if claim is not None else ''}", [text])

    def remove_unpublished(self) -> None:
        """Removes the leftovers of killed saves; files and manifests that were set aside stay."""
        for_each(self._list_iterations(), self.abandon_save)

    def abandon_save(self, iteration: int) -> None:
        """Like :meth:`remove_unpublished`, for one iteration whose save failed."""
        directory = checkpoint_name(iteration)
        names = self.storage.list_names(directory)
        if _is_unpublished(names):
            self.remove(iteration)
        elif hidden := [name for name in names if name.startswith(".")]:
            self._check()
            self.storage.remove_files(directory, hidden)  # reports of overwritten files, and unfinished files

    def remove_all(self) -> None:
        """Removes all checkpoints and other files, and last the ownership files and the location itself."""
        self._check()
        for iteration in self.iterations():
            self.remove(iteration)
        for name in self.storage.list_names():
            if not name.startswith("."):
                self.storage.remove(name)
        self._check()
        self.storage.remove("")

    def find_header_damage(self, iteration: int, name: str, entry: FileEntry) -> str | None:
        """Describes damage of a file's size or header, if any; its data are verified when read."""
        try:
            self.open_verified(iteration, name, entry)
        except DamagedTensorError as damage:
            return cause_of(damage)
        return None

    def open_verified(self, iteration: int, name: str, entry: FileEntry) -> Blob:
        """Returns a file whose size and header are verified.

        Raises:
            DamagedTensorError: the file is unreadable, or its size or header is wrong.
        """
        path = f"{checkpoint_name(iteration)}/{name}"
        try:
            blob = self.storage.open_blob(path)
        except OSError as error:
            raise DamagedTensorError(
                f"{self.storage.display_path(path)} cannot be read ({error.strerror or error}). Fix: restore it or its "
                "permissions, or load another checkpoint (--ckpt-step)",
                code="checkpoint-unreadable",
            ) from None
        if blob.size < entry.bytes or (blob.size > entry.bytes and not self._allows_slack):
            raise DamagedTensorError(
                f"{blob.name} has {blob.size} bytes instead of {entry.bytes}: it is truncated or overwritten. Fix: "
                "restore it from a copy, or load another checkpoint (--ckpt-step)"
            )
        if compute_digest(blob.read(0, entry.header_bytes)) != entry.header_xxh3_128:
            raise DamagedTensorError(
                f"{blob.name} is damaged: its header does not match its hash. Fix: restore it from a copy, or load "
                "another checkpoint (--ckpt-step)"
            )
        return blob

    def _check(self) -> None:
        self.take()
        self.storage.check_owner()

    def _make_room(self) -> None:
        """Removes the checkpoints that nothing has published, before the location is taken."""
        for directory in map(checkpoint_name, self._list_iterations()):
            if _is_unpublished(self.storage.list_names(directory)):
                self.storage.remove(directory)

    def _read_report(self, iteration: int, rank: int, names: Iterable[str]) -> RankReport:
        claim, name = self.storage.claim, f".rank_{rank:05d}.json"
        if claim is not None:
            tagged, own = filter(claim.made, names), f".rank_{rank:05d}.{claim.tag}.json"
            name = max(tagged, key=lambda file_name: term_in(file_name) or ("", (0, 0)), default=own)
        path = f"{checkpoint_name(iteration)}/{name}"
        try:
            part = RankReport.from_json(self.storage.read(path).decode())
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.storage.check_owner()  # a new owner may have removed it
            raise CheckpointError(
                f"nothing is published: {self.storage.display_path(path)} cannot be read ({cause_of(error)}). Fix: "
                "repair the directory, and save again",
                code="report-unreadable",
            ) from None
        if claim is not None and part.term != claim.term:
            if damage := self.find_header_damage(iteration, part.name, part.file):
                raise CheckpointError(f"nothing is published: {damage}. Fix: save again", code="part-overwritten")
        return part

    def _list_iterations(self) -> list[int]:
        refused = set(self.storage.list_refused())
        iterations = (parse_iteration(name) for name in self.storage.list_names() if name not in refused)
        return sorted(iteration for iteration in iterations if iteration is not None)

    def _is_published(self, iteration: int) -> bool:
        return self._is_visible(iteration, self.storage.list_names(checkpoint_name(iteration)))

    def _is_visible(self, iteration: int, names: Iterable[str]) -> bool:
        """Returns whether there is a manifest, neither being removed nor set aside."""
        if manifests.MANIFEST_FILE not in names or _REMOVAL_MARK in names:
            return False
        hidden_marks = [name for name in names if name.startswith(_HIDDEN_MARK)]
        return not hidden_marks or self._read_or_none(iteration, manifests.MANIFEST_FILE) not in {
            self._read_or_none(iteration, n) for n in hidden_marks
        }

    def _read_or_none(self, iteration: int, name: str) -> bytes | None:
        with contextlib.suppress(OSError):
            return self.storage.read(f"{checkpoint_name(iteration)}/{name}")
        return None


def storage_at(address: str | Path, claim: Claim | None = None) -> Storage:
    """Returns the storage location of an address; nothing is read, written or connected to.

    Args:
        address: a directory (a path or ``file:///path``), or ``s3://bucket/prefix``, ``gs://bucket/prefix``, or, for
            tests, ``memory://prefix``, which lives in the process.
        claim: claim under which files are written.

    Raises:
        CheckpointError: the address is invalid, or its library is not installed.
    """
    address = str(address)
    match = _URL.match(address)
    if match is None:
        return LocalStorage(address, claim=claim)
    if not match[2]:  # pathlib turns s3:// into s3:/, which would become a directory
        raise CheckpointError(
            f"{address} is neither a path nor a URL. Fix: write two slashes, as in s3://bucket/prefix",
            code="address-invalid",
        )
    if match[1] != "file":
        return ObjectStorage(address, claim=claim)
    parts = urlsplit(address)
    if parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
        raise CheckpointError(
            f"{address} is not a directory of this machine. Fix: write file:///path, with three slashes",
            code="address-invalid",
        )
    return LocalStorage(unquote(parts.path), claim=claim)


@dataclass(frozen=True)
class Run:
    """A training run, across jobs.

    Attributes:
        run: name of the run, 16 hex digits.
        address: address of its checkpoints, as seen by the job that made the name; empty if nothing records it.
        made: creation time in Unix seconds; 0 if nothing records it.
    """

    run: decode.RunName
    address: decode.Name
    made: decode.Seconds


def find_run(storage: Storage) -> Run | None:
    """Returns the run whose checkpoints, on storage or in memory, are in a location; None if no run has begun there.

    If the record of the run is damaged or lost, the newest checkpoint names the run.

    Raises:
        OSError: the location cannot be read.
    """
    return _read_record(storage) or _run_of_newest_manifest(storage)


def begin_run(storage: Storage, address: str) -> Run:
    """Returns the run of a location, begun if there is none, with the address that the flags give.

    A damaged record stays until the owner of the location replaces it (:func:`record_run`).

    Raises:
        OSError: the location cannot be read or written.
    """
    if (run := find_run(storage)) is not None:
        return run
    new = Run(secrets.token_hex(8), address, round(time.time(), 3))
    storage.create(RUN_FILE, _encode_record(new))
    return _read_record(storage) or new


def record_run(storage: Storage, run: Run) -> None:
    """Records the run of a location that this process owns, unless there is a valid record.

    Raises:
        OSError: the location cannot be read or written.
    """
    if _read_record(storage) is None and not storage.create(RUN_FILE, _encode_record(run)):
        storage.remove(RUN_FILE)
        storage.create(RUN_FILE, _encode_record(run))


def _encode_record(run: Run) -> list[bytes]:
    return [decode.encode_with_hash(decode.field_values(run)).encode()]


def _read_record(storage: Storage) -> Run | None:
    try:
        return decode.decode_verified(storage.read(RUN_FILE, MAX_SMALL_FILE_BYTES), Run)
    except FileNotFoundError:
        return None
    except (RefusedFileError, ValueError) as error:
        print_once(
            f"{storage.display_path(RUN_FILE)} is damaged ({error}): if a checkpoint there names the run, it continues"
        )
        return None


def _run_of_newest_manifest(storage: Storage) -> Run | None:
    """Returns the run that the newest valid manifest names, if any."""
    store = Store(storage, allows_slack=True)
    for iteration in reversed(store.iterations()):
        try:
            return decode.convert({"run": store.read_manifest(iteration).run, "address": "", "made": 0.0}, Run)
        except (CheckpointError, ValueError):  # it is damaged, or no job has published it
            continue
    return None
