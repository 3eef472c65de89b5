"""Reads checkpoints of both formats for the checkpoint tools: without torch, and without unpickling anything."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moc.errors import cause_of
from moc.files import decode, safe_directory
from moc.files.decode import Count, Name
from moc.files.safe_directory import SafeDirectory
from moc.store import dense_files
from moc.store import manifest as manifests
from moc.store.dense_files import MANIFEST, STATE_FILE
from moc.store.errors import CheckpointError
from moc.store.header import StoredBox, read_boxes
from moc.store.manifest import Manifest, OperatorEntry
from moc.store.store import parse_iteration

SNAPSHOT, DENSE = "snapshot", "dense"
OPTIMIZER = "optimizer"
_UNPUBLISHED_PREFIXES = ("rank_", ".rank_", f"{MANIFEST}.")  # files of Format v1 before its manifest is written


@dataclass
class Checkpoint:
    """Description of a checkpoint by its own files, and the problems that show without reading all of it."""

    directory: Path
    files: dict[str, dict]
    """Manifest entries by name: bytes, and xxh3_128 of all or (Format v1) header_bytes and header_xxh3_128."""
    format: str = DENSE
    """``snapshot`` for Format v1, or ``dense``."""
    iteration: int | None = None
    state: Mapping = field(default_factory=dict)
    """Non-tensor state: training_state.json, or in Format v1 a part of the manifest; empty if unreadable."""
    policy: str | None = None
    """Policy that planned it; None for dense checkpoints."""
    layout: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the layout that wrote it, if recorded."""
    operators: Mapping[str, OperatorEntry] | None = None
    """Format v1: the manifest's entry for each operator; None for dense checkpoints."""
    damaged_files: set[str] = field(default_factory=set)
    """Files that are missing, of another size than listed, or otherwise damaged."""
    problems: list[str] = field(default_factory=list)

    @property
    def shard_files(self) -> list[str]:
        """Names of the listed region files: in Format v1 all, in dense checkpoints the files with optimizer state."""
        return sorted(name for name in self.files if self.format == SNAPSHOT or is_optimizer_file(name))

    @property
    def weight_files(self) -> list[str]:
        """Names of the listed files with weights."""
        return sorted(name for name in self.files if name.endswith(".distcp"))

    def bytes_of(self, names: list[str]) -> int:
        """Returns the listed bytes of these files."""
        return sum(self.files[name]["bytes"] for name in names)


def is_optimizer_file(name: str) -> bool:
    """Returns whether a file of a dense checkpoint has boxes of optimizer state."""
    return name.startswith(f"{OPTIMIZER}/") and name.endswith(".safetensors")


def is_checkpoint(path: Path) -> bool:
    """Returns whether a directory is one checkpoint, rather than a --save directory of several."""
    named = parse_iteration(path.resolve().name) is not None
    return named or any((path / name).is_file() for name in (MANIFEST, STATE_FILE))


def format_of(directory: Path) -> str:
    """Returns ``snapshot`` if the manifest has Format v1, otherwise ``dense``."""
    try:
        written = decode.parse(SafeDirectory(directory).read(MANIFEST, safe_directory.MAX_MANIFEST_BYTES))["format"]
        return SNAPSHOT if written == manifests.FORMAT else DENSE
    except (OSError, ValueError, LookupError, TypeError):
        return DENSE


def is_uncommitted(directory: Path) -> bool:
    """Returns whether a directory holds an uncommitted save in Format v1, which is no checkpoint without a manifest."""
    try:
        names = SafeDirectory(directory).list_names()
    except OSError:
        return False  # reading it reports the error
    return MANIFEST not in names and all(name.startswith(_UNPUBLISHED_PREFIXES) for name in names)


def committed_iterations(root: Path) -> list[int]:
    """Returns the iterations of the checkpoints in a directory, ascending."""
    return [i for i in dense_files.list_iterations(root) if not is_uncommitted(dense_files.checkpoint_path(root, i))]


def select_checkpoint(root: Path, iteration: int | None) -> Path:
    """Returns the checkpoint of an iteration in a directory; by default the tracker's, otherwise the newest.

    Raises:
        CheckpointError: there is none.
    """
    saved = committed_iterations(root)
    if iteration is None:
        with contextlib.suppress(CheckpointError, ValueError):
            iteration = dense_files.latest_iteration(root)
        iteration = iteration if iteration in saved else max(saved, default=None)
    if iteration is None:
        raise CheckpointError(
            f"{root}: holds no checkpoint. Fix: name a directory that --save or --ckpt-dir was",
            code="checkpoint-missing",
        )
    if iteration not in saved:
        listed = ", ".join(map(str, saved)) or "none"
        raise CheckpointError(
            f"{root}: holds no checkpoint of iteration {iteration} (there are: {listed}). Fix: pass one of these to "
            "--iteration",
            code="checkpoint-missing",
        )
    return dense_files.checkpoint_path(root, iteration)


