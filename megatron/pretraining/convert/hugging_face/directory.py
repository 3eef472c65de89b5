"""Writes a directory of transformers atomically: weights, configuration and the files of the tokenizer."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
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
from moc.files import safe_directory
from moc.files.safe_directory import sync_directory, write_durably
from moc.store import dense_files
from moc.store.errors import CheckpointError

_FILES = (  # files of a tokenizer, without code, weights and the model's configuration
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_MODELS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_PROBE = " two  spaces\ta tab, \ufb01 and \uff21 "  # with a ligature and a full-width letter
_SPECIAL = ("bos", "eos", "unk", "pad")


def has_tokenizer(directory: Path) -> bool:
    """Returns whether a directory holds a tokenizer."""
    return any((directory / name).is_file() for name in _MODELS)


def write_tokenizer(recorded: Mapping[str, Any] | None, into: Path) -> tuple[dict[str, Any], list[str]]:
    """Writes the tokenizer that a checkpoint records.

    Returns:
        Ids of special tokens for ``config.json``, and sentences for the user.

    Raises:
        CheckpointError: its file cannot be read as the recorded type.
    """
    kind, model = (recorded or {}).get("type"), (recorded or {}).get("model")
    if kind in (None, "NullTokenizer"):
        why = "the checkpoint does not record its tokenizer" if kind is None else "NullTokenizer has no files"
        return {}, [f"no tokenizer was written: {why}"]
    if not model or not Path(model).exists():
        revision = (recorded or {}).get("revision")
        where = f"{model} at {revision}" if revision else str(model)
        return {}, [f"no tokenizer was written: {where} is not on this machine; copy its files to the weights"]
    if kind == "SentencePieceTokenizer":
        return _sentencepiece(Path(model), into)
    if kind != "HuggingFaceTokenizer":
        return {}, [f"no tokenizer was written: {kind} has no files of transformers; copy them to the weights"]
    for name in _FILES:
        if (Path(model) / name).is_file():
            shutil.copyfile(Path(model) / name, into / name)
    return {}, []


def _sentencepiece(model: Path, into: Path) -> tuple[dict[str, Any], list[str]]:
    import sentencepiece

    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{model} cannot be read as a SentencePiece model ({error}). Fix: download it again",
            code="tokenizer-unusable",
        ) from None
    if why := _differs(processor):
        return {}, [
            f"no tokenizer was written: {model} {why}, so transformers would make other tokens of a text; encode it "
            "with the package sentencepiece"
        ]
    shutil.copyfile(model, into / "tokenizer.model")
    end = processor.piece_to_id("<eod>")
    ids = {kind: getattr(processor, f"{kind}_id")() for kind in _SPECIAL}
    if end != processor.unk_id():
        ids["eos"] = end
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "legacy": False,
        "split_special_tokens": True,  # in training, text that looks like a special token is plain text
        **{f"{kind}_token": processor.id_to_piece(number) for kind, number in ids.items() if number >= 0},
    }
    write_durably(into / "tokenizer_config.json", json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    return {f"{kind}_token_id": ids[kind] for kind in ("bos", "eos", "pad") if ids[kind] >= 0}, []


def _differs(processor: Any) -> str | None:
    """Returns why transformers' LlamaTokenizer, a BPE without normalization, differs from a SentencePiece model."""
    normal = (
        piece
        for piece in range(processor.get_piece_size())
        if not (processor.is_control(piece) or processor.is_unknown(piece) or processor.is_byte(piece))
    )
    if not all(processor.get_score(piece).is_integer() for piece in normal):  # BPE scores are ranks
        return "is no BPE model"
    if processor.normalize(_PROBE).replace("\u2581", " ") != _PROBE:
        return "changes text before it encodes it"
    return None


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
    """

    config: Mapping[str, Any]
    tokenizer: Mapping[str, Any] | None
    source: Mapping[str, Any]


def write_directory(
    model: Exported, about: Description, output: Path, file_bytes: int, verify: bool, advance: Advance
) -> list[str]:
    """Writes a model for transformers; ``output`` appears only when it is complete.

    Args:
        model: the tensors.
        about: their metadata.
        output: the directory, which must not exist or be empty.
        file_bytes: size at which the next file starts.
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
        special, notes = write_tokenizer(about.tokenizer, staging)
        dtype = _DTYPES[model.dtype]
        _write(staging / CONFIG, {**about.config, **special, "dtype": dtype, "torch_dtype": dtype})
        if verify:
            compare_directory(model, staging, advance)
        for path in sorted(staging.iterdir()):
            files.setdefault(path.name, dense_files.describe_file(path))
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
