"""Exports a checkpoint of this program as a directory of transformers, and imports such a directory.

An import is a dense checkpoint of iteration 0, to start training from. ``--check-logits`` compares the logits of both
models, each in its own process.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import yaml

from megatron.pretraining.convert.contents import DTYPE_NAMES, DTYPES, check_complete, describe_unverified
from megatron.pretraining.convert.dense import DenseContents, write_dense
from megatron.pretraining.convert.hugging_face import CONFIG
from megatron.pretraining.convert.hugging_face.families import family_for, family_named, family_of
from megatron.pretraining.convert.hugging_face.files import (
    INDEX,
    ONE_FILE,
    Advance,
    read_directory,
    read_json,
    shards,
    write_file,
)
from megatron.pretraining.convert.hugging_face.model_record import (
    first_state,
    recipe,
    recorded,
    recorded_generation,
    run_configuration,
)
from megatron.pretraining.convert.hugging_face.tensors import Exported, Imported, name_map
from megatron.pretraining.convert.hugging_face.tokenizer import (
    GENERATION,
    GenerationSettings,
    has_tokenizer,
    read_generation,
    write_tokenizer,
)
from megatron.pretraining.convert.snapshot import contents_of, weights_of
from moc.cli_output import print_lines, progress
from moc.files import decode, safe_directory
from moc.files.safe_directory import SafeDirectory, sync_directory, write_durably
from moc.inspect.coverage import PARAM
from moc.runtime import child_processes
from moc.store import dense_files
from moc.store.dense_files import MANIFEST
from moc.store.errors import CheckpointError
from moc.store.manifest import compute_digest

CONVERSION = "conversion.json"
FORMAT = "moc-megatron conversion 1"
_MAX_STAGING = 100  # attempts, since other users can create directories with these names
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}  # names in config.json

_HERE = "megatron.pretraining.convert.hugging_face"
_SHAPE = (2, 32)  # sequences and tokens
CLOSE = 1e-4
"""Maximum difference relative to the largest logit, in fp32; caused by the order of sums."""

_EXPORT_FILE_MB = 5000
RECIPE = "model.yaml"
_IMPORT_FILE_MB = 1024


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
    model: Exported, description: Description, output: Path, file_bytes: int, verify: bool, advance: Advance
) -> list[str]:
    """Writes a model for transformers; ``output`` appears only when it is complete.

    Args:
        model: the tensors.
        description: their metadata.
        output: the directory, which must not exist or be empty.
        file_bytes: size that starts the next file.
        verify: read all files again and compare all bits with the source before the rename.
        advance: called with the number of bytes written and of bytes compared.

    Returns:
        Notes for the user, one sentence each.

    Raises:
        CheckpointError: ``output`` exists and is not empty, or the source cannot be read.
    """
    refuse_existing(output)
    with _staging_directory(output) as staging:
        files, tensors = {}, {}
        planned = shards(model.tensors, file_bytes)
        for name, part in planned.items():
            files[name], digests = write_file(staging / name, part, _counted_blocks(model, advance))
            tensors |= digests
        if list(planned) != [ONE_FILE]:
            total = sum(tensor.nbytes for tensor in model.tensors)
            where = {tensor.name: name for name, part in planned.items() for tensor in part}
            _write(staging / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        generation, notes = write_tokenizer(description.tokenizer, staging)
        generation = description.generation or generation
        dtype = _DTYPES[model.dtype]
        _write(staging / CONFIG, {**description.config, **generation.special, "dtype": dtype, "torch_dtype": dtype})
        if generation.settings is not None:
            _write(staging / GENERATION, generation.settings)
        if verify:
            compare_directory(model, staging, advance)
        for path in sorted(path for path in staging.rglob("*") if path.is_file()):
            files.setdefault(str(path.relative_to(staging)), dense_files.describe_file(path))
        record = {"format": FORMAT, "source": dict(description.source), "files": files, "tensors": tensors}
        write_durably(staging / CONVERSION, json.dumps(record, indent=1))
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
    model.names.check_theirs({name: location.tensor.shape for name, location in stored.items()})
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
    record = read_json(directory / CONVERSION)
    if record.get("format") != FORMAT or not isinstance(files := record.get("files"), dict):
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


def _counted_blocks(model: Exported, advance: Advance):
    def blocks(tensor) -> Iterator[torch.Tensor]:
        for values in model.blocks(tensor):
            yield values
            advance(values.nbytes)

    return blocks


def _write(path: Path, content: Mapping) -> None:
    write_durably(path, json.dumps(content, indent=2) + "\n")


@contextlib.contextmanager
def _staging_directory(output: Path) -> Iterator[Path]:
    """Yields an empty directory inside one that only this user can change, and removes it in the end.

    Also removes the files of a killed conversion.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    private, descriptor = _lock_staging_directory(output)
    try:
        safe_directory.delete_contents(descriptor)
        staging = private / os.path.basename(os.path.realpath(output))
        staging.mkdir()
        yield staging
    finally:
        with contextlib.suppress(OSError):
            safe_directory.remove_owned(private)
        os.close(descriptor)


