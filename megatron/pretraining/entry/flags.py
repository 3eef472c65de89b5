"""Megatron-LM's functions for arguments, which read our options as well and report all problems in one message.

``parse_args`` receives a parser that knows our options and collects problems of words; ``validate_args`` adds what
Megatron-LM, this project's loop and its policies refuse.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron import training
from megatron.pretraining.config import ConfigError
from megatron.pretraining.config.flag import Problems
from megatron.pretraining.entry import command_line, cpu, elastic, options
from megatron.pretraining.entry.configuration import OWN_PROGRAM, config_of
from megatron.pretraining.entry.own_flags import add_own_flags
from megatron.pretraining.entry.stock import replaced
from megatron.pretraining.entry.stock_loop import refuse_arguments
from megatron.pretraining.errors import reported
from megatron.pretraining.process.rank0 import is_first_worker
from moc.output import print_lines
from moc.runtime import script_check


def parse_args(real: Callable[..., argparse.Namespace]) -> Callable[..., argparse.Namespace]:
    """Megatron-LM's ``parse_args``, which understands our options as well."""

    @functools.wraps(real)
    def parse(extra_args_provider=None, ignore_unknown_args=False):
        def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            of_megatron = frozenset(parser._option_string_actions)
            options.remember(real.__code__.co_filename, of_megatron)
            parser = parser if extra_args_provider is None else extra_args_provider(parser)
            of_script = parser._option_string_actions.keys() - of_megatron
            return command_line.prepared(add_own_flags(parser), of_script)

        return real(provider, ignore_unknown_args)

    return parse


def validate_args(real: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron-LM's ``validate_args``, which reports everything that is wrong with the options in one message.

    A script that only has to be checked ends here.
    """

    @functools.wraps(real)
    def validate(args, defaults=None):
        problems, read = problems_of(real, args, defaults or {}), command_line.read()
        with reported(Path(sys.argv[0]).name):
            problems.raise_found()
        if read.prints:
            if is_first_worker():
                with contextlib.redirect_stdout(sys.__stdout__):
                    print_lines(*(f"# {line}" for line in read.notices), *described())
            sys.exit(0)
        script_check.checked()
        return args

    return validate


def problems_of(check: Callable[..., Any], args: argparse.Namespace, defaults: Mapping[str, Any]) -> Problems:
    """Completes Megatron-LM's arguments, and returns everything that is wrong with the command line that was read last.

    Args:
        check: Megatron-LM's ``validate_args``.
        args: the parsed arguments, which change.
        defaults: of the program, by name.
    """
    problems, read = Problems(), command_line.read()
    problems.found += read.problems
    if any(problem.code == "config-of-another-program" for problem in problems.found):  # most values are missing
        return problems
    if not read.concealed:
        _limit_connections(args)
        cpu.leave_out_kernels(args, read.given)
        if defaults.get(OWN_PROGRAM) and args.max_position_embeddings is None:
            args.max_position_embeddings = args.seq_length
        try:
            with elastic.uneven_batch(args, bool(read.own.get("elastic"))):
                check(args, defaults)
        except (Exception, SystemExit) as error:
            problems.found.append(_refusal_of(error))
        else:
            problems.check(lambda: elastic.check_workers(config_of(args, read.own), read.given))
    problems.check(refuse_arguments, args)
    problems.check(cpu.refuse_models, args)
    return problems


def _limit_connections(args: argparse.Namespace) -> None:
    """Sets the environment variable that Megatron-LM requires for tensor and context parallelism, if it is not set."""
    parallel = max(args.tensor_model_parallel_size, args.context_parallel_size) > 1
    several = args.overlap_moe_expert_parallel_comm or args.use_megatron_fsdp or args.use_torch_fsdp2
    if parallel and not several:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def set_global_variables(real: Callable[..., None]) -> Callable[..., None]:
    """Megatron-LM's ``set_global_variables``, which builds tokenizer and writers of logs; its errors are sentences."""

    @functools.wraps(real)
    def set_up(args, *more: Any, **options: Any) -> None:
        ranks = {"data_parallel_size": 1} if command_line.read().own.get("elastic") else {}
        with reported(Path(sys.argv[0]).name), replaced(args, **ranks):  # they need not share a batch evenly
            try:
                real(args, *more, **options)
            except Exception as error:
                raise ConfigError(
                    f"Megatron-LM cannot set up the tokenizer {args.tokenizer_type} or the writers of logs "
                    f"({type(error).__name__}: {_cause_of(error)}). Fix: correct the options of tokenizer and logging",
                    code="tokenizer-unusable",
                ) from error
        if args.vocab_size is None and args.padded_vocab_size is not None:  # checkpoints record it without padding
            args.vocab_size = training.get_tokenizer().vocab_size

    return set_up


def print_args(title: str, args: argparse.Namespace) -> None:
    """Prints the options that differ from the defaults, in the place of Megatron-LM's list of all arguments."""
    if is_first_worker():
        print_lines(*command_line.read().notices)
        print_lines("options that differ from Megatron-LM's defaults:", *(f"  {line}" for line in described()))


def described() -> list[str]:
    """The values that differ from the defaults, as lines of a file for ``--config``."""
    return yaml.safe_dump(plain_options(), sort_keys=False).rstrip("\n").split("\n")


def plain_options() -> dict[str, Any]:
    """The values that differ from the defaults on the command line that was read last, as YAML has them."""
    return {name: _plain(value) for name, value in sorted(command_line.read().given.items())}


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _refusal_of(error: BaseException) -> ConfigError:
    """What Megatron-LM refuses; of an assertion without a sentence, the condition."""
    return ConfigError(
        f"Megatron-LM refuses the options: {_cause_of(error)}. Fix: change the options that it names",
        code="megatron-options-refused",
    )


def _cause_of(error: BaseException) -> str:
    cause = " ".join(str(error).split())
    if not cause:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        lines = range(frame.lineno or 0, (frame.end_lineno or frame.lineno or 0) + 1)
        cause = " ".join(linecache.getline(frame.filename, number).strip() for number in lines)
    return cause.rstrip(".")
