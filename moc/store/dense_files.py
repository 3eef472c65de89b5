"""A directory of dense checkpoints, each published atomically and verified before use.

A checkpoint is written under a hidden name and renamed when complete.  Its ``manifest.json`` is written last and lists
every file with size and hash; a directory without one was not written by this program.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from moc.cli_output import print_once
from moc.errors import warning
from moc.files import decode, safe_directory
from moc.files.decode import Count, Digest, Name, short_repr
from moc.files.safe_directory import (
    MAX_SMALL_FILE_BYTES,
    RefusedFileError,
    SafeDirectory,
    sync_directory,
    write_durably,
)
from moc.store import store
from moc.store.errors import CheckpointError, TakenError
from moc.store.manifest import MANIFEST_FILE as MANIFEST
from moc.store.manifest import compute_file_digest
from moc.store.ownership import Fence

STATE_FILE = "training_state.json"
DATA_FILE = "data.json"
"""Identity of the training data, in checkpoints without ``training_state.json``."""
DIGESTS_FILE = "digests.json"
"""Digests of the state; absent with ``--digest-interval 0`` and in Megatron-LM's checkpoints."""
TRACKER_FILE = "latest_checkpointed_iteration.txt"
FORMAT = "moc-megatron dense checkpoint 1"
MEGATRON_FORMAT = "megatron-lm checkpoint 1"
"""Format of a checkpoint that Megatron-LM's code has written, with a manifest in its directory."""
_UNFINISHED = ".iter_*.incomplete*"


@dataclass(frozen=True)
class _ListedFile:
    """Size in bytes and hash of a file."""

    bytes: Count
    xxh3_128: Digest


@dataclass(frozen=True)
class _Listing:
    """Fields of every manifest."""

    iteration: Count
    files: dict[Name, _ListedFile]
    job: Name = ""
    run: Name = ""
    origin: str = ""


@dataclass(frozen=True)
class Lineage:
    """The run that a checkpoint belongs to.

    Attributes:
        run: name of the run, which all its launches inherit; empty in checkpoints of earlier releases.
        origin: flags of a beginning in another directory (:mod:`megatron.pretraining.checkpoint.lineage`); empty if
            its command continues its own directory, or begins with new weights.
    """

    run: str = ""
    origin: str = ""


@dataclass(frozen=True)
class Published:
    """A complete checkpoint of a directory.

    Attributes:
        iteration: its iteration.
        lineage: the run that it belongs to; None if another program wrote it.
        job: the launch that saved it.
        is_announced: the tracker file is newer: it has named this checkpoint, or was set back to an older one.
    """

    iteration: int
    lineage: Lineage | None = None
    job: str = ""
    is_announced: bool = True


def checkpoint_path(root: str | Path, iteration: int) -> Path:
    """Returns Megatron's directory name for the checkpoint of an iteration, such as ``iter_0000100``."""
    return Path(root) / store.checkpoint_name(iteration)


def list_iterations(root: str | Path) -> list[int]:
    """Returns the iterations that have a published checkpoint under ``root``, ascending."""
    iterations = map(store.parse_iteration, SafeDirectory(root).list_directories())
    return sorted(iteration for iteration in iterations if iteration is not None)


def published(root: str | Path) -> list[Published]:
    """Returns the complete checkpoints under ``root``, ascending; reads no more than their manifests.

    A checkpoint of this program is complete if it has a manifest.  One of another program is complete if its index
    (``.metadata``) or a file of a rank is there.
    """
    root, complete = Path(root), []
    announced = _modified(root / TRACKER_FILE)
    for iteration in list_iterations(root):
        directory = checkpoint_path(root, iteration)
        try:
            manifest = read_manifest(directory)
            listing = decode.convert(manifest, _Listing) if manifest is not None else None
        except CheckpointError as error:
            if error.code == "checkpoint-damaged":
                continue
            listing = None  # a later release wrote it
        if listing is not None:
            lineage, is_announced = Lineage(listing.run, listing.origin), announced >= _modified(directory / MANIFEST)
            complete.append(Published(iteration, lineage, listing.job, is_announced))
        elif any(directory.joinpath(name).exists() for name in (MANIFEST, ".metadata")) or any(directory.glob("mp_*")):
            complete.append(Published(iteration, is_announced=announced >= _modified(directory)))
    return complete


