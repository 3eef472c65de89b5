"""Lets a worker's first import of ``megatron.training`` bring this project's loop with it.

Without CUDA, megatron-core has to be adapted before it is imported, so that its first import counts as well.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import runpy
import select
import signal
import sys
import time
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

VARIABLE = "MOC_NO_MEGATRON"
"""Environment variable that ``mocrun --no-megatron`` sets for workers."""

_ENTRY = "moc.megatron"
_WORDS = "megatron.pretraining.entry.words"
"""Module that checks the words of a command line without importing the entry point."""
_WATCHED = ("megatron.core", "megatron.training")
_ADAPTER = "megatron.pretraining.process.cpu"
"""Module of programs with an adapter of their own for megatron-core."""

REFUSED = 2
"""Exit code of a program that refuses its flags."""

_SECONDS = 60.0
"""Limit for a script's way to its parsed flags."""

_used = _checking = False


class _Finder(MetaPathFinder):
    """Imports :mod:`moc.megatron` when one of the watched packages is imported first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _WATCHED or _ENTRY in sys.modules or (fullname == "megatron.core" and not _needs_adapter()):
            return None
        importlib.import_module(_ENTRY)
        return _Loaded.spec(sys.modules[fullname])


class _Loaded(Loader):
    """Gives the import system a module that was loaded while it was looking for it."""

    def __init__(self, module: ModuleType):
        self._module, self._spec = module, module.__spec__

    @classmethod
    def spec(cls, module: ModuleType) -> ModuleSpec:
        """A specification that lets an import find the unchanged module."""
        spec = ModuleSpec(module.__name__, cls(module), is_package=True)
        spec.submodule_search_locations = list(module.__path__)
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _needs_adapter() -> bool:
    """Whether ``megatron.core`` must not be imported before it is adapted."""
    import torch

    return _ADAPTER not in sys.modules and not torch.cuda.is_available()


def install() -> None:
    """Watches imports from now on, unless :data:`VARIABLE` is set."""
    if os.environ.get(VARIABLE) != "1" and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def warm_up() -> None:
    """Imports what training by :mod:`moc.megatron` imports late; does nothing if that is not imported."""
    if (entry := sys.modules.get(_ENTRY)) is not None:
        entry.warm_up()


def is_of_megatron(source: str) -> bool:
    """Whether a script imports ``megatron.training`` or the entry point itself, and the launcher allows that."""
    modules = "|".join(re.escape(name) for name in (_WATCHED[-1], _ENTRY))
    imports = re.compile(rf"^\s*(?:from|import)\s+(?:{modules})\b", re.MULTILINE)
    return os.environ.get(VARIABLE) != "1" and imports.search(source) is not None


def check_words(script: str, arguments: list[str], size: int) -> None:
    """Exits if the script has no such options, or after printing what they ask for; for a launcher.

    Arguments are those of :func:`refusal`.
    """
    importlib.import_module(_WORDS).check_arguments(script, arguments, size)


def refusal(script: str, arguments: list[str], size: int) -> str | None:
    """Runs a script in a child of this process until it has checked its flags.

    Args:
        script: path of the script.
        arguments: its command line.
        size: number of workers of the job.

    Returns:
        The lines with which the script refuses its flags; None if it does not, or if the entry point is not imported.
    """
    if _ENTRY not in sys.modules:
        return None
    sys.stdout.flush()
    received, sent = os.pipe()
    child = os.fork()
    if child == 0:
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
    """Runs the script until :func:`checked` is called; if it exits with code 2, its errors go to a descriptor."""
    global _checking
    _checking = True
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    sys.argv, errors, code = [script, *arguments], io.StringIO(), None
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            runpy.run_path(script, run_name="__main__")
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


def checked() -> None:
    """The script has checked its flags: ends a process that only had to find that out."""
    if _checking:
        raise SystemExit


def note_use() -> None:
    """Notes that the entry point was called."""
    global _used
    _used = True


def reminder() -> str | None:
    """The sentence about a script that imports ``megatron.training`` and never calls ``pretrain``; None for others."""
    if _used or _ENTRY not in sys.modules or "megatron.training" not in sys.modules:
        return None
    return (
        f"{sys.argv[0]} did not call megatron.training.pretrain(), so nothing of it was protected by snapshots; "
        "start it with mocrun --no-megatron if that is intended"
    )
