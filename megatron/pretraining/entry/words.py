"""Checks the command line of a script of Megatron-LM within a launcher, which imports neither torch nor Megatron-LM."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from megatron.pretraining.config.flag import Problems
from megatron.pretraining.entry import options
from megatron.pretraining.entry.dialects import translated
from megatron.pretraining.entry.own_flags import own_parser
from megatron.pretraining.entry.source_options import options_in
from megatron.pretraining.words import refuse_unknown
from moc.errors import with_code
from moc.output import print_lines

_PRINTS = ("--help-all", "--print-config")


def check_arguments(script: str, arguments: Sequence[str], size: int) -> None:
    """Exits with a message if a script lacks an option, or after printing the help or the configuration.

    Values and combinations are checked by the workers' forkserver, which has imported Megatron-LM.

    Args:
        script: path of the script.
        arguments: its command line.
        size: number of workers.
    """
    name = os.path.basename(script)
    parser = own_parser(name)
    if any(word in ("-h", "--help") for word in arguments):
        parser.print_help()
        sys.exit(0)
    if any(word in _PRINTS for word in arguments):
        os.environ |= {"WORLD_SIZE": str(size)}
        with contextlib.redirect_stdout(io.StringIO()):  # discards the script's own output
            code = import_module("moc.runtime.forkserver").run(script, [*arguments])
        sys.exit(code)
    places = [Path(script).resolve().parent, *map(Path, sys.path)]
    known, own = options.remembered(places), options_in(Path(script), places)
    if not known or own is None:
        return  # the forkserver refuses options that the script does not have
    spellings = {word: word for word in (*known, *parser._option_string_actions, *own)}
    translation = translated(arguments, spellings, own - known - parser._option_string_actions.keys())
    words = [word for word in translation.words if word.startswith("--") and word.partition("=")[0] not in spellings]
    problems = Problems()
    problems.found += translation.problems
    refuse_unknown(words, spellings, problems)
    if problems.found:
        print_lines(*(f"{name}: error: {with_code(one)}" for one in problems.found), error=True, flush=True)
        sys.exit(2)