def _modified(path: Path) -> int:
    """Returns the modification time of a file in nanoseconds; -1 without the file."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return path.lstat().st_mtime_ns
    return -1


def latest_iteration(root: str | Path) -> int | None:
    """Returns the iteration in the tracker file; None without a tracker, or for Megatron-LM's ``release``.

    Raises:
        CheckpointError: the tracker contains neither a number nor ``release``.
    """
    tracker = Path(root) / TRACKER_FILE
    try:
        text = SafeDirectory(root).read(TRACKER_FILE, MAX_SMALL_FILE_BYTES).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except RefusedFileError as error:
        raise CheckpointError(
            f"{tracker} cannot be read ({error.strerror}). Fix: remove it, or load with --ckpt-step",
            code="tracker-invalid",
        ) from None
    if text == "release":
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise CheckpointError(
            f"{tracker} holds {short_repr(text)} instead of an iteration. Fix: write the iteration to load into it, or "
            "load with --ckpt-step",
            code="tracker-invalid",
        )
    return int(text)


def read_manifest(directory: Path) -> dict | None:
    """Returns the manifest of a checkpoint, or None without one (written by stock Megatron-LM).

    Raises:
        CheckpointError: the directory is missing, or the manifest is missing, damaged or of another format.
    """
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} does not exist. Fix: correct --load or --ckpt-step", code="checkpoint-missing"
        )
    path = directory / MANIFEST
    if not path.is_file():
        if (directory / STATE_FILE).is_file():
            raise damage_error(f"{path} is missing although {STATE_FILE} is there")
        return None
    try:
        manifest = {
            **decode.require_object(
                decode.parse(SafeDirectory(directory).read(MANIFEST, safe_directory.MAX_MANIFEST_BYTES)), "it"
            )
        }
        if manifest.get("format") not in (FORMAT, MEGATRON_FORMAT):
            raise CheckpointError(
                f"{path} is of format {short_repr(manifest.get('format'))}, and this program reads {FORMAT!r}. Fix: "
                "load it with the release that wrote it",
                code="checkpoint-format-unknown",
            )
        for name in decode.convert(manifest, _Listing).files:
            decode.require_inner_path(name)
        return manifest
    except (RefusedFileError, ValueError) as error:
        raise damage_error(f"{path} is damaged ({error})") from None


def damage_error(problem: str) -> CheckpointError:
    """Returns the error of a damaged checkpoint, with the remedy."""
    return CheckpointError(
        f"{problem}. Fix: load an older one with --ckpt-step, and save to another --save", code="checkpoint-damaged"
    )


def staging_path(root: str | Path, iteration: int, tag: str = "") -> Path:
    """Returns the staging directory of an unpublished checkpoint; its name has the tag of the writer's claim."""
    return Path(root) / f".iter_{iteration:07d}.{f'{tag}.' if tag else ''}incomplete"


def describe_file(path: Path) -> dict:
    """Syncs a file to disk, and returns its entry in the manifest."""
    with open(SafeDirectory(path.parent).open(path.name), "rb", buffering=0) as file:
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
        return {"bytes": size, "xxh3_128": compute_file_digest(file, size)}


def begin_save(root: str | Path, iteration: int, fence: Fence | None = None) -> Path:
    """Makes an empty staging directory in ``--save``, and removes the leftovers of killed saves.

    Raises:
        TakenError: another job, or a newer generation of this one, saves there.
    """
    root = Path(root)
    with SafeDirectory(root).directory(creates=True):
        pass
    if fence is not None:  # its file needs room, which this launch's last save may have taken
        _remove_leftovers(root, f".iter_*.{_tag(fence)}.incomplete")
        fence.take(lambda: _remove_leftovers(root, _UNFINISHED))
    restore_replaced(root)
    _remove_leftovers(root, _UNFINISHED)
    staging = staging_path(root, iteration, _tag(fence))
    SafeDirectory(root).remove(staging.name)
    staging.mkdir()
    return staging


def give_up(root: str | Path, iteration: int, fence: Fence) -> None:
    """Removes the staging directory of a failed save, unless the file system fails."""
    with contextlib.suppress(OSError):
        SafeDirectory(root).remove(staging_path(root, iteration, _tag(fence)).name)


def _remove_leftovers(root: Path, pattern: str) -> None:
    for leftover in root.glob(pattern):
        with _reporting_leftover(leftover):
            SafeDirectory(root).remove(leftover.name)


@contextlib.contextmanager
def _reporting_leftover(path: Path) -> Iterator[None]:
    """Context for a removal that saves do not depend on: an error is printed, and later saves try again."""
    try:
        yield
    except OSError as error:
        print_once(
            warning(
                f"{path} cannot be removed ({error.strerror or error}), and takes room. Fix: correct its permissions, "
                "or remove it; the next save tries again",
                code="storage-unwritable",
            )
        )


