"""Writes the files of a tokenizer into a directory of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moc.files.safe_directory import write_durably
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
        return {}, [f"no tokenizer was written: {where} is not on this machine; put its files beside the weights"]
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
