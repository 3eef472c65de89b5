"""Imports a directory of transformers as a dense checkpoint of iteration 0, to start training from."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron.pretraining.convert.contents import DTYPE_NAMES, DTYPES
from megatron.pretraining.convert.dense import DenseContents, write_dense
from megatron.pretraining.convert.hugging_face import CONFIG
from megatron.pretraining.convert.hugging_face.directory import check_hashes
from megatron.pretraining.convert.hugging_face.families import family_of
from megatron.pretraining.convert.hugging_face.files import Advance, read_directory, read_json
from megatron.pretraining.convert.hugging_face.logits import Asked, compare_logits
from megatron.pretraining.convert.hugging_face.names import name_map
from megatron.pretraining.convert.hugging_face.recorded import configured, first_state, recipe
from megatron.pretraining.convert.hugging_face.tensors import Imported
from megatron.pretraining.convert.hugging_face.tokenizer import has_tokenizer
from moc.files import decode, safe_directory
from moc.files.safe_directory import write_durably
from moc.inspect.coverage import PARAM
from moc.output import print_lines, progress
from moc.store.errors import CheckpointError

RECIPE = "model.yaml"
_FILE_MB = 1024


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
        check_hashes(source, advance)
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
    configured(model, model["max_position_embeddings"])  # raises if it cannot be trained
    contents = imported.with_state(first_state(model, dtype, tokenizer, imported.tensors))
    nbytes = sum(tensor.nbytes for tensor in contents.tensors)
    with progress(nbytes * (2 if args.verify else 1), "converting") as advance:
        written = write_dense(
            contents, args.output, 1, DTYPES[dtype], (args.max_file_size or _FILE_MB) * 10**6, advance
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
