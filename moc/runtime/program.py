"""Calls the functions that the workers' program offers to a launcher.

A program may define or import these at its top level, if a ``__main__`` guard makes loading it safe:

* ``check_arguments(arguments, least_nodes, nodes, per_node)``: exits with a message if the arguments cannot work.  The
  launcher calls it in its own process before it starts any worker, so it must not import torch.
* ``warm_up()``: imports the modules that workers need, for a process that forks them.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from moc.runtime.flags import Flags
from moc.runtime.loading import load, place_of
from moc.runtime.script_check import check_words, is_of_megatron

CHECK = "check_arguments"


def check_arguments(flags: Flags) -> None:
    """Calls the program's ``check_arguments()``, if it has one.

    Raises:
        SystemExit: the program refuses its arguments, or has printed the requested output.
    """
    script, *arguments = flags.command
    try:
        source = Path(script).read_text(encoding="utf-8")
        offers = offers_function(source, CHECK)
    except (OSError, ValueError, SyntaxError):
        return  # unreadable, or no valid Python program
    if not offers:
        if is_of_megatron(source):
            check_words(script, arguments, flags.workers)
        return
    with _as_main(script, arguments):
        try:
            check = load(script, "__check_arguments__")[CHECK]
        except ImportError:
            return  # the workers report a missing library
        check(arguments, flags.least_nodes, flags.nnodes, flags.nproc_per_node)


def is_guarded(source: str) -> bool:
    """Returns whether a script has an ``if __name__ == "__main__"`` guard, so that importing it runs nothing."""
    guards = (node.test for node in ast.parse(source).body if isinstance(node, ast.If))
    return any(isinstance(test, ast.Compare) and "__name__" in ast.dump(test.left) for test in guards)


def offers_function(source: str, name: str) -> bool:
    """Returns whether a script with a guard defines or imports a function at its top level."""
    body = ast.parse(source).body
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    imported = {one.asname or one.name for node in body if isinstance(node, ast.ImportFrom) for one in node.names}
    return name in defined | imported and is_guarded(source)


@contextlib.contextmanager
def _as_main(script: str, arguments: list[str]) -> Iterator[None]:
    """Makes imports and messages the same as with ``python SCRIPT ARGUMENTS``."""
    words, places = sys.argv, sys.path[:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, place_of(script))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = words, places
