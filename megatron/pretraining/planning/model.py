"""Returns the model of a pretrain_gpt_moe.py command line and its operators, for tools without GPU and workers."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from megatron.pretraining.presets import PRESETS
from moc.cli_output import ToolError, number, refused
from moc.state.operators import Operator

COUNT, RATE = number(int, 1, 2**31 - 1), number(float, 1e-9, 1e9)
"""Argument types: a positive integer, and a positive rate."""
_RUN = "--micro-batch-size 1 --sequence-parallel --tokenizer-type NullTokenizer --vocab-size 1".split()
"""Options that Megatron-LM requires and that do not affect the operators; the command line overrides them."""


def config_of(
    model: str | None,
    words: Sequence[str],
    *,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
) -> Any:
    """Returns the configuration of a command line, for the fewest workers that its layout allows.

    Args:
        model: name of a preset; None if the words describe the model.
        words: options of Megatron-LM, of this project or of a dialect.
        tp: tensor parallelism; None for the value in ``words``.
        pp: pipeline stages; as ``tp``.
        ep: expert parallelism; as ``tp``.

    Raises:
        ConfigError: the options are invalid; reports all problems that can be found together.
    """
    if "torch" not in sys.modules:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # without a GPU, every machine builds the same layers
    warnings.filterwarnings("ignore", module=r"megatron\.(core|training)")  # warnings about kernels, which no tool runs
    options = list(_RUN)
    for flag, value in (
        ("--model", model),
        ("--tensor-model-parallel-size", tp),
        ("--pipeline-model-parallel-size", pp),
        ("--expert-model-parallel-size", ep),
    ):
        options += [] if value is None else [flag, str(value)]
    return import_module("megatron.pretraining.entry.offline").config_of_words([*options, *words], workers=None)


def meta_operators(config: Any, model: str | None, vocab_size: int | None = None) -> list[Operator]:
    """Returns every operator of the model, which is built without memory.

    Args:
        config: configuration from :func:`config_of`.
        model: name of a preset, whose vocabulary is the default.
        vocab_size: number of tokens before padding.

    Raises:
        ConfigError: Megatron-LM cannot build the model.
        ToolError: neither a vocabulary nor a preset is given.
    """
    if vocab_size is None and model is None:
        raise ToolError("--vocab-size is missing. Fix: give it, or a --model", code="flag-missing")
    size = vocab_size or PRESETS[model or ""].vocab_size
    multiple = config.network.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
    rows = -(-size // multiple) * multiple
    return [*import_module("megatron.pretraining.entry.meta").operators_on_meta(config, rows)]


def report_problems(program: str, error: Exception) -> int:
    """Prints each problem of an error as a line, and returns the exit status of the program."""
    return max(refused(program, problem) for problem in getattr(error, "problems", (error,)))
