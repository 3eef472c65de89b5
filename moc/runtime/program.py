"""The workers' program: finds it, loads it, and checks its flags before workers start.

A program is a file, a module (``mocrun -m``), or an installed command such as ``moc-pretrain``.  It may define or
import these functions at its top level, if a ``__main__`` guard makes loading it safe:

* ``check_arguments(arguments, least_nodes, nodes, per_node)``: exits with a message if the arguments cannot work.  The
  launcher calls it in its own process before it starts any worker, so it must not import torch.  It may return
  :class:`RunDirectories`, or only the directory of the job's snapshots, which another job must not be using.
* ``warm_up()``: imports the modules that workers need, for a process that forks them.

The launcher checks the flags of a Megatron-LM script by a cached parser.  Then a child of the forkserver runs the
script until it has checked them.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import io
import os
import re
import runpy
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from moc.errors import UserError, cause_of
from moc.runtime.child_processes import die_with_parent
from moc.runtime.flags import LauncherFlags
from moc.runtime.import_hook import DISABLE_VARIABLE, ENTRY_MODULE, WATCHED_PACKAGES
from moc.store.ownership import refuse_owned

_FLAG_CHECK_MODULE = "megatron.pretraining.entry.words"
"""Module that checks words, values and paths of a command line without importing the entry point."""
REFUSED_EXIT_CODE = 2
"""Exit code of a program that refuses its flags."""

_PARSE_TIMEOUT_S = 60.0
"""Time limit for a script to parse its flags."""

_only_checks = False


@dataclass(frozen=True)
class RunDirectories:
    """Directories of a run, as its command line names them.

    Attributes:
        snapshots: directory or URL of the snapshots; None without snapshots.
        logs: directory of ``events.jsonl``; None without one.
    """

    snapshots: str | None = None
    logs: str | None = None


def imports_megatron(source: str) -> bool:
    """Returns whether a script imports ``megatron.training`` or the entry point, and the launcher allows that."""
    modules = "|".join(re.escape(name) for name in (WATCHED_PACKAGES[-1], ENTRY_MODULE))
    imports = re.compile(rf"^\s*(?:from|import)\s+(?:{modules})\b", re.MULTILINE)
    return os.environ.get(DISABLE_VARIABLE) != "1" and imports.search(source) is not None


def check_flag_values(script: str, arguments: list[str], workers: tuple[int, int, int]) -> RunDirectories | None:
    """Exits if an option or its value is wrong, or after printing the help or the configuration; for a launcher.

    Args:
        script: path of the script.
        arguments: its command line.
        workers: minimum nodes, nodes, and workers of each node.

    Returns:
        The directories of the run; None if they are not known.
    """
    return importlib.import_module(_FLAG_CHECK_MODULE).check_arguments(script, arguments, workers)


def flag_errors(script: str, arguments: list[str], size: int) -> str | None:
    """Runs a script in a child of this process until it has checked its flags.

    Args:
        script: path of the script.
        arguments: its command line.
        size: number of workers of the job.

    Returns:
        The script's error messages about its flags; None without errors, or if the entry point is not imported.
    """
    if ENTRY_MODULE not in sys.modules:
        return None
    sys.stdout.flush()
    reader, writer = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(parent)
        os.close(reader)
        _run_until_checked(script, arguments, size, writer)
    os.close(writer)
    output, deadline = b"", time.monotonic() + _PARSE_TIMEOUT_S
    with open(reader, "rb", buffering=0) as lines:
        while select.select([lines], [], [], max(0.0, deadline - time.monotonic()))[0] and (
            data := lines.read(1 << 16)
        ):
            output += data
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return output.decode() or None


def _run_until_checked(script: str, arguments: list[str], size: int, result: int) -> NoReturn:
    """Runs the script until :func:`end_if_checking` is called; writes its errors to a descriptor if it exits with 2."""
    global _only_checks
    _only_checks = True
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    sys.argv, errors, code = [script, *arguments], io.StringIO(), None
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            load_program(script, "__main__")
    except SystemExit as exit_request:
        code = exit_request.code
    except BaseException:  # the workers report it
        code = None
    finally:
        if code == REFUSED_EXIT_CODE:
            start = f"{os.path.basename(script)}: error"
            lines = [line for line in errors.getvalue().splitlines() if line.startswith(start)]
            os.write(result, "\n".join(lines).encode())
        os._exit(0)


def only_checks_flags() -> bool:
    """Returns whether this process only checks whether the script accepts its flags."""
    return _only_checks


def end_if_checking() -> None:
    """Ends this process if it only checks the script's flags; called when the script has accepted them."""
    if _only_checks:
        raise SystemExit


MODULE_VARIABLE = "MOC_MODULE"
"""Environment variable with the name of the module that a job runs; not set if the program is a file."""


