"""Exports a checkpoint of this program as a directory of transformers."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping
from pathlib import Path

from megatron.pretraining.convert.contents import DTYPES, check_whole
from megatron.pretraining.convert.hugging_face.directory import Description, refuse_to_replace, write_directory
from megatron.pretraining.convert.hugging_face.families import family_for, family_named
from megatron.pretraining.convert.hugging_face.logits import Asked, compare_logits
from megatron.pretraining.convert.hugging_face.names import name_map
from megatron.pretraining.convert.hugging_face.recorded import recorded
from megatron.pretraining.convert.hugging_face.tensors import Exported
from megatron.pretraining.convert.source import contents_of, weights_of
from moc.files import safe_directory
from moc.files.safe_directory import SafeDirectory
from moc.output import print_lines, progress
from moc.store.dense_files import MANIFEST
from moc.store.errors import CheckpointError
from moc.store.manifest import compute_digest

_FILE_MB = 5000


def export(directory: Path, args: argparse.Namespace, replayed: bool = False) -> Path:
    """Writes ``args.output``, and returns it; with ``replayed``, the flags in ``args`` belong to a window.

    Raises:
        CheckpointError: the checkpoint cannot be converted, or transformers computes different results.
    """
    refuse_to_replace(args.output)
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
    about = Description(config, tokenizer, _source(directory, contents.facts.iteration))
    size = (args.max_file_size or _FILE_MB) * 10**6
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
