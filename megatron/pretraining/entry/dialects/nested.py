"""Configurations of NeMo and of Megatron-Bridge: nested keys, which are refused with the options that mean the same."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import yaml

from megatron.pretraining.config import ConfigError

_WORD = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_SECTIONS = {
    "NeMo": ({"trainer", "model"}, {"exp_manager", "trainer"}),
    "Megatron-Bridge": ({"model", "train"}, {"train", "optimizer", "scheduler"}),
}
"""By program, top-level keys that only its configurations have together."""
_RENAMED = {
    "trainer.max_steps": "--train-iters",
    "trainer.val_check_interval": "--eval-interval",
    "trainer.limit_val_batches": "--eval-iters",
    "trainer.log_every_n_steps": "--log-interval",
    "trainer.gradient_clip_val": "--clip-grad",
    "model.encoder_seq_length": "--seq-length",
    "model.num_moe_experts": "--num-experts",
    "model.layernorm_epsilon": "--norm-epsilon",
    "model.data.data_prefix": "--data-path",
    "model.data.splits_string": "--split",
    "model.tokenizer.model": "--tokenizer-model",
    "model.optim.sched.warmup_steps": "--lr-warmup-iters",
    "model.optim.sched.min_lr": "--min-lr",
    "dataset.sequence_length": "--seq-length",
    "dataset.blend": "--data-path",
}
"""Options by key, where their names differ."""
_MEANINGS = {
    ("trainer.precision", "bf16"): "--bf16",
    ("trainer.precision", "bf16-mixed"): "--bf16",
    ("trainer.precision", "16"): "--fp16",
    ("trainer.precision", "16-mixed"): "--fp16",
    ("model.activation", "swiglu"): "--swiglu",
    ("model.activation", "fast-swiglu"): "--swiglu",
    ("model.gated_linear_unit", "True"): "--swiglu",
    ("model.bias", "False"): "--disable-bias-linear",
    ("model.add_bias_linear", "False"): "--disable-bias-linear",
    ("model.normalization", "rmsnorm"): "--normalization RMSNorm",
    ("model.normalization", "layernorm1p"): "--apply-layernorm-1p",
    ("model.share_embeddings_and_output_weights", "False"): "--untie-embeddings-and-output-weights",
    ("model.data.data_impl", "mock"): "--mock-data",
    ("model.optim.name", "distributed_fused_adam"): "--use-distributed-optimizer",
    ("model.optim.sched.name", "CosineAnnealing"): "--lr-decay-style cosine",
}
"""Options by key and value."""
_PAIRS = {"model.optim.betas": ("--adam-beta1", "--adam-beta2")}


def refusal(
    content: Mapping[Any, Any], known: Mapping[str, bool], named: str, default_program: str | None = None
) -> ConfigError | None:
    """Names the options that mean the same as the nested keys of another program; pure.

    Args:
        content: keys and values.
        known: by option, whether it takes a value.
        named: the file or the words, as the subject of the sentence.
        default_program: the program, if no section identifies it.

    Returns:
        None if the content is not a configuration of such a program.
    """
    sections = {key for key, value in content.items() if isinstance(value, Mapping)}
    programs = (name for name, sets in _SECTIONS.items() if any(required <= sections for required in sets))
    program = next(programs, default_program)
    if program is None:
        return None
    words_by_option: dict[str, str] = {}
    for key, value in _leaves(content):
        for words in _options_of(key, value, known):
            words_by_option.setdefault(words.partition(" ")[0], words)
    options = " ".join(words_by_option.values()) or "see --help-all"
    return ConfigError(
        f"{named} is a configuration of {program}, whose keys are nested. Fix: pass the options that mean the same: "
        f"{options}",
        code="config-of-another-program",
    )


def is_key(word: str) -> bool:
    """Returns whether a word of a command line is a nested key and its value."""
    return _WORD.fullmatch(word) is not None


def content_of(words: Sequence[str]) -> dict[str, Any]:
    """Returns the nested keys and values of words such as ``model.num_layers=12``; empty without such words."""
    content: dict[str, Any] = {}
    for match in filter(None, map(_WORD.fullmatch, words)):
        *path, last = match[1].split(".")
        inner = content
        for key in path:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                return {}
        try:
            inner[last] = yaml.safe_load(match[2])
        except (yaml.YAMLError, ValueError, RecursionError):
            inner[last] = match[2]
    return content


def _leaves(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _options_of(key: str, value: Any, known: Mapping[str, bool]) -> Iterator[str]:
    """Yields the options of a key; none for interpolations, and for keys that Megatron-LM does not have."""
    if (meaning := _MEANINGS.get((key, str(value)))) is not None:
        yield meaning
    elif isinstance(value, Collection) and len(value) == len(_PAIRS.get(key, ())) > 0:
        yield from (f"{option} {number}" for option, number in zip(_PAIRS[key], value, strict=True))
    elif value is not None and "${" not in str(value):
        option = _RENAMED.get(key, f"--{key.rpartition('.')[2].replace('_', '-')}")
        if known.get(option):
            items = value if isinstance(value, list) else [value]
            yield " ".join([option, *(shlex.quote(str(item)) for item in items)])
        elif option in known and value is True:
            yield option
