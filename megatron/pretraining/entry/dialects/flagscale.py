"""Options of FlagScale (github.com/flagos-ai/FlagScale)."""

from __future__ import annotations

from megatron.pretraining.entry.dialects.rules import (
    Dialect,
    Rule,
    becomes,
    ignored,
    of_value,
    refused_option,
    renamed,
    same,
)

_OF_TRANSFORMERS = becomes("--tokenizer-type", "HuggingFaceTokenizer")

RULES: dict[str, Rule] = {
    "--tokenizer-type": of_value(
        {
            "QwenTokenizerFS": _OF_TRANSFORMERS,
            "Qwen2TokenizerFS": _OF_TRANSFORMERS,
            "Llama3TokenizerFS": _OF_TRANSFORMERS,
            "HFTokenizerFS": _OF_TRANSFORMERS,
            "AquilaTokenizerFS": refused_option("there is no such tokenizer", "choose HuggingFaceTokenizer"),
        },
        same("--tokenizer-type"),
    ),
    "--tokenizer-path": renamed("--tokenizer-model"),
    "--rampup-save-interval": ignored("--save-interval holds from the start"),
}
DIALECT = Dialect("flagscale", "FlagScale", RULES)
