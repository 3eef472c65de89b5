"""Finds and runs a program: a file, a module (``mocrun -m``), or an installed command such as ``moc-pretrain``."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

MODULE = "MOC_MODULE"
"""Environment variable with the name of the module that a job runs; not set if the program is a file."""


def located(name: str, is_module: bool) -> str | None:
    """Returns the file of a program; for a module or command, also sets :data:`MODULE`, which job processes inherit.

    Args:
        name: path, module, or installed command.
        is_module: ``name`` is a module, or the file of the module in the inherited :data:`MODULE`.

    Returns:
        The path; None if there is no such program.
    """
    if not is_module:
        os.environ.pop(MODULE, None)
    if Path(name).is_file():
        return name
    commands = [one.module for one in entry_points(group="console_scripts") if one.name == name]
    for module in [name] if is_module else commands:
        if (origin := _origin(module)) is not None:
            os.environ[MODULE] = module
            return origin
    return None


def _origin(module: str) -> str | None:
    """Returns the file that ``python -m MODULE`` runs."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(module)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{module}.__main__")
    except (ImportError, ValueError):
        return None
    return found.origin if found is not None and found.has_location else None


def place_of(script: str) -> str:
    """Returns the first entry of a program's module search path."""
    return os.getcwd() if MODULE in os.environ else str(Path(script).resolve().parent)


def load(script: str, name: str) -> dict[str, Any]:
    """Runs a program with this module name; returns its globals."""
    if module := os.environ.get(MODULE):
        return runpy.run_module(module, run_name=name, alter_sys=name == "__main__")
    return runpy.run_path(script, run_name=name)