def find_program(name: str, is_module: bool) -> str | None:
    """Returns the file of a program, and sets :data:`MODULE_VARIABLE` for a module or command.

    The processes of the job inherit the variable.

    Args:
        name: path, module, or installed command.
        is_module: ``name`` is a module, or the file of the module in the inherited :data:`MODULE_VARIABLE`.

    Returns:
        The path; None if there is no such program.
    """
    if not is_module:
        os.environ.pop(MODULE_VARIABLE, None)
    if Path(name).is_file():
        return name
    modules = [entry_point.module for entry_point in entry_points(group="console_scripts") if entry_point.name == name]
    for module in [name] if is_module else modules:
        if (origin := _module_file(module)) is not None:
            os.environ[MODULE_VARIABLE] = module
            return origin
    return None


def _module_file(module: str) -> str | None:
    """Returns the file that ``python -m MODULE`` runs."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except (ImportError, ValueError):
        return None
    return spec.origin if spec is not None and spec.has_location else None


def program_directory(script: str) -> str:
    """Returns the first entry of a program's module search path."""
    return os.getcwd() if MODULE_VARIABLE in os.environ else str(Path(script).resolve().parent)


def load_program(script: str, name: str) -> dict[str, Any]:
    """Runs a program with this module name; returns its globals."""
    if module := os.environ.get(MODULE_VARIABLE):
        return runpy.run_module(module, run_name=name, alter_sys=name == "__main__")
    return runpy.run_path(script, run_name=name)


CHECK_FUNCTION = "check_arguments"
_EXIT_S = 1.5
"""Time for another job in the same directory to exit; its workers may still be ending."""


def check_arguments(flags: LauncherFlags) -> Path | None:
    """Calls the program's ``check_arguments()``, if it has one, and refuses a snapshot directory in use.

    Returns:
        The directory of the run's logs; None if it has none.

    Raises:
        SystemExit: the program refuses its arguments, or has printed the requested output.
        TakenError: another job is using the directory of the job's snapshots.
        ProgramError: the program is no Python program.
    """
    directories = _call_check(flags)
    directories = (
        directories
        if isinstance(directories, RunDirectories)
        else RunDirectories(directories if isinstance(directories, str) else None)
    )
    directory, logs = directories.snapshots, directories.logs or _value_of("--log-dir", flags.command[1:])
    # other nodes of the same job may already train, and own the directory
    if isinstance(directory, str) and "://" not in directory and not flags.has_other_nodes:
        with contextlib.suppress(OSError):  # the workers report it
            refuse_owned(Path(directory), _EXIT_S)
    return Path(logs) if logs else None


def _value_of(option: str, arguments: list[str]) -> str | None:
    """Returns the last value of an option in the command line of a program whose options are not known."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(option, dest="value")
    with contextlib.suppress(argparse.ArgumentError):
        return parser.parse_known_args(arguments)[0].value
    return None


def _call_check(flags: LauncherFlags) -> object:
    """Returns the result of the program's ``check_arguments()``; None without one."""
    script, *arguments = flags.command
    workers = flags.min_nodes, flags.nnodes, flags.nproc_per_node
    source = read_program(script)
    if not offers_function(source, CHECK_FUNCTION):
        if not imports_megatron(source):
            return None
        return check_flag_values(script, arguments, workers)
    with _as_main(script, arguments):
        try:
            check = load_program(script, "__check_arguments__")[CHECK_FUNCTION]
        except ImportError:
            return None  # the workers report a missing library
        return check(arguments, *workers)


class ProgramError(UserError):
    """The workers' program is no Python program."""

    code = "program-not-python"
    remedy = "name a Python program, or correct this one"


def read_program(script: str) -> str:
    """Returns the source of a program; raises ProgramError if it cannot be read or is no Python."""
    try:
        source = Path(script).read_text(encoding="utf-8")
        ast.parse(source, script)
    except (OSError, SyntaxError, ValueError) as error:
        raise ProgramError(f"{script} is not a Python program: {cause_of(error)}") from None
    return source


def is_guarded(source: str) -> bool:
    """Returns whether a script has an ``if __name__ == "__main__"`` guard, so that importing it runs nothing."""
    guards = (node.test for node in ast.parse(source).body if isinstance(node, ast.If))
    return any(isinstance(test, ast.Compare) and "__name__" in ast.dump(test.left) for test in guards)


def offers_function(source: str, name: str) -> bool:
    """Returns whether a script with a guard defines or imports a function at its top level."""
    body = ast.parse(source).body
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    imported = {
        imported_name.asname or imported_name.name
        for node in body
        if isinstance(node, ast.ImportFrom)
        for imported_name in node.names
    }
    return name in defined | imported and is_guarded(source)


@contextlib.contextmanager
def _as_main(script: str, arguments: list[str]) -> Iterator[None]:
    """Makes imports and messages the same as with ``python SCRIPT ARGUMENTS``."""
    argv, search_path = sys.argv, sys.path[:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, program_directory(script))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, search_path
