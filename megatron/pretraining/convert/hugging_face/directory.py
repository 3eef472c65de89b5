"""Writes a directory of transformers atomically: weights, configuration, tokenizer and generation settings."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.pretraining.convert.hugging_face import CONFIG
from megatron.pretraining.convert.hugging_face.files import (
    INDEX,
    ONE_FILE,
    Advance,
    read_directory,
    read_json,
    shards,
    write_file,
)
from megatron.pretraining.convert.hugging_face.tensors import Exported
from megatron.pretraining.convert.hugging_face.tokenizer import GENERATION, GenerationSettings, write_tokenizer
from moc.files import safe_directory
from moc.files.safe_directory import sync_directory, write_durably
from moc.store import dense_files
from moc.store.errors import CheckpointError

CONVERSION = "conversion.json"
FORMAT = "moc-megatron conversion 1"
_MOST_STAGING = 100  # attempts, since other users can create directories with these names
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}  # names in config.json


@dataclass(frozen=True)
class Description:
    """Metadata of the weights.

    Attributes:
        config: the family's ``config.json``.
        tokenizer: tokenizer as recorded in the checkpoint; None if it is not.
        source: origin of the weights, for ``conversion.json``.
        generation: settings that the checkpoint records; None takes them from the tokenizer's directory.
    """

    config: Mapping[str, Any]
    tokenizer: Mapping[str, Any] | None
    source: Mapping[str, Any]
    generation: GenerationSettings | None = None


def write_directory(
    model: Exported, about: Description, output: Path, file_bytes: int, verify: bool, advance: Advance
) -> list[str]:
    """Writes a model for transformers; ``output`` appears only when it is complete.

    Args:
        model: the tensors.
        about: their metadata.
        output: the directory, which must not exist or be empty.
        file_bytes: size that starts the next file.
        verify: read everything again, and compare all bits with the source, before publishing.
        advance: called with the number of bytes written and of bytes compared.

    Returns:
        Notes for the user, one sentence each.

    Raises:
        CheckpointError: ``output`` exists and is not empty, or the source cannot be read.
    """
    refuse_existing(output)
    with _staged(output) as staging:
        files, tensors = {}, {}
        planned = shards(model.tensors, file_bytes)
        for name, part in planned.items():
            files[name], digests = write_file(staging / name, part, _counted(model, advance))
            tensors |= digests
        if list(planned) != [ONE_FILE]:
            total = sum(tensor.nbytes for tensor in model.tensors)
            where = {tensor.name: name for name, part in planned.items() for tensor in part}
            _write(staging / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        generation, notes = write_tokenizer(about.tokenizer, staging)
        generation = about.generation or generation
        dtype = _DTYPES[model.dtype]
        _write(staging / CONFIG, {**about.config, **generation.special, "dtype": dtype, "torch_dtype": dtype})
        if generation.settings is not None:
            _write(staging / GENERATION, generation.settings)
        if verify:
            compare_directory(model, staging, advance)
        for path in sorted(path for path in staging.rglob("*") if path.is_file()):
            files.setdefault(str(path.relative_to(staging)), dense_files.describe_file(path))
        said = {"format": FORMAT, "source": dict(about.source), "files": files, "tensors": tensors}
        write_durably(staging / CONVERSION, json.dumps(said, indent=1))
        sync_directory(staging)
        os.rename(staging, output)
        sync_directory(output.parent)
    return notes


def refuse_existing(output: Path) -> None:
    """Raises CheckpointError unless a path does not exist or is an empty directory."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(
            f"{output} exists. Fix: remove it, or name another output directory",
            code="output-exists",
        )


def compare_directory(model: Exported, directory: Path, advance: Advance) -> None:
    """Reads a directory again; raises CheckpointError unless all of its tensors have the source's bits."""
    stored = read_directory(directory)
    model.names.check_theirs({name: one.tensor.shape for name, one in stored.items()})
    for tensor in model.tensors:
        if stored[tensor.name].tensor != tensor:
            raise CheckpointError(
                f"{tensor.name} was written as {stored[tensor.name].tensor}. Fix: write to another disk",
                code="written-bits-differ",
            )
        first = 0
        for values in model.blocks(tensor):
            written = stored[tensor.name].rows(first, len(values))
            if not torch.equal(written.view(torch.uint8), values.contiguous().view(torch.uint8)):
                raise CheckpointError(
                    f"{tensor.name} was read back with other bits. Fix: write to another disk",
                    code="written-bits-differ",
                )
            first += len(values)
            advance(values.nbytes)


def check_conversion_hashes(directory: Path, advance: Advance) -> None:
    """Compares the files with their hashes in ``conversion.json``, if it exists.

    Raises:
        CheckpointError: a file is missing, or differs.
    """
    if not (directory / CONVERSION).is_file():
        return
    said = read_json(directory / CONVERSION)
    if said.get("format") != FORMAT or not isinstance(files := said.get("files"), dict):
        raise CheckpointError(
            f"{directory / CONVERSION} is not of this program. Fix: remove it, if you know where it is from",
            code="conversion-record-foreign",
        )
    for name, entry in files.items():
        if damage := dense_files.find_damage(directory, {name: entry}):
            raise CheckpointError(
                f"{damage}. Fix: convert the source again, or remove {CONVERSION} if you changed it",
                code="checkpoint-damaged",
            )
        advance(entry["bytes"])


def _counted(model: Exported, advance: Advance):
    def blocks(tensor) -> Iterator[torch.Tensor]:
        for values in model.blocks(tensor):
            yield values
            advance(values.nbytes)

    return blocks


def _write(path: Path, content: Mapping) -> None:
    write_durably(path, json.dumps(content, indent=2) + "\n")


@contextlib.contextmanager
def _staged(output: Path) -> Iterator[Path]:
    """Yields an empty directory inside one that only this user can change, and removes it in the end.

    Also removes the files of a killed conversion.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    private, descriptor = _private(output)
    try:
        safe_directory.delete_contents(descriptor)
        staging = private / os.path.basename(os.path.realpath(output))
        staging.mkdir()
        yield staging
    finally:
        with contextlib.suppress(OSError):
            safe_directory.remove_owned(private)
        os.close(descriptor)


def _private(output: Path) -> tuple[Path, int]:
    """Locks a directory of this user next to the output; returns it and its descriptor."""
    for number in range(_MOST_STAGING):
        path = output.parent / f".{os.path.basename(os.path.realpath(output))}.incomplete{f'-{number}' * bool(number)}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        gone_or_theirs = contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError)
        with contextlib.ExitStack() as opened, gone_or_theirs:
            if path.is_symlink():
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, descriptor)
            status = os.fstat(descriptor)
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(
                    f"another conversion writes {output}. Fix: wait for it, or name another one",
                    code="directory-in-use",
                ) from None
            if os.path.samestat(status, path.lstat()):  # otherwise a finished conversion has removed it
                opened.pop_all()
                return path, descriptor
    raise CheckpointError(
        f"{output.parent} has no room for a directory of this user. Fix: name another output directory",
        code="output-unusable",
    )
