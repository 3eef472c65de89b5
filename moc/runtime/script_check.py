"""Checks the flags of a Megatron-LM script before workers run it: words in the launcher, values in a child process."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import select
import signal
import sys
import time
from typing import NoReturn

from moc.runtime.children import die_with_parent
from moc.runtime.hook import ENTRY, VARIABLE, WATCHED
from moc.runtime.loading import load

_WORDS = "megatron.pretraining.entry.words"
"""Module that checks the words of a command line without importing the entry point."""
REFUSED = 2
"""Exit code of a program that refuses its flags."""

_SECONDS = 60.0
"""Time limit for a script to parse its flags."""

_checking = False


def is_of_megatron(source: str) -> bool:
    """Returns whether a script imports ``megatron.training`` or the entry point, and the launcher allows that."""
    modules = "|".join(re.escape(name) for name in (WATCHED[-1], ENTRY))
    imports = re.compile(rf"^\s*(?:from|import)\s+(?:{modules})\b", re.MULTILINE)
    return os.environ.get(VARIABLE) != "1" and imports.search(source) is not None


def check_words(script: str, arguments: list[str], size: int) -> None:
    """Exits if the script lacks an option, or after printing the help or the configuration; for a launcher.

    It has the arguments of :func:`refusal`.
    """
    importlib.import_module(_WORDS).check_arguments(script, arguments, size)


def refusal(script: str, arguments: list[str], size: int) -> str | None:
    """Runs a script in a child of this process until it has checked its flags.

    Args:
        script: path of the script.
        arguments: its command line.
        size: number of workers of the job.

    Returns:
        The script's error messages about its flags; None without errors, or if the entry point is not imported.
    """
    if ENTRY not in sys.modules:
        return None
    sys.stdout.flush()
    received, sent = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(parent)
        os.close(received)
        _check(script, arguments, size, sent)
    os.close(sent)
    told, deadline = b"", time.monotonic() + _SECONDS
    with open(received, "rb", buffering=0) as lines:
        while select.select([lines], [], [], max(0.0, deadline - time.monotonic()))[0] and (
            more := lines.read(1 << 16)
        ):
            told += more
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return told.decode() or None


def _check(script: str, arguments: list[str], size: int, result: int) -> NoReturn:
    """Runs the script until :func:`checked` is called; writes its errors to a descriptor if it exits with 2."""
    global _checking
    _checking = True
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    sys.argv, errors, code = [script, *arguments], io.StringIO(), None
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            load(script, "__main__")
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:  # the workers report it
        code = None
    finally:
        if code == REFUSED:
            start = f"{os.path.basename(script)}: error"
            lines = [line for line in errors.getvalue().splitlines() if line.startswith(start)]
            os.write(result, "\n".join(lines).encode())
        os._exit(0)


def is_checking() -> bool:
    """Returns whether this process only checks whether the script accepts its flags."""
    return _checking


def checked() -> None:
    """Ends this process if it only checks the script's flags; called when the script has accepted them."""
    if _checking:
        raise SystemExit
