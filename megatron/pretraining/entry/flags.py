"""Megatron-LM's functions for arguments, which read our options as well and report all problems in one message.

``parse_args`` receives a parser that has our options and collects problems of words; ``validate_args`` adds the
refusals of Megatron-LM, this project's loop and its policies.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import io
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from megatron.training.arguments import core_transformer_config_from_args

from megatron import training
from megatron.pretraining.config import ConfigError
from megatron.pretraining.config.flag import Problems, dashed, listed
from megatron.pretraining.config.world import check_backend, check_fewest, check_start, check_world
from megatron.pretraining.entry import command_line, elastic, formats, options
from megatron.pretraining.entry.configuration import MegatronConfig, check_parsed, config_of
from megatron.pretraining.entry.exclusions import complete_batch, complete_elastic
from megatron.pretraining.entry.limits import check_kernels, check_limits, check_run, leave_out_kernels, set_defaults
from megatron.pretraining.entry.own_flags import OWN_PROGRAM, add_own_flags
from megatron.pretraining.entry.stock import get_args, reads_checkpoint, replaced
from megatron.pretraining.entry.stock_loop import refuse_arguments
from megatron.pretraining.entry.tokenizers import unusable_tokenizer
from megatron.pretraining.errors import reported
from megatron.pretraining.logging.writers import Board, Listeners, WandbWriter
from megatron.pretraining.process.nodes import per_node, workers_of_job
from megatron.pretraining.process.paths import check_paths
from megatron.pretraining.process.topology import is_first_worker
from moc.cli_output import print_lines
from moc.events import EventLog, event_directory
from moc.runtime.environment import min_nodes
from moc.runtime.program import end_if_checking, only_checks_flags

_ARGUMENT = re.compile(r"\bargs\.(\w+)")
_NEVER = 10**9  # iterations


def parse_args(real: Callable[..., argparse.Namespace]) -> Callable[..., argparse.Namespace]:
    """Wraps Megatron-LM's ``parse_args`` so that it reads our options as well."""

    @functools.wraps(real)
    def parse(extra_args_provider=None, ignore_unknown_args=False):
        def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            megatron_options = frozenset(parser._option_string_actions)
            options.remember(real.__code__.co_filename, parser)
            parser = parser if extra_args_provider is None else extra_args_provider(parser)
            script_options = parser._option_string_actions.keys() - megatron_options
            return command_line.prepared(add_own_flags(parser), script_options, ignore_unknown_args)

        return real(provider, ignore_unknown_args)

    return parse


