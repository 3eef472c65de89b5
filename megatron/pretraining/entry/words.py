"""Checks the command line of a script of Megatron-LM within a launcher, which imports neither torch nor Megatron-LM.

Two checks use the same functions.  This one knows the options from a file (:mod:`.options`).  In a second, it refuses
unknown options, values of another type or out of range, values of our flags, and paths.  The forkserver then checks
everything with Megatron-LM, which takes seconds to import, and decides.  So a message of this check lists all problems
that it can find: also layouts that do not divide, and contradictions between options that command lines often have.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron.pretraining.config.flag import ConfigError, Problems, dashed
from megatron.pretraining.config.groups import converted, group_classes, group_of, snapshot_dir
from megatron.pretraining.config.world import Workers, check_backend, check_job
from megatron.pretraining.entry import command_line, options
from megatron.pretraining.entry.command_line import CommandLine
from megatron.pretraining.entry.configuration import MegatronConfig, check_parsed
from megatron.pretraining.entry.exclusions import complete_batch, complete_elastic
from megatron.pretraining.entry.limits import (
    check_formats,
    check_kernels,
    check_limits,
    check_run,
    leave_out_kernels,
    raise_to_limits,
    set_defaults,
)
from megatron.pretraining.entry.options import options_in
from megatron.pretraining.entry.own_flags import GENERAL, OWN_GROUPS, OWN_PROGRAM, PREFIX, add_own_flags, own_parser
from megatron.pretraining.entry.stock_loop import refuse_arguments
from megatron.pretraining.entry.tokenizers import check_tokenizer
from megatron.pretraining.process.paths import check_load, check_paths
from moc.cli_output import print_lines
from moc.errors import with_code
from moc.runtime.program import RunDirectories

_OF_SCRIPTS: Mapping[str, Any] = {"eval_interval": 1}
"""Values that stand for the defaults of a script, which are not known."""
_PRINTS = ("--help-all", "--print-config")
_AMD_DRIVER = "/dev/kfd"  # torch calls AMD's GPUs cuda, too


def check_arguments(
    script: str,
    arguments: Sequence[str],
    workers: tuple[int, int, int],
    defaults: Mapping[str, Any] | None = None,
) -> RunDirectories | None:
    """Exits with a message if a script refuses its options, or after printing the help or the configuration.

    As :func:`refuse_early`, for a launcher.
    """
    if any(word in _PRINTS for word in arguments):
        _, nodes, per_node = workers
        os.environ |= {"WORLD_SIZE": str(nodes * per_node)}
        with contextlib.redirect_stdout(io.StringIO()):  # discards the script's own output
            code = import_module("moc.runtime.forkserver").run_program(script, [*arguments])
        sys.exit(code)
    return refuse_early(script, arguments, workers, defaults)


def refuse_early(
    script: str,
    arguments: Sequence[str],
    workers: tuple[int, int, int],
    defaults: Mapping[str, Any] | None = None,
) -> RunDirectories | None:
    """Exits with a message if a script refuses its options, or after printing the help.

    Args:
        script: path of the script.
        arguments: its command line.
        workers: minimum nodes, nodes, and workers of each node.
        defaults: the script's defaults of options, by name, if they are known.

    Returns:
        The directories of the run; None if they are not known.
    """
    name = os.path.basename(script)
    if any(word in ("-h", "--help") for word in arguments):
        own_parser(name).print_help()
        sys.exit(0)
    parsed = None if any(word in _PRINTS for word in arguments) else parse_early(script, arguments)
    if parsed is None:
        return None  # only Megatron-LM checks
    values, read = parsed
    problems = early_problems(values, read, defaults or _OF_SCRIPTS, Workers(*workers))
    if problems.found:
        lines = dict.fromkeys(f"{name}: error: {with_code(problem)}" for problem in problems.found)
        print_lines(*lines, error=True, flush=True)
        sys.exit(2)
    own = converted(read.own, problems)
    snapshots = snapshot_dir(own.get("ckpt_dir"), values.save) if own.get("ckpt_policy") else None
    return RunDirectories(snapshots, own.get("log_dir"))


def parse_early(script: str, arguments: Sequence[str]) -> tuple[Any, CommandLine] | None:
    """Returns Megatron-LM's arguments and the command line; None if its options or the script's are not known."""
    search_path = [Path(script).resolve().parent, *map(Path, sys.path)]
    megatron_options, script_options = options.remembered(search_path), options_in(Path(script), search_path)
    if not megatron_options or script_options is None:
        return None
    own_options = own_parser(script)._option_string_actions.keys()
    parser = options.parser_of(megatron_options, script_options - (own_options - {f"--{option}" for option in GENERAL}))
    known_spellings = {spelling for option in megatron_options for spelling in option.spellings}
    command_line.prepared(add_own_flags(parser), script_options - known_spellings - own_options)
    return parser.parse_args(arguments), command_line.read()


def early_problems(
    values: Any, read: CommandLine, defaults: Mapping[str, Any], workers: Workers | None = None
) -> Problems:
    """Returns the problems of a command line that are found without Megatron-LM.

    Args:
        values: Megatron-LM's arguments, which are completed.
        read: the command line.
        defaults: the program's defaults of options, by name.
        workers: workers of the job; None if no job starts, so that neither workers nor paths are checked.
    """
    problems = Problems()
    problems.found += read.problems
    if read.is_foreign:
        return problems
    set_defaults(values, defaults)
    has_cuda = workers is None or _may_have_cuda()
    leave_out_kernels(values, read.named, has_cuda)
    problems.check(check_limits, values)
    concealed, number_of_known = read.concealed | raise_to_limits(values), len(problems.found)
    if not concealed:
        problems.check(check_formats, values)
        problems.check(check_kernels, values, has_cuda)
    own = converted(read.own, problems)
    groups = {name: group_of(group_classes()[name], own, problems) for name in OWN_GROUPS}
    is_own = defaults.get(OWN_PROGRAM, False)
    if problems.found:  # otherwise Megatron-LM completes the arguments first
        problems.check(refuse_arguments, values)
    if is_own and workers and not read.problems:
        problems.check(check_run, values)
    if not values.use_checkpoint_args:
        config = _check_together(values, read, None if concealed else workers, problems)
        if not (has_cuda or problems.found):
            problems.check(check_backend, config, "gloo")
    found = problems.found[number_of_known:]
    problems.found = [*problems.found[:number_of_known], *_without_concealed(found, concealed)]
    if workers and not problems.found:
        snapshot: Any = groups["snapshot"]
        problems.check(check_paths, values, snapshot, own.get("log_dir"), is_own, workers.max_nodes)
        problems.check(check_tokenizer, values)
        problems.check(check_load, values, bool(snapshot.ckpt_policy) or workers.max_nodes > 1)
    return problems


def _without_concealed(problems: Sequence[ConfigError], concealed: Collection[str]) -> list[ConfigError]:
    """Returns the problems that name no option whose value is not readable, and which has its default until then."""
    names = "|".join(re.escape(dashed(name.removeprefix(PREFIX))) for name in concealed)
    return [problem for problem in problems if not names or not re.search(rf"({names})(?![\w-])", str(problem))]


def _check_together(values: Any, read: CommandLine, workers: Workers | None, problems: Problems) -> MegatronConfig:
    """Adds the problems of combinations, and returns the configuration."""
    if read.own.get("elastic"):
        complete_elastic(values, read.named)
    size = workers.max_nodes * workers.per_node if workers else 1
    has_batch = not workers or problems.check(complete_batch, values, read.given, size)
    config = check_parsed(values, read.own, problems)
    excludes_elastic = any(problem.code == "elastic-excludes-flag" for problem in problems.found)
    if workers and has_batch and values.micro_batch_size and not excludes_elastic:
        problems.check(check_job, config, workers)
    return config


def _may_have_cuda() -> bool:
    """Returns whether workers of this machine may find a GPU; False only if they certainly find none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and (not visible or visible.startswith("-1")):
        return False
    try:
        ctypes.CDLL("libcuda.so.1")  # starts no CUDA, unlike torch
    except OSError:
        return os.path.exists(_AMD_DRIVER)
    return True
