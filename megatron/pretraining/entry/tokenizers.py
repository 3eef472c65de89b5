"""Checks the tokenizer of a job in the launcher: its files are read as by the library that the workers use.

A damaged file is found before workers import torch.  Other problems of a tokenizer are left to Megatron-LM.
"""

from __future__ import annotations

import json
import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from megatron.pretraining.config.flag import ConfigError, dashed, listed
from megatron.pretraining.process.paths import TOKENIZERS_IN_FILES, is_explicit_path
from moc.errors import cause_of
from moc.files.safe_directory import MAX_MANIFEST_BYTES, open_user_file

_OF_HUB = (".json", ".model", ".txt", ".tiktoken")  # endings of files of tokenizers
_FLAGS = "tokenizer_model", "vocab_file", "merge_file"


def check_tokenizer(arguments: Any) -> None:
    """Reads the files of a tokenizer, or looks for the copy of one on a hub; a missing file is another check's problem.

    Args:
        arguments: Megatron-LM's arguments.

    Raises:
        ConfigError: a file is damaged, or the name is not in the hub's cache although a job downloads nothing.
    """
    model, kind = arguments.tokenizer_model or "", arguments.tokenizer_type
    is_of_hub = kind == "HuggingFaceTokenizer"
    if not (is_of_hub or kind in TOKENIZERS_IN_FILES) or not model:
        return
    if os.path.exists(model):
        try:
            _read(kind, model)
        except (OSError, RuntimeError, ValueError) as error:
            raise unusable_tokenizer(arguments, f"{type(error).__name__}: {cause_of(error)}") from error
    elif is_of_hub and not is_explicit_path(model):
        _check_cached(model)


def unusable_tokenizer(arguments: Any, cause: str) -> ConfigError:
    """Returns the error for a tokenizer that cannot be built; ``cause`` is the type and text of the library's error."""
    files = [f"{dashed(name)} {value}" for name in _FLAGS if (value := getattr(arguments, name, None))]
    return ConfigError(
        f"--tokenizer-type {arguments.tokenizer_type} cannot be built from {listed(files) or 'these flags'} ({cause}). "
        "Fix: replace a damaged file, or choose the type that it was made for",
        code="tokenizer-unusable",
    )


def _read(kind: str, path: str) -> None:
    """Reads a file or a directory of a tokenizer; raises OSError, RuntimeError or ValueError if it is damaged."""
    if kind == "HuggingFaceTokenizer":
        names = sorted(os.listdir(path))
        if not any(name.endswith(_OF_HUB) for name in names):
            raise ValueError(f"{path} holds no file of a tokenizer")
        for name in {*names} & {"tokenizer.json", "tokenizer_config.json"}:
            _read_json(os.path.join(path, name))
    elif kind == "TikTokenizer":
        _read_json(path)
    elif find_spec("sentencepiece") is not None:
        import_module("sentencepiece").SentencePieceProcessor(model_file=path)


def _read_json(path: str) -> None:
    with open(open_user_file(path, MAX_MANIFEST_BYTES), encoding="utf-8") as file:
        json.load(file)


def _check_cached(name: str) -> None:
    """Refuses a name on a hub whose files are not on this machine, unless the environment permits the download."""
    is_offline = os.environ.get("HF_HUB_OFFLINE", "1").lower() in ("1", "on", "true", "yes")
    if not is_offline or find_spec("huggingface_hub") is None:
        return
    try:
        import_module("huggingface_hub").snapshot_download(name, local_files_only=True)
    except (OSError, ValueError) as error:  # of a missing copy, and of a name that a hub cannot have
        raise ConfigError(
            f"--tokenizer-model {name} is no directory, and the hub's cache on this machine has no tokenizer of this "
            "name, which a job does not download. Fix: correct it, download the tokenizer (hf download), or set "
            "HF_HUB_OFFLINE=0",
            code="tokenizer-not-cached",
        ) from error
