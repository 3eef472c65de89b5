"""Flags of the tokenizer."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megatron.pretraining.config.derive import installed
from megatron.pretraining.config.flag import REQUIRED, FlagGroup, flag, refuse

_TYPES = ("SentencePieceTokenizer", "HuggingFaceTokenizer", "NullTokenizer")


@dataclass(frozen=True)
class TokenizerFlags(FlagGroup):
    """Tokenizer: the one that encoded the data."""

    tokenizer_type: str = flag(REQUIRED, "Kind of tokenizer; NullTokenizer has only a --vocab-size.", choices=_TYPES)
    tokenizer_model: str | None = flag(
        None, "File of a SentencePiece model, or directory or name of a HuggingFace tokenizer.", metavar="PATH"
    )
    vocab_size: int | None = flag(None, "Vocabulary of the NullTokenizer, before padding.", limits=">= 1")

    def validate(self) -> None:
        """Rejects a tokenizer without its model or size, and missing files."""
        if self.tokenizer_type == "NullTokenizer":
            refuse(self.vocab_size is None, "--tokenizer-type NullTokenizer needs --vocab-size: add it.")
            return
        model = self.tokenizer_model
        refuse(model is None, f"--tokenizer-type {self.tokenizer_type} needs --tokenizer-model: add it.")
        is_file = self.tokenizer_type == "SentencePieceTokenizer"
        found = model is not None and (os.path.isfile(model) if is_file else _may_exist(model))
        refuse(
            not found,
            f"--tokenizer-model {self.tokenizer_model} does not exist: correct the path, or make one with "
            "tools/train_tokenizer.py.",
        )
        refuse(
            not is_file and not installed("transformers"),
            "--tokenizer-type HuggingFaceTokenizer needs the package transformers: install it.",
        )


def _may_exist(model: str) -> bool:
    """Whether a name can be a HuggingFace tokenizer's: ``name`` and ``owner/name`` may be on the hub."""
    looks_like_a_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    return os.path.exists(os.path.expanduser(model)) or not looks_like_a_path
