"""Exports a checkpoint of this program as a directory of transformers, and imports such a directory.

An import is a dense checkpoint of iteration 0, to start training from. ``--check-logits`` compares the logits of both
models, each in its own process.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import yaml

from megatron.pretraining.convert.contents import DTYPE_NAMES, DTYPES, check_whole
from megatron.pretraining.convert.dense import DenseContents, write_dense
from megatron.pretraining.convert.hugging_face import CONFIG
from megatron.pretraining.convert.hugging_face.directory import (
    Description,
    check_conversion_hashes,
    refuse_existing,
    write_directory,
)
from megatron.pretraining.convert.hugging_face.families import family_for, family_named, family_of
from megatron.pretraining.convert.hugging_face.files import Advance, read_directory, read_json
from megatron.pretraining.convert.hugging_face.model_record import (
    first_state,
    recipe,
    recorded,
    recorded_generation,
    run_configuration,
)
from megatron.pretraining.convert.hugging_face.tensors import Exported, Imported, name_map
from megatron.pretraining.convert.hugging_face.tokenizer import has_tokenizer, read_generation
from megatron.pretraining.convert.snapshot import contents_of, weights_of
from moc.cli_output import print_lines, progress
from moc.files import decode, safe_directory
from moc.files.safe_directory import SafeDirectory, write_durably
from moc.inspect.coverage import PARAM
from moc.runtime import child_processes
from moc.store.dense_files import MANIFEST
from moc.store.errors import CheckpointError
from moc.store.manifest import compute_digest

_HERE = "megatron.pretraining.convert.hugging_face"
_SHAPE = (2, 32)  # sequences and tokens
CLOSE = 1e-4
"""Maximum difference relative to the largest logit, in fp32; caused by the order of sums."""


@dataclass(frozen=True)
class Asked:
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


def compare_logits(asked: Asked) -> str:
    """Computes the difference between both models' logits on random tokens, as a sentence.

    Raises:
        CheckpointError: they are not close, or one of the models cannot be computed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise CheckpointError(
            "--check-logits needs the package transformers. Fix: pip install transformers",
            code="package-missing",
        )
    length = min(_SHAPE[1], asked.model["max_position_embeddings"])
    tokens = numpy.random.default_rng(1).integers(0, asked.model["vocab_size"], (_SHAPE[0], length))
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        numpy.save(root / "tokens.npy", tokens)
        ask = dict(source=str(asked.ours.resolve()), allow_stale=asked.allow_stale, trust=asked.trust,
                   dtype=asked.dtype, model=dict(asked.model), tokens=str(root / "tokens.npy"),
                   into=str(root / "ours.npy"))  # fmt: skip
        (root / "asked.json").write_text(json.dumps(ask), encoding="utf-8")
        _run("megatron_logits", str(root / "asked.json"))
        _run("transformers_logits", str(asked.theirs.resolve()), str(root / "tokens.npy"), str(root / "theirs.npy"))
        ours, theirs = (numpy.load(root / f"{name}.npy") for name in ("ours", "theirs"))
    return _judged(ours, theirs)


def _judged(ours: numpy.ndarray, theirs: numpy.ndarray) -> str:
    if ours.shape != theirs.shape:
        raise CheckpointError(
            f"our logits have the shape {ours.shape}, and the logits of transformers {theirs.shape}. Fix: convert "
            "again, and report the model if they still differ",
            code="logits-differ",
        )
    apart, largest = float(numpy.abs(ours - theirs).max()), float(numpy.abs(theirs).max())
    if not apart <= CLOSE * max(largest, 1.0):  # the comparison is false for NaNs
        raise CheckpointError(
            f"the models differ: their logits are up to {apart:.2g} apart, and the largest is {largest:.2g}. Fix: "
            "compare the files that were written, which stay, and do not use them",
            code="logits-differ",
        )
    return f"logits are at most {apart:.1e} apart, of {largest:.2g} (fp32, {ours.shape[0] * ours.shape[1]} tokens)"