def publish_save(
    root: str | Path,
    iteration: int,
    files: dict[str, dict],
    fence: Fence | None = None,
    retain_interval: int | None = None,
    format: str = FORMAT,
    lineage: Lineage | None = None,
) -> Path:
    """Publishes a staged checkpoint atomically as the newest.

    Args:
        root: the directory of checkpoints.
        iteration: iteration of the checkpoint.
        files: the manifest entries of all files, by path relative to the checkpoint.
        fence: guards the directory.
        retain_interval: older checkpoints whose iteration is not a multiple of it are deleted; None to keep them.
        format: format of the checkpoint.
        lineage: the run that saves; it replaces no checkpoint of another one.

    Raises:
        SupersededError: a newer generation of this job, or another job, saves there now.
        TakenError: another run has saved this iteration meanwhile.
    """
    root, staging, final = Path(root), staging_path(root, iteration, _tag(fence)), checkpoint_path(root, iteration)
    author = {} if fence is None else {"job": fence.claim.job, "term": fence.claim.term}
    if lineage is not None:
        _refuse_other_run(final, lineage, author)
        author |= asdict(lineage)
    manifest = {"format": format, "iteration": iteration, **author, "files": dict(sorted(files.items()))}
    check = None if fence is None else fence.check
    try:
        write_durably(staging / MANIFEST, json.dumps(manifest, indent=1))
        for directory in {".", *(str(parent) for name in files for parent in PurePath(name).parents)}:
            sync_directory(staging / directory)
        _replace(staging, final, check)
        sync_directory(root)
        SafeDirectory(root).write(TRACKER_FILE, [str(iteration).encode()], tag=_tag(fence), check=check)
    except FileNotFoundError:  # a successor has removed the unfinished files
        if check is not None:
            check()
        raise
    with _reporting_leftover(_replaced_path(final)):
        SafeDirectory(root).remove(_replaced_path(final).name)
    if not retain_interval:
        return final
    for older in list_iterations(root):
        if older < iteration and older % retain_interval:
            if check is not None:
                check()
            with _reporting_leftover(checkpoint_path(root, older)):  # the new checkpoint is published anyway
                remove_checkpoint(root, older)
    return final


def _replace(staging: Path, final: Path, check: Callable[[], None] | None) -> None:
    if check is not None:
        check()
    if os.path.lexists(final):  # saved at this iteration before: keep the old one until the new one is in place
        os.rename(final, _replaced_path(final))
    try:
        os.rename(staging, final)
    except OSError:
        with contextlib.suppress(OSError):
            restore_replaced(final.parent)
        raise


def _refuse_other_run(final: Path, lineage: Lineage, author: Mapping) -> None:
    for other in published(final.parent) if final.is_dir() else ():
        is_same_run = other.lineage is None or other.lineage.run == lineage.run or other.job == author.get("job")
        if checkpoint_path(final.parent, other.iteration) == final and not is_same_run:
            raise TakenError(
                f"another run has saved {final} since this one began. Fix: give this run another --save",
                code="save-of-another-run",
            )


def _replaced_path(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")


def _tag(fence: Fence | None) -> str:
    return "" if fence is None else fence.claim.tag


def find_replaced(root: str | Path) -> list[Path]:
    """Returns the hidden old checkpoints of replacements that a kill interrupted."""
    return [*Path(root).glob(".iter_*.replaced")]


def restore_replaced(root: str | Path) -> None:
    """Completes a replacement interrupted by a kill: restores the old checkpoint, or removes it."""
    for replaced in find_replaced(root):
        original = replaced.with_name(replaced.name[1 : -len(".replaced")])
        if os.path.lexists(original):
            with _reporting_leftover(replaced):
                SafeDirectory(root).remove(replaced.name)
        else:
            os.rename(replaced, original)


def remove_checkpoint(root: str | Path, iteration: int) -> None:
    """Deletes a checkpoint; a kill midway leaves no partial one under its name."""
    hidden = staging_path(root, iteration)
    os.rename(checkpoint_path(root, iteration), hidden)
    SafeDirectory(root).remove(hidden.name)


def state_error(directory: Path, operators: Sequence[str]) -> CheckpointError:
    """Returns the error for a checkpoint whose state differs from the digests that were stored with it."""
    remainder = f" and {len(operators) - 3} more operators" if len(operators) > 3 else ""
    return CheckpointError(
        f"{directory} has other digests than the state that was saved: {', '.join(operators[:3])}{remainder}. Fix: use "
        "an older checkpoint",
        code="state-digest-differs",
    )


def find_damage(directory: Path, files: Mapping[str, Any]) -> str | None:
    """Describes the first file that is missing, truncated or altered, or whose entry is invalid; None if there is none.

    Args:
        directory: the directory of the files.
        files: the entries of a manifest or of a record of unknown origin, by path relative to the directory.
    """
    for name, entry in files.items():
        try:
            path, expected = directory / decode.require_inner_path(name), decode.convert(entry, _ListedFile)
        except ValueError as error:
            return f"{directory} has an invalid entry of {short_repr(name)} in its list of files ({error})"
        try:
            with open(SafeDirectory(directory).open(name), "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected.bytes:
                    return f"{path} has {size} bytes instead of {expected.bytes}: it is truncated or overwritten"
                if compute_file_digest(file, size) != expected.xxh3_128:
                    return f"{path} does not match its hash: its content is damaged"
        except (FileNotFoundError, NotADirectoryError):
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
    return None
