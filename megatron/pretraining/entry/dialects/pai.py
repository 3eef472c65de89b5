"""Options of Pai-Megatron-Patch (github.com/alibaba/Pai-Megatron-Patch)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.pretraining.entry.dialects.rules import (
    Dialect,
    Line,
    OptionOutcome,
    Rule,
    ignored,
    of_value,
    refused_option,
    renamed,
)

_PACKED = ignored("samples of indexed data have --seq-length tokens")


def _tokenizer(line: Line, values: Sequence[str]) -> OptionOutcome:
    """Uses the tokenizer of the model in ``--load``, as Pai does."""
    words = ("--tokenizer-type", "HuggingFaceTokenizer")
    if "--tokenizer-model" in line:
        return OptionOutcome(words)
    if not (directory := line.text("--load")):
        return OptionOutcome(problem="no directory has the tokenizer", fix="choose --tokenizer-model")
    return OptionOutcome((*words, "--tokenizer-model", directory), "the tokenizer is in --load")


RULES: dict[str, Rule] = {
    "--patch-tokenizer-type": _tokenizer,
    "--tokenizer-type": ignored("--patch-tokenizer-type is given"),
    "--dataset": of_value(
        {"MMAP": _PACKED, "LLama-Pretrain-Idxmap": _PACKED},
        refused_option("only indexed data are read", "convert the data with tools/preprocess_data.py"),
    ),
    "--max-padding-length": _PACKED,
    "--train-mode": of_value(
        {"pretrain": ignored("it is the only mode")}, refused_option("this program only pre-trains")
    ),
    "--extra-vocab-size": ignored("it added rows of the embedding that no token has"),
    "--qk-nope-head-dim": renamed("--qk-head-dim"),
    "--qk-rope-head-dim": renamed("--qk-pos-emb-head-dim"),
}
DIALECT = Dialect("pai", "Pai-Megatron-Patch", RULES)