def _lock_staging_directory(output: Path) -> tuple[Path, int]:
    """Locks a directory of this user next to the output; returns it and its descriptor."""
    for number in range(_MAX_STAGING):
        path = output.parent / f".{os.path.basename(os.path.realpath(output))}.incomplete{f'-{number}' * bool(number)}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        skip_unusable = contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError)
        with contextlib.ExitStack() as opened, skip_unusable:
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


@dataclass(frozen=True)
class Comparison:
    """Two models to compare.

    Attributes:
        ours: an ``iter_*`` directory.
        theirs: a directory of transformers.
        model: the model in Megatron-LM's options.
        dtype: dtype of its weights.
        allow_stale, trust: as on the command line.
    """

    ours: Path
    theirs: Path
    model: Mapping[str, Any]
    dtype: str | None
    allow_stale: bool
    trust: bool


def compare_logits(comparison: Comparison) -> str:
    """Computes the difference between both models' logits on random tokens, as a sentence.

    Raises:
        CheckpointError: they are not close, or one of the models cannot be computed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise CheckpointError(
            "--check-logits needs the package transformers. Fix: pip install transformers",
            code="package-missing",
        )
    length = min(_SHAPE[1], comparison.model["max_position_embeddings"])
    tokens = numpy.random.default_rng(1).integers(0, comparison.model["vocab_size"], (_SHAPE[0], length))
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        numpy.save(root / "tokens.npy", tokens)
        request = dict(
            source=str(comparison.ours.resolve()),
            allow_stale=comparison.allow_stale,
            trust=comparison.trust,
            dtype=comparison.dtype,
            model=dict(comparison.model),
            tokens=str(root / "tokens.npy"),
            into=str(root / "ours.npy"),
        )
        (root / "request.json").write_text(json.dumps(request), encoding="utf-8")
        _run("megatron_logits", str(root / "request.json"))
        model = str(comparison.theirs.resolve())
        _run("transformers_logits", model, str(root / "tokens.npy"), str(root / "theirs.npy"))
        ours, theirs = (numpy.load(root / f"{name}.npy") for name in ("ours", "theirs"))
    return _describe_difference(ours, theirs)


def _describe_difference(ours: numpy.ndarray, theirs: numpy.ndarray) -> str:
    if ours.shape != theirs.shape:
        raise CheckpointError(
            f"our logits have the shape {ours.shape}, and the logits of transformers {theirs.shape}. Fix: convert "
            "again, and report the model if they still differ",
            code="logits-differ",
        )
    difference, largest = float(numpy.abs(ours - theirs).max()), float(numpy.abs(theirs).max())
    if not difference <= CLOSE * max(largest, 1.0):  # the comparison is false for NaNs
        raise CheckpointError(
            f"the models differ: their logits are up to {difference:.2g} apart, and the largest is {largest:.2g}. Fix: "
            "compare the files that were written, which stay, and do not use them",
            code="logits-differ",
        )
    return f"logits are at most {difference:.1e} apart, of {largest:.2g} (fp32, {ours.shape[0] * ours.shape[1]} tokens)"


def _run(module: str, *arguments: str) -> None:
    process = subprocess.run(
        child_processes.module_command(f"{_HERE}.{module}", *arguments), capture_output=True, text=True
    )
    if process.returncode != 0:
        lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        model = "our model" if module == "megatron_logits" else "transformers"
        raise CheckpointError(
            f"the logits of {model} could not be computed: {lines[-1]}. Fix: install the packages that the line "
            "names, or drop --check-logits",
            code="logits-not-computed",
        )


def export(directory: Path, args: argparse.Namespace, replayed: bool = False) -> Path:
    """Writes ``args.output``, and returns it; with ``replayed``, the flags in ``args`` belong to a window.

    Raises:
        CheckpointError: the checkpoint cannot be converted, or transformers computes different results.
    """
    refuse_existing(args.output)
    with progress(0, "verifying") as advance:
        contents = contents_of(directory, args.allow_stale, args.trust, advance=advance)
    remark = describe_unverified(contents, directory)
    state = contents.facts.state
    dtype_name = args.dtype or state.get("params_dtype")
    dtype = DTYPES.get(dtype_name or "")
    weights = weights_of(contents, dtype)
    check_complete(weights)
    flags = args.flags if replayed or not state.get("model") else _refuse_flags(args.flags)
    model, tokenizer = recorded(state, flags, directory)
    family = family_named(args.family) if args.family else family_for(model)
    config = family.config_of(model)
    exported = Exported(weights, name_map(model, family), dtype)
    total = sum(tensor.nbytes for tensor in exported.tensors)
    description = Description(
        config, tokenizer, _source(directory, contents.facts.iteration), recorded_generation(state)
    )
    size = (args.max_file_size or _EXPORT_FILE_MB) * 10**6
    with progress(total * (2 if args.verify else 1), "converting") as advance:
        notes = write_directory(exported, description, args.output, size, args.verify, advance)
    print_lines(*notes, *filter(None, [remark]), error=True)
    if args.check_logits:
        print_lines(compare_logits(Comparison(directory, args.output, model, dtype_name, args.allow_stale, args.trust)))
    return args.output


def _refuse_flags(flags: list[str]) -> list[str]:
    if flags:
        raise CheckpointError(
            "the checkpoint records its model. Fix: drop the flags behind --",
            code="flag-has-no-effect",
        )
    return flags


def _source(directory: Path, iteration: int) -> Mapping[str, object]:
    source = {"name": directory.resolve().name, "iteration": iteration}
    with contextlib.suppress(FileNotFoundError):
        return source | {
            "manifest_xxh3_128": compute_digest(
                SafeDirectory(directory).read(MANIFEST, safe_directory.MAX_MANIFEST_BYTES)
            )
        }
    return source


def import_directory(args: argparse.Namespace) -> Path:
    """Writes the checkpoint, and the recipe of its model next to it; returns the checkpoint's directory.

    Raises:
        CheckpointError: the directory cannot be converted, or this program computes different results.
    """
    source, recipe_file = args.source, args.output / RECIPE
    if args.to not in (None, "torch_dist") or args.flags or args.iteration is not None:
        raise CheckpointError(
            f"{source} is a model of transformers, which is converted only to torch_dist. Fix: pass --to torch_dist, "
            "and no flags behind --",
            code="target-unsupported",
        )
    if recipe_file.exists():
        raise CheckpointError(
            f"{recipe_file} exists. Fix: remove it, or name another output directory",
            code="output-exists",
        )
    with progress(0, "verifying") as advance:
        check_conversion_hashes(source, advance)
    config = read_json(source / CONFIG, safe_directory.MAX_SMALL_FILE_BYTES)
    family = family_of(config)
    model = family.flags_of(config)
    imported = Imported(read_directory(source), name_map(model, family), DTYPES.get(args.dtype or ""), {})
    dtype = DTYPE_NAMES.get(imported.compute_dtype)
    if dtype is None:
        raise CheckpointError(
            f"{source} has weights in {imported.compute_dtype}. Fix: pass --dtype",
            code="dtype-missing",
        )
    tokenizer = _tokenizer(source, model["vocab_size"])
    run_configuration(model, model["max_position_embeddings"])  # raises if it cannot be trained
    contents = imported.with_state(first_state(model, dtype, tokenizer, imported.tensors, read_generation(source)))
    nbytes = sum(tensor.nbytes for tensor in contents.tensors)
    with progress(nbytes * (2 if args.verify else 1), "converting") as advance:
        written = write_dense(
            contents, args.output, 1, DTYPES[dtype], (args.max_file_size or _IMPORT_FILE_MB) * 10**6, advance
        )
        if args.verify:
            _compare_written(contents, DenseContents(written), advance)
    values = recipe(model, dtype, tokenizer)
    write_durably(recipe_file, yaml.safe_dump(decode.parse(json.dumps(values)), sort_keys=False))
    if args.check_logits:
        print_lines(compare_logits(Comparison(written, source, contents.facts.state["model"], dtype, False, False)))
    print_lines(*_next_steps(args.output, recipe_file, model["vocab_size"]))
    return written


def _tokenizer(source: Path, rows: int) -> dict[str, Any]:
    """Returns the flags of the directory's tokenizer, or of a NullTokenizer of the model's size."""
    if has_tokenizer(source):
        return dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(source.resolve()))
    return dict(tokenizer_type="NullTokenizer", vocab_size=rows)


def _compare_written(contents: Imported, written: DenseContents, advance: Advance) -> None:
    for tensor in contents.tensors:
        source, copied = (reader.read(tensor.name, PARAM, tensor.region) for reader in (contents, written))
        same_bits = torch.equal(source.view(torch.uint8), copied.contiguous().view(torch.uint8))
        if source.dtype != copied.dtype or not same_bits:
            raise CheckpointError(
                f"{tensor.name} was read back with other bits. Fix: remove iter_0000000, and write to another disk",
                code="written-bits-differ",
            )
        advance(tensor.nbytes)


def _next_steps(root: Path, recipe_file: Path, rows: int) -> list[str]:
    load, config = shlex.quote(str(root)), shlex.quote(str(recipe_file))
    return [
        f"to train: python pretrain_gpt_moe.py --config {config} --load {load} --finetune --save NEW_DIRECTORY ...",
        "          (data, batch, learning rate and iterations; to resume, --load NEW_DIRECTORY without --finetune)",
        f"the embedding has {rows:,} rows, none of padding: --padded-vocab-size in {RECIPE} keeps that",
    ]
