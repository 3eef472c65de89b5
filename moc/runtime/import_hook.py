"""Installs this project's training loop when a worker first imports ``megatron.training``.

Without CUDA, megatron-core must be adapted before its import, so an import of ``megatron.core`` has the same effect.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

DISABLE_VARIABLE = "MOC_NO_MEGATRON"
"""Environment variable that ``mocrun --no-megatron`` sets for workers."""

ENTRY_MODULE = "moc.megatron"
WATCHED_PACKAGES = ("megatron.core", "megatron.training")
_ADAPTER = "megatron.pretraining.process.cpu"
"""Module of programs that adapt megatron-core themselves."""

_pretrain_called = False


class _Finder(MetaPathFinder):
    """Imports :mod:`moc.megatron` when one of the watched packages is imported first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (
            fullname not in WATCHED_PACKAGES
            or ENTRY_MODULE in sys.modules
            or (fullname == "megatron.core" and not _needs_adapter())
        ):
            return None
        importlib.import_module(ENTRY_MODULE)
        return _LoadedModuleLoader.spec(sys.modules[fullname])


class _LoadedModuleLoader(Loader):
    """Loader of a module that was imported during the search for it."""

    def __init__(self, module: ModuleType):
        self._module, self._spec = module, module.__spec__

    @classmethod
    def spec(cls, module: ModuleType) -> ModuleSpec:
        """Returns a specification that makes an import return the unchanged module."""
        spec = ModuleSpec(module.__name__, cls(module), is_package=True)
        spec.submodule_search_locations = list(module.__path__)
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _needs_adapter() -> bool:
    """Returns whether ``megatron.core`` must be adapted before its import."""
    import torch

    return _ADAPTER not in sys.modules and not torch.cuda.is_available()


def install() -> None:
    """Starts watching imports, unless :data:`DISABLE_VARIABLE` is set."""
    if os.environ.get(DISABLE_VARIABLE) != "1" and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def warm_up() -> None:
    """Prepares the entry point for forks, if :mod:`moc.megatron` is imported."""
    if (entry := sys.modules.get(ENTRY_MODULE)) is not None:
        entry.warm_up()


def import_lazy_modules() -> None:
    """Imports the modules that training would import late, if :mod:`moc.megatron` is imported."""
    if (entry := sys.modules.get(ENTRY_MODULE)) is not None:
        entry.import_lazy_modules()


def record_pretrain_call() -> None:
    """Records that the entry point was called."""
    global _pretrain_called
    _pretrain_called = True


def unused_warning() -> str | None:
    """Returns a warning if the script imported ``megatron.training`` and never called ``pretrain``; otherwise None."""
    if _pretrain_called or ENTRY_MODULE not in sys.modules or "megatron.training" not in sys.modules:
        return None
    return (
        f"{sys.argv[0]} did not call megatron.training.pretrain(), so nothing of it was protected by snapshots; "
        "start it with mocrun --no-megatron if that is intended"
    )
