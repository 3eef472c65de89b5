"""Translates a preset and training flags into the operators of a model, for tools that need no GPU."""

from __future__ import annotations

from megatron.pretraining.arguments import parse_config
from megatron.pretraining.config import Config
from megatron.pretraining.model.shape import model_shape
from megatron.pretraining.presets import PRESETS
from moc.output import ToolError
from moc.state.operators import Operator
from moc.state.shape import model_operators

# Flags that parse_config requires and that do not affect the model's shape.
_RUN = ["--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-3", "--mock-data", "--sequence-parallel"]


def config_of(
    model: str | None,
    model_flags: list[str],
    *,
    vocab_size: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
) -> Config:
    """The configuration given by these flags of pretrain_gpt_moe.py; ``vocab_size`` is before padding."""
    flags = [*_RUN, "--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size or 1)]
    for flag, value in (
        ("--model", model),
        ("--tensor-model-parallel-size", tp),
        ("--pipeline-model-parallel-size", pp),
        ("--expert-model-parallel-size", ep),
    ):
        flags += [] if value is None else [flag, str(value)]
    return parse_config([*flags, *model_flags])


def operators_of(config: Config, vocab_size: int | None) -> list[Operator]:
    """Every operator of the model; the vocabulary before padding is by default the preset's.

    Raises:
        ToolError: neither a vocabulary nor a preset is given.
    """
    if vocab_size is None and config.model is None:
        raise ToolError("--vocab-size is missing. Fix: give it, or a --model", code="flag-missing")
    size = vocab_size or PRESETS[config.model or ""].vocab_size
    multiple = config.network.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
    return model_operators(model_shape(config.network, config.moe, -(-size // multiple) * multiple))
