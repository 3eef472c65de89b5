"""Checks the command line of a script of Megatron-LM within a launcher, which imports neither torch nor Megatron-LM."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from megatron.pretraining.config.flag import Problems
from megatron.pretraining.entry import options
from megatron.pretraining.entry.own_flags import add_own_flags
from megatron.pretraining.words import refuse_unknown
from moc.errors import with_code
from moc.output import print_lines

_OPTION = re.compile(rb"""["'](--[A-Za-z][\w-]*)["']""")
_IMPORT = re.compile(rb"^\s*(?:from|import)\s+(\w+)", re.MULTILINE)
_LARGEST = 4 << 20  # bytes of a source file
_MOST_FILES = 500
_PRINTS = ("--help-all", "--print-config")


def check_arguments(script: str, arguments: Sequence[str], size: int) -> None:
    """Exits with a message if a script has no such options, or after printing what its options ask for.

    Values and combinations are checked by the workers' warm process, which knows Megatron-LM.

    Args:
        script: path of the script.
        arguments: its command line.
        size: number of workers.
    """
    name = os.path.basename(script)
    parser = argparse.ArgumentParser(name, f"{name} [options of Megatron-LM] [options below]", allow_abbrev=False)
    add_own_flags(parser)
    if any(word in ("-h", "--help") for word in arguments):
        parser.print_help()
        sys.exit(0)
    if any(word in _PRINTS for word in arguments):
        os.environ |= {"WORLD_SIZE": str(size)}
        with contextlib.redirect_stdout(io.StringIO()):  # of what the script prints before
            code = import_module("moc.runtime.zygote").run(script, [*arguments])
        sys.exit(code)
    places = [Path(script).resolve().parent, *map(Path, sys.path)]
    known = options.remembered(places)
    if not known:
        return
    spellings = {word: word for word in (*known, *parser._option_string_actions, *_options_in(Path(script), places))}
    words = [word for word in arguments if word.startswith("--") and word.partition("=")[0] not in spellings]
    problems = Problems()
    refuse_unknown(words, spellings, problems)
    if problems.found:
        print_lines(*(f"{name}: error: {with_code(one)}" for one in problems.found), error=True, flush=True)
        sys.exit(2)


def _options_in(script: Path, places: Sequence[Path]) -> Iterator[str]:
    """Strings that look like options in a script, and in what it imports from outside of the installed packages."""
    own = [place for place in places if "site-packages" not in place.parts and place != _STANDARD]
    waiting, seen = [script], set()
    while waiting and len(seen) < _MOST_FILES:
        file = waiting.pop()
        if file in seen or not file.is_file() or file.stat().st_size > _LARGEST:
            continue
        seen.add(file)
        with open(file, "rb") as source:
            text = source.read(_LARGEST)
        yield from (found.decode() for found in _OPTION.findall(text))
        for module in {found.decode() for found in _IMPORT.findall(text)} - {"megatron", "moc", "torch"}:
            for place in own:
                waiting += [place / f"{module}.py", *(place / module).rglob("*.py")]


_STANDARD = Path(os.__file__).parent
