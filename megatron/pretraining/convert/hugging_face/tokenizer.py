"""Reads and writes tokenizers of transformers, with special tokens and generation settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.pretraining.convert.hugging_face import CONFIG
from megatron.pretraining.convert.hugging_face.configuration import unsupported
from megatron.pretraining.convert.hugging_face.files import read_json
from moc.files import decode, safe_directory
from moc.files.decode import Count
from moc.files.safe_directory import write_durably
from moc.store.errors import CheckpointError

GENERATION = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_FILES = (  # files of a tokenizer, without code, weights and the model's configuration
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_TEMPLATES = "additional_chat_templates"  # directory of chat templates besides the default one
_MODELS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_PROBE = " two  spaces\ta tab, \ufb01 and \uff21 "  # with a ligature and a full-width letter
_SPECIAL = ("bos", "eos", "unk", "pad")


def has_tokenizer(directory: Path) -> bool:
    """Returns whether a directory holds a tokenizer."""
    return any((directory / name).is_file() for name in _MODELS)


@dataclass(frozen=True)
class GenerationSettings:
    """What ``generate()`` of transformers needs in addition to weights and tokenizer.

    Attributes:
        special: special tokens by key of ``config.json``: ids, lists of ids, or None.  A key that the source lacks
            is absent, since each family of transformers has its own defaults.
        settings: contents of ``generation_config.json``; None without this file.
    """

    special: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(_IDS))
    settings: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _AddedToken:
    """Entry of ``tokenizer.json``."""

    id: Count
    content: str


def read_generation(directory: Path) -> GenerationSettings:
    """Reads the settings of a directory of transformers; without ``config.json``, the tokenizer's special tokens.

    Raises:
        CheckpointError: a file is invalid, or an id is no integer.
    """
    if (directory / CONFIG).is_file():
        config = read_json(directory / CONFIG, safe_directory.MAX_SMALL_FILE_BYTES)
        special = {key: config[key] for key in _IDS if key in config}
    else:
        special = _ids_of_tokenizer(directory)
    for key, value in special.items():
        ids = value if isinstance(value, list) else [value]
        if value is not None and not all(type(number) is int for number in ids):
            raise unsupported(key, value, "it must be a token id, or a list of them")
    settings = _read_optional(directory, GENERATION) if (directory / GENERATION).is_file() else None
    return GenerationSettings(special, settings)


def _ids_of_tokenizer(directory: Path) -> dict[str, Any]:
    """Returns the ids of the special tokens that a tokenizer's files name."""
    names = _read_optional(directory, "special_tokens_map.json") | _read_optional(directory, "tokenizer_config.json")
    ids = _read_optional(directory, "vocab.json") | _read_optional(directory, "added_tokens.json")
    try:
        added = decode.convert(_read_optional(directory, "tokenizer.json").get("added_tokens") or [], list[_AddedToken])
    except ValueError as error:
        raise CheckpointError(
            f"{directory / 'tokenizer.json'} cannot be read ({error}). Fix: download it again",
            code="tokenizer-unusable",
        ) from None
    ids |= {token.content: token.id for token in added}
    tokens = {key: names.get(key.removesuffix("_id")) for key in _IDS}
    contents = {key: token.get("content") if isinstance(token, dict) else token for key, token in tokens.items()}
    return {key: ids.get(content) if isinstance(content, str) else None for key, content in contents.items()}


def _read_optional(directory: Path, name: str) -> dict[str, Any]:
    return dict(read_json(directory / name)) if (directory / name).is_file() else {}


def write_tokenizer(recorded: Mapping[str, Any] | None, into: Path) -> tuple[GenerationSettings, list[str]]:
    """Writes the tokenizer that a checkpoint records.

    Returns:
        The generation settings of its directory, and sentences for the user.

    Raises:
        CheckpointError: its file cannot be read as the recorded type.
    """
    kind, model = (recorded or {}).get("type"), (recorded or {}).get("model")
    if kind in (None, "NullTokenizer"):
        why = "the checkpoint does not record its tokenizer" if kind is None else "NullTokenizer has no files"
        return GenerationSettings(), [f"no tokenizer was written: {why}"]
    if not model or not Path(model).exists():
        revision = (recorded or {}).get("revision")
        where = f"{model} at {revision}" if revision else str(model)
        return GenerationSettings(), [
            f"no tokenizer was written: {where} is not on this machine; copy its files to the weights"
        ]
    if kind == "SentencePieceTokenizer":
        return _sentencepiece(Path(model), into)
    if kind != "HuggingFaceTokenizer":
        return GenerationSettings(), [
            f"no tokenizer was written: {kind} has no files of transformers; copy them to the weights"
        ]
    templates = [f"{_TEMPLATES}/{path.name}" for path in sorted((Path(model) / _TEMPLATES).glob("*.jinja"))]
    for name in (*_FILES, *templates):
        if (Path(model) / name).is_file():
            (into / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(Path(model) / name, into / name)
    return read_generation(Path(model)), []


def _sentencepiece(model: Path, into: Path) -> tuple[GenerationSettings, list[str]]:
    import sentencepiece

    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{model} cannot be read as a SentencePiece model ({error}). Fix: download it again",
            code="tokenizer-unusable",
        ) from None
    if why := _differs(processor):
        return GenerationSettings(), [
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
    special = {key: ids[key.removesuffix("_token_id")] for key in _IDS}
    return GenerationSettings({key: number if number >= 0 else None for key, number in special.items()}), []


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