def load_args_from_checkpoint(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Megatron-LM's ``load_args_from_checkpoint`` (``--use-checkpoint-args``): its errors become sentences."""

    @functools.wraps(real)
    def load(args, load_arg="load", *more: Any, **options: Any) -> Any:
        with reported(Path(sys.argv[0]).name), reads_checkpoint(getattr(args, load_arg)):
            return real(args, load_arg, *more, **options)

    return load


def validate_args(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Megatron-LM's ``validate_args`` so that it reports all problems of the options in one message.

    A script that is only checked ends here.
    """

    @functools.wraps(real)
    def validate(args, defaults=None):
        read = command_line.read()
        with contextlib.redirect_stdout(io.StringIO()) if read.prints else contextlib.nullcontext():
            problems = problems_of(real, args, defaults or {})
        if (defaults or {}).get(OWN_PROGRAM) and not (read.prints or read.problems):
            problems.check(check_run, args)
        if only_checks_flags() and not problems.found:
            problems.check(_check_device, config_of(args, read.own))
            problems.check(lambda: _check_paths(config_of(args, read.own), bool((defaults or {}).get(OWN_PROGRAM))))
        with reported(Path(sys.argv[0]).name):
            problems.raise_found()
        if read.prints:
            if is_first_worker():
                with contextlib.redirect_stdout(sys.__stdout__):
                    print_lines(*(f"# {line}" for line in read.notices), *changed_values())
            sys.exit(0)
        end_if_checking()
        return args

    return validate


def problems_of(check: Callable[..., Any], args: argparse.Namespace, defaults: Mapping[str, Any]) -> Problems:
    """Completes Megatron-LM's arguments, and returns all problems of the last command line.

    Args:
        check: Megatron-LM's ``validate_args``.
        args: the parsed arguments, which change.
        defaults: defaults of the program, by name.
    """
    problems, read = Problems(), command_line.read()
    problems.found += read.problems
    if read.is_foreign:
        return problems
    set_defaults(args, defaults)
    if not read.concealed and problems.check(check_limits, args):
        _limit_connections(args)
        leave_out_kernels(args, read.named, torch.cuda.is_available())
        if defaults.get(OWN_PROGRAM):
            _complete(args, read.named)
        problems.check(formats.take_formats, args)
        if read.own.get("elastic"):
            complete_elastic(args, read.named)
        loads_optimizer = not args.no_load_optim
        has_batch = problems.check(complete_batch, args, read.given, args.world_size)
        is_parsed = has_batch and problems.check(_check_parsed, args, read.own)
        if is_parsed and problems.check(_validate, check, args, read.own):
            problems.check(lambda: _check_workers(config_of(args, read.own)))
            if defaults.get(OWN_PROGRAM):
                problems.check(_check_model, args)
        if args.skip_train and args.save and loads_optimizer:  # Megatron-LM's loop saves nothing then, and ours does
            args.no_load_optim = False
    args.use_persistent_ckpt_worker = False
    problems.check(refuse_arguments, args)
    problems.check(check_kernels, args, torch.cuda.is_available())
    return problems


def _check_parsed(args: argparse.Namespace, own: Mapping[str, object]) -> None:
    problems = Problems()
    check_parsed(args, own, problems)
    problems.raise_found()


def _validate(check: Callable[..., Any], args: argparse.Namespace, own: Mapping[str, object]) -> None:
    """Completes the arguments by Megatron-LM's check; raises ``ConfigError`` if it refuses them."""
    try:
        # Our writers are forked for each save. Megatron-LM would turn --async-save off without its persistent ones.
        with replaced(args, use_persistent_ckpt_worker=True), elastic.uneven_batch(args, bool(own.get("elastic"))):
            check(args, {})
    except (Exception, SystemExit) as error:
        raise refusal_of(error) from error


def _check_model(args: argparse.Namespace) -> None:
    """Raises ``ConfigError`` if megatron-core refuses the configuration of the model, which a script builds later."""
    try:
        core_transformer_config_from_args(args)
    except Exception as error:
        raise refusal_of(error) from error


def _check_device(config: MegatronConfig) -> None:
    """Raises ``ConfigError`` for flags that this machine's devices do not support."""
    has_cuda = torch.cuda.is_available()
    check_backend(config, config.arguments.distributed_backend if has_cuda else "gloo", has_cuda)


def _check_paths(config: MegatronConfig, reads_tokens: bool) -> None:
    """Raises ``ConfigError`` if a path of this machine cannot be used."""
    check_paths(config.arguments, config.snapshot, config.logging.log_dir, reads_tokens, workers_of_job().max_nodes)


def _complete(args: argparse.Namespace, explicit: Collection[str]) -> None:
    """Sets arguments that Megatron-LM requires and this program derives.

    Kernels of packages that are not installed are left out.  Without ``--save-interval``, the run saves where
    ``--save-retain-interval`` keeps a checkpoint, and at the end.
    """
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.save_interval is None:
        args.save_interval = args.save_retain_interval or _NEVER
    if args.num_experts and not args.swiglu:
        args.bias_gelu_fusion = False  # megatron-core's kernel does not support token weights
    has_transformer_engine = find_spec("transformer_engine") is not None
    if not has_transformer_engine:
        args.apply_rope_fusion = False
        if "transformer_impl" not in explicit:
            args.transformer_impl = "local"
    if not has_transformer_engine and find_spec("fused_weight_gradient_mlp_cuda") is None:
        args.gradient_accumulation_fusion = False
    if find_spec("scaled_upper_triang_masked_softmax_cuda") is None:
        args.masked_softmax_fusion = False
    if not torch.cuda.is_available():  # without kernels, the sums are computed differently
        args.bias_gelu_fusion = args.bias_swiglu_fusion = args.bias_dropout_fusion = False


def _check_workers(config: MegatronConfig) -> None:
    """Raises ``ConfigError`` if the flags do not fit the workers of the job, at its start and after losses of nodes.

    Megatron-LM has checked the workers at the start, unless their number is free (``--elastic``), but not the batches
    of a schedule.
    """
    if config.elastic.elastic:
        check_start(config, workers_of_job())
        return
    if config.scheduled_batch_sizes:
        check_world(config, config.arguments.world_size)
    if (fewest := min_nodes()) is not None:
        check_fewest(config, fewest, per_node())


def _limit_connections(args: argparse.Namespace) -> None:
    """Sets the environment variable that Megatron-LM requires for tensor and context parallelism, if it is not set."""
    parallel = max(args.tensor_model_parallel_size, args.context_parallel_size) > 1
    overlaps_communication = args.overlap_moe_expert_parallel_comm or args.use_megatron_fsdp or args.use_torch_fsdp2
    if parallel and not overlaps_communication:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def set_global_variables(real: Callable[..., None]) -> Callable[..., None]:
    """Wraps Megatron-LM's ``set_global_variables`` (tokenizer and log writers): its errors become sentences."""

    @functools.wraps(real)
    def set_up(args, *more: Any, **options: Any) -> None:
        ranks = {"data_parallel_size": 1} if command_line.read().own.get("elastic") else {}
        with reported(Path(sys.argv[0]).name), replaced(args, **ranks):  # they need not share a batch evenly
            try:
                with _background_writers(args):
                    real(args, *more, **options)
            except Exception as error:
                raise _set_up_error(args, error) from error
        if args.vocab_size is None and args.padded_vocab_size is not None:  # checkpoints record it without padding
            tokenizer: Any = training.get_tokenizer()
            args.vocab_size = tokenizer.vocab_size

    return set_up


_SET_UP = {
    "_set_tensorboard_writer": ("the TensorBoard writer", ("tensorboard_dir",)),
    "_set_wandb_writer": ("the writer of Weights & Biases", ("wandb_project", "wandb_exp_name", "wandb_save_dir")),
    "_set_one_logger": ("the writer of one_logger", ("one_logger_project", "one_logger_run_name")),
}
"""By function of Megatron-LM: the component that it sets up, and the arguments that it reads."""


def _set_up_error(args: argparse.Namespace, error: BaseException) -> ConfigError:
    """Returns the error for a failed set-up of Megatron-LM: of the tokenizer, a log writer or another component."""
    called = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    cause = f"{type(error).__name__}: {_cause_of(error)}"
    if "_build_tokenizer" in called:
        return unusable_tokenizer(args, cause)
    for component, names in (_SET_UP[name] for name in _SET_UP if name in called):
        settings = [f"{dashed(name)} {value}" for name in names if (value := getattr(args, name, None))]
        return ConfigError(
            f"{component} cannot be set up for {listed(settings)} ({cause}). Fix: correct or drop {listed(settings)}",
            code="log-writer-unusable",
        )
    return refusal_of(error)


@contextlib.contextmanager
def _background_writers(args: argparse.Namespace) -> Iterator[None]:
    """Gives Megatron-LM writers that drop values if a service fails or hangs, instead of ending or delaying the run."""
    with contextlib.ExitStack() as stack:
        if args.tensorboard_dir is not None and find_spec("tensorboard") is not None:
            board = functools.partial(_board, listeners_of_run())
            stack.enter_context(replaced(import_module("torch.utils.tensorboard"), SummaryWriter=board))
        if getattr(args, "wandb_project", "") and find_spec("wandb") is not None:
            wandb = WandbWriter(import_module("wandb"), listeners_of_run())
            stack.enter_context(_module(wandb=wandb))
        yield


def _board(listeners: Listeners, log_dir: str, max_queue: int) -> Board:
    return Board(log_dir, max_queue, listeners)


@contextlib.contextmanager
def _module(**modules: Any) -> Iterator[None]:
    """Temporarily replaces modules for imports."""
    before = {name: sys.modules[name] for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        sys.modules.update(before)


def listeners_of_run() -> Listeners:
    """Returns functions that print failures of a writer, and record them in ``events.jsonl``."""

    def record_lost_values(service: str, values: int, seconds: float) -> None:
        log_dir: Any = command_line.read().own.get("log_dir")
        events = EventLog(event_directory(log_dir))
        events.write("log_failed", what=service, lasted_s=round(seconds, 3), lost=values)
        events.close()
        print_lines(f"{service}: after {seconds:.0f} s, {values} values are lost", flush=True)

    return Listeners(functools.partial(print_lines, flush=True), record_lost_values)


def print_args(title: str, args: argparse.Namespace) -> None:
    """Prints the options that differ from the defaults, in the place of Megatron-LM's list of all arguments."""
    if is_first_worker():
        print_lines(*command_line.read().notices)
        print_lines("options that differ from Megatron-LM's defaults:", *(f"  {line}" for line in changed_values()))


def changed_values() -> list[str]:
    """Returns the values that differ from the defaults, as lines of a file for ``--config``."""
    return yaml.safe_dump(plain_options(), sort_keys=False).rstrip("\n").split("\n")


def plain_options() -> dict[str, Any]:
    """Returns the values of the last command line that differ from the defaults, as YAML values."""
    return {name: _yaml_value(value) for name, value in sorted(command_line.read().given.items())}


def _yaml_value(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_yaml_value(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def transformer_config(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Megatron-LM's ``core_transformer_config_from_args``: its errors in a script become sentences."""

    @functools.wraps(real)
    def build_config(args, *more: Any, **options: Any) -> Any:
        is_own = getattr(args, OWN_PROGRAM, False)
        with contextlib.nullcontext() if is_own else reported(Path(sys.argv[0]).name):
            try:
                return real(args, *more, **options)
            except Exception as error:
                raise refusal_of(error) from error

    return build_config


@contextlib.contextmanager
def refused_by_megatron() -> Iterator[None]:
    """Converts Megatron-LM's errors in this project's program, which runs no user code, to errors about options.

    Raises:
        ConfigError: Megatron-LM raised an error.
    """
    try:
        yield
    except (AssertionError, LookupError, OSError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError) or not getattr(get_args(), OWN_PROGRAM, False):
            raise
        raise refusal_of(error) from error


def refusal_of(error: BaseException) -> ConfigError:
    """Returns an error of Megatron-LM about its options; an assertion without a message is shown by its condition."""
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
        if cause.startswith("assert "):
            cause = f"`{_ARGUMENT.sub(_option, cause.removeprefix('assert '))}` is not true"
    return cause.rstrip(".")


def _option(argument: re.Match[str]) -> str:
    return f"--{argument[1].replace('_', '-')}"
