"""Flags of the tokenizer."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from megatron.pretraining.config.derive import installed
from megatron.pretraining.config.flag import REQUIRED, FlagGroup, Problems, flag, refuse

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

    def validate(self, problems: Problems) -> None:
        """Rejects a tokenizer without its model, size or revision, and missing files."""
        from_hub = self.tokenizer_type == "HuggingFaceTokenizer" and on_hub(self.tokenizer_model or "")
        problems.refuse(
            self.tokenizer_revision and not from_hub,
            "--tokenizer-revision is for the name of a HuggingFace tokenizer on the hub. Fix: drop it",
            code="flag-has-no-effect",
        )
        if self.tokenizer_type == "NullTokenizer":
            problems.refuse(
                self.vocab_size is None,
                "--tokenizer-type NullTokenizer needs --vocab-size. Fix: add it",
                code="tokenizer-incomplete",
            )
            return
        is_file = self.tokenizer_type == "SentencePieceTokenizer"
        problems.refuse(
            not is_file and not installed("transformers"),
            "--tokenizer-type HuggingFaceTokenizer needs the package transformers. Fix: install it",
            code="package-missing",
        )
        model = self.tokenizer_model
        if model is None:
            problems.refuse(
                True,
                f"--tokenizer-type {self.tokenizer_type} needs --tokenizer-model. Fix: add it",
                code="tokenizer-incomplete",
            )
            return
        problems.refuse(
            not (os.path.isfile(model) if is_file else from_hub or os.path.exists(model)),
            f"--tokenizer-model {model} does not exist. Fix: correct the path, or make one with "
            "tools/train_tokenizer.py",
            code="tokenizer-missing",
        )
        if from_hub:
            problems.check(refuse_without_commit, model, self.tokenizer_revision)


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
