"""Flags of the tokenizer."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from megatron.pretraining.config.flag import REQUIRED, FlagGroup, flag, refuse

_TYPES = ("SentencePieceTokenizer", "HuggingFaceTokenizer", "NullTokenizer")


@dataclass(frozen=True)
class TokenizerFlags(FlagGroup):
    """Tokenizer: the one that encoded the data."""

    tokenizer_type: str = flag(REQUIRED, "Kind of tokenizer; NullTokenizer has only a --vocab-size.", choices=_TYPES)
    tokenizer_model: str | None = flag(
        None, "File of a SentencePiece model, or directory or name of a HuggingFace tokenizer.", metavar="PATH"
    )
    tokenizer_revision: str | None = flag(
        None,
        "Commit of a HuggingFace tokenizer on the hub, of 40 hexadecimal digits: what a name stands for may change.",
        metavar="COMMIT",
    )
    vocab_size: int | None = flag(None, "Vocabulary of the NullTokenizer, before padding.", limits=">= 1")


def on_hub(model: str) -> bool:
    """Whether this is no path: ``name`` and ``owner/name`` may be on the hub."""
    return not (model.startswith(("/", ".", "~")) or model.count("/") > 1 or os.path.exists(model))


def refuse_without_commit(model: str, revision: str | None) -> None:
    """Raises ``ConfigError`` unless the revision of a tokenizer on the hub is one that nobody can change."""
    refuse(
        not re.fullmatch("[0-9a-f]{40}", revision or ""),
        f"--tokenizer-model {model} is a name on the hub, where anything may stand for it tomorrow. Fix: add "
        "--tokenizer-revision with the commit that you trust, of 40 hexadecimal digits",
        code="tokenizer-not-pinned",
    )