def read_checkpoint(directory: Path) -> Checkpoint:
    """Reads manifest and training state, and compares the directory with the manifest.

    Raises:
        CheckpointError: there is no readable manifest.
    """
    if format_of(directory) == SNAPSHOT:
        return _read_snapshot(directory)
    try:
        manifest = dense_files.read_manifest(directory)
    except OSError as error:
        raise CheckpointError(
            f"{MANIFEST}: cannot be read ({error.strerror}). Fix: correct its permissions",
            code="checkpoint-unreadable",
        ) from None
    if manifest is None:
        raise CheckpointError(
            f"{MANIFEST}: is missing, so this is no checkpoint of this program, or half of one. Fix: use another "
            "checkpoint",
            code="manifest-missing",
        )
    checkpoint = Checkpoint(directory, dict(manifest["files"]), iteration=manifest["iteration"])
    _compare_names(checkpoint)
    is_stock = manifest["format"] == dense_files.MEGATRON_FORMAT
    for name in (".metadata",) if is_stock else (STATE_FILE, ".metadata"):  # checkpoints of user scripts lack STATE
        if name not in checkpoint.files:
            checkpoint.problems.append(f"{MANIFEST}: does not list {name}")
    if not checkpoint.weight_files:
        checkpoint.problems.append(f"{MANIFEST}: lists no weights (*.distcp)")
    _compare_sizes(checkpoint)
    _read_state(checkpoint)
    return checkpoint


def _read_snapshot(directory: Path) -> Checkpoint:
    manifest = Manifest.from_json(SafeDirectory(directory).read(MANIFEST, safe_directory.MAX_MANIFEST_BYTES), MANIFEST)
    files = {name: asdict(entry) for name, entry in manifest.files.items()}
    fields = {name: getattr(manifest, name) for name in ("iteration", "state", "policy", "layout", "operators")}
    checkpoint = Checkpoint(directory, files, format=SNAPSHOT, **fields)
    try:
        _validate_state(manifest.state)
    except ValueError as error:
        checkpoint.state = {}
        checkpoint.problems.append(f"{MANIFEST}: its state is damaged ({error})")
    _compare_names(checkpoint)
    _compare_sizes(checkpoint)
    if not manifest.is_complete:
        checkpoint.problems.append(
            f"{MANIFEST}: names {len(manifest.files)} of {manifest.writers} files, only the files of one node"
        )
    return checkpoint


def _compare_names(checkpoint: Checkpoint) -> None:
    report = checkpoint.problems.append
    named = parse_iteration(checkpoint.directory.resolve().name)
    if named is not None and checkpoint.iteration != named:
        report(f"{MANIFEST}: is of iteration {checkpoint.iteration}, and the directory of {named}")
    paths_by_directory = ((Path(parent) / name for name in names) for parent, _, names in os.walk(checkpoint.directory))
    present = {path.relative_to(checkpoint.directory).as_posix() for paths in paths_by_directory for path in paths}
    for name in sorted(present - checkpoint.files.keys() - {MANIFEST}):
        if checkpoint.format == DENSE or not name.startswith(".rank_"):  # left by a kill after the manifest was written
            report(f"{name}: is not listed in {MANIFEST}")


def _compare_sizes(checkpoint: Checkpoint) -> None:
    for name, entry in checkpoint.files.items():
        path = checkpoint.directory / name
        if not path.is_file():
            problem = "is missing"
        elif (size := path.stat().st_size) != entry["bytes"]:
            problem = f"has {size:,} bytes instead of {entry['bytes']:,}"
        else:
            continue
        checkpoint.damaged_files.add(name)
        checkpoint.problems.append(f"{name}: {problem}")


def _read_state(checkpoint: Checkpoint) -> None:
    path = checkpoint.directory / STATE_FILE
    if STATE_FILE in checkpoint.damaged_files or not path.is_file():
        return  # already reported
    try:
        state = _validate_state(
            decode.parse(SafeDirectory(checkpoint.directory).read(STATE_FILE, safe_directory.MAX_MANIFEST_BYTES))
        )
    except (ValueError, OSError) as error:
        checkpoint.damaged_files.add(STATE_FILE)
        checkpoint.problems.append(f"{STATE_FILE}: cannot be read ({error})")
        return
    checkpoint.state = state
    if state.get("iteration") != checkpoint.iteration:
        checkpoint.problems.append(
            f"{STATE_FILE}: is of iteration {state.get('iteration')}, {MANIFEST} of {checkpoint.iteration}"
        )
    if state.get("optimizer") and not checkpoint.shard_files:
        checkpoint.problems.append(f"{MANIFEST}: lists no file with the state of optimizer {state['optimizer']}")


@dataclass(frozen=True)
class _State:
    """Part of the non-tensor state that these tools use."""

    iteration: Count | None = None
    consumed_samples: Count | None = None
    skipped_iterations: Count | None = None
    optimizer: Name | None = None
    optimizer_step: Count | None = None
    shape: dict[Name, Any] | None = None
    grad_scaler: dict[Name, float | int | list[float]] | None = None


def _validate_state(state: Any) -> Mapping:
    """Returns the non-tensor state; raises ValueError if a value that these tools use has another type."""
    decode.convert(state, _State)
    return state


def read_all_boxes(checkpoint: Checkpoint) -> tuple[list[StoredBox], list[str]]:
    """Returns the boxes of all readable region files, and a problem for each other file.

    The checkpoint's own problems already include missing files.
    """
    boxes, problems = [], []
    for name in checkpoint.shard_files:
        try:
            boxes += read_file_boxes(checkpoint.directory, name)
        except CheckpointError as error:
            if name not in checkpoint.damaged_files:
                problems.append(cause_of(error))
            checkpoint.damaged_files.add(name)
    return boxes, problems


def read_file_boxes(directory: Path, name: str) -> list[StoredBox]:
    """Returns the boxes that the header of a region file describes.

    Raises:
        CheckpointError: the header is invalid, or does not match the file.
    """
    try:
        with open(SafeDirectory(directory).open(name), "rb", buffering=0) as file:
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            return read_boxes(
                name, size, lambda start, stop: os.pread(descriptor, stop - start, start), allows_slack=False
            )
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{name}: its header is damaged ({error}). Fix: use another checkpoint",
            code="checkpoint-damaged",
        ) from None