def _run(module: str, *arguments: str) -> None:
    done = subprocess.run(
        child_processes.module_command(f"{_HERE}.{module}", *arguments), capture_output=True, text=True
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        whose = "our model" if module == "megatron_logits" else "transformers"
        raise CheckpointError(
            f"the logits of {whose} could not be computed: {lines[-1]}. Fix: install the packages that the line "
            "names, or drop --check-logits",
            code="logits-not-computed",
        )


_EXPORT_FILE_MB = 5000


def export(directory: Path, args: argparse.Namespace, replayed: bool = False) -> Path:
    """Writes ``args.output``, and returns it; with ``replayed``, the flags in ``args`` belong to a window.

    Raises:
        CheckpointError: the checkpoint cannot be converted, or transformers computes different results.
    """
    refuse_existing(args.output)
    with progress(0, "verifying") as advance:
        contents = contents_of(directory, args.allow_stale, args.trust, advance=advance)
    state = contents.facts.state
    said = args.dtype or state.get("params_dtype")
    dtype = DTYPES.get(said or "")
    weights = weights_of(contents, dtype)
    check_whole(weights)
    flags = args.flags if replayed or not state.get("model") else _refuse_flags(args.flags)
    model, tokenizer = recorded(state, flags, directory)
    family = family_named(args.family) if args.family else family_for(model)
    config = family.config_of(model)
    exported = Exported(weights, name_map(model, family), dtype)
    total = sum(tensor.nbytes for tensor in exported.tensors)
    about = Description(config, tokenizer, _source(directory, contents.facts.iteration), recorded_generation(state))
    size = (args.max_file_size or _EXPORT_FILE_MB) * 10**6
    with progress(total * (2 if args.verify else 1), "converting") as advance:
        notes = write_directory(exported, about, args.output, size, args.verify, advance)
    print_lines(*notes, error=True)
    if args.check_logits:
        print_lines(compare_logits(Asked(directory, args.output, model, said, args.allow_stale, args.trust)))
    return args.output


def _refuse_flags(flags: list[str]) -> list[str]:
    if flags:
        raise CheckpointError(
            "the checkpoint records its model. Fix: drop the flags behind --",
            code="flag-has-no-effect",
        )
    return flags


def _source(directory: Path, iteration: int) -> Mapping[str, object]:
    said = {"name": directory.resolve().name, "iteration": iteration}
    with contextlib.suppress(FileNotFoundError):
        return said | {
            "manifest_xxh3_128": compute_digest(
                SafeDirectory(directory).read(MANIFEST, safe_directory.MAX_MANIFEST_BYTES)
            )
        }
    return said


RECIPE = "model.yaml"
_IMPORT_FILE_MB = 1024


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
            _compare(contents, DenseContents(written), advance)
    values = recipe(model, dtype, tokenizer)
    write_durably(recipe_file, yaml.safe_dump(decode.parse(json.dumps(values)), sort_keys=False))
    if args.check_logits:
        print_lines(compare_logits(Asked(written, source, contents.facts.state["model"], dtype, False, False)))
    print_lines(*_told(args.output, recipe_file, model["vocab_size"]))
    return written


def _tokenizer(source: Path, rows: int) -> dict[str, Any]:
    """Returns the flags of the directory's tokenizer, or of a NullTokenizer of the model's size."""
    if has_tokenizer(source):
        return dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(source.resolve()))
    return dict(tokenizer_type="NullTokenizer", vocab_size=rows)


def _compare(contents: Imported, written: DenseContents, advance: Advance) -> None:
    for tensor in contents.tensors:
        one, other = (of.read(tensor.name, PARAM, tensor.region) for of in (contents, written))
        if one.dtype != other.dtype or not torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8)):
            raise CheckpointError(
                f"{tensor.name} was read back with other bits. Fix: remove iter_0000000, and write to another disk",
                code="written-bits-differ",
            )
        advance(tensor.nbytes)


def _told(root: Path, recipe_file: Path, rows: int) -> list[str]:
    load, config = shlex.quote(str(root)), shlex.quote(str(recipe_file))
    return [
        f"to train: python pretrain_gpt_moe.py --config {config} --load {load} --finetune --save NEW_DIRECTORY ...",
        "          (data, batch, learning rate and iterations; to resume, --load NEW_DIRECTORY without --finetune)",
        f"the embedding has {rows:,} rows, none of padding: --padded-vocab-size in {RECIPE} keeps that",
    ]
