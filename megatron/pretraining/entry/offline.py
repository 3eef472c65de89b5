"""Reads the configuration of a command line without workers, for planners and converters."""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from megatron.pretraining.config import Config

PROGRAM = "pretrain_gpt_moe.py"


def config_of_words(words: Sequence[str], workers: int | None = 1) -> Config:
    """Parses and checks a command line of ``pretrain_gpt_moe.py``, and builds nothing.

    Args:
        words: options of Megatron-LM, of this project, or of a dialect.
        workers: number of workers, which the layout has to divide; None for the fewest that the layout allows.

    Returns:
        The configuration; its attribute ``arguments`` holds Megatron-LM's arguments.

    Raises:
        ConfigError: the command line cannot work; the error lists all problems that can be found together.
    """
    if "megatron.training" not in sys.modules:  # its import takes seconds
        _check_early(words)
    import_module("moc.megatron")  # before others import megatron-core; adds our options to the parser
    entry = "megatron.pretraining.entry"
    flags, stock = import_module(f"{entry}.flags"), import_module(f"{entry}.stock")
    arguments: Any = import_module("megatron.training.arguments")
    size = str(workers or 1)
    environment = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "RANK": "0", "LOCAL_RANK": "0"}
    with kept_environment(), stock.replaced(sys, argv=[PROGRAM, *words]), contextlib.redirect_stdout(io.StringIO()):
        os.environ |= environment
        args = arguments.parse_args()
        if workers is None:
            args.world_size = _fewest_workers(args)
        check = arguments.validate_args.__wrapped__
        flags.problems_of(check, args, import_module(f"{entry}.gpt").DEFAULTS).raise_found()
    own = import_module(f"{entry}.command_line").read().own
    return import_module(f"{entry}.configuration").config_of(args, own)


def _check_early(words: Sequence[str]) -> None:
    """Raises ``ConfigError`` with the problems that are found without importing Megatron-LM."""
    checks = import_module("megatron.pretraining.entry.words")
    program = import_module("megatron.pretraining.pretrain_gpt_moe").__file__
    if parsed := checks.parse_early(program, words):
        defaults = import_module("megatron.pretraining.entry.own_flags").DEFAULTS
        checks.early_problems(*parsed, defaults).raise_found()


@contextlib.contextmanager
def kept_environment() -> Iterator[None]:
    """Restores the environment variables afterwards; Megatron-LM sets some for later jobs of the process."""
    before = os.environ.copy()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


def given_options() -> dict[str, Any]:
    """Returns the last command line's options that differ from Megatron-LM's defaults, as a file for ``--config``."""
    return import_module("megatron.pretraining.entry.flags").plain_options()


def _fewest_workers(args: Any) -> int:
    dense = args.tensor_model_parallel_size * args.context_parallel_size
    experts = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
    return max(1, args.pipeline_model_parallel_size * math.lcm(dense, experts))
