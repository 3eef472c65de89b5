"""Reads and builds megatron-core's cache of sample indices: keyed by the data's contents, on each node.

megatron-core reads it with ``allow_pickle=True``, by default from ``cache/`` next to the data, where others may write.
Its keys have the path of the data only, and only the first worker of a job builds indices.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tokenize import TokenError
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from megatron.core.datasets import blended_dataset, gpt_dataset

from megatron.pretraining.data import identity
from moc.files.safe_directory import remove_owned
from moc.store.errors import CheckpointError

_REFUSED = (ValueError, EOFError, TypeError, SyntaxError, ArithmeticError, MemoryError, RecursionError, TokenError)
"""Errors of numpy for files that hold no valid array."""
_replacing = threading.Lock()


class IndexCacheError(CheckpointError):
    """Cached index that is not a plain array, belongs to another user, or cannot be written."""

    code = "index-cache-unusable"


class DamagedIndexError(IndexCacheError):
    """Cached index that is not a plain array."""


class _FirstWorker:
    """Replacement of ``torch`` in modules of megatron-core, which build missing indices outside of a job."""

    distributed = SimpleNamespace(is_initialized=lambda: False)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def read_plainly() -> None:
    """Makes megatron-core's datasets read their index caches with :func:`load`."""
    modules: tuple[Any, ...] = gpt_dataset, blended_dataset
    for module in modules:
        module.safe_numpy_load = load


def build_by_contents() -> None:
    """Makes megatron-core's datasets key their indices by contents, and build missing or damaged ones on each node.

    Caches for ``--dataloader-fast-cache-load`` and ``--dataloader-defer-npy-index-mmap`` are prepared by Megatron-LM,
    and stay as they are.  Further calls do nothing.
    """
    kinds: tuple[tuple[Any, Any, str], ...] = (
        (gpt_dataset, gpt_dataset.GPTDataset, "_build_document_sample_shuffle_indices"),
        (blended_dataset, blended_dataset.BlendedDataset, "_build_indices"),
    )
    for module, kind, name in kinds:
        real = getattr(kind, name)
        if not hasattr(real, "__wrapped__"):
            setattr(kind, name, _built_here(module, real))


def _built_here(module: Any, real: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(real)
    def build(dataset: Any) -> Any:
        directory = _directory_of(dataset)
        if directory is None or dataset.config.fast_cache_load or dataset.config.defer_npy_index_mmap:
            return real(dataset)
        try:
            _add_contents(dataset)
            with _locked(directory):
                try:
                    return real(dataset)
                except (FileNotFoundError, DamagedIndexError):
                    for path in directory.glob(f"{dataset.unique_description_hash}-*.npy"):
                        remove_owned(path)
                    return _build_alone(module, real, dataset)
        except OSError as error:
            raise IndexCacheError(
                f"the sample index cannot be cached in {directory} ({error.strerror or error}). Fix: pass "
                "--data-cache-path with a directory that can be written"
            ) from None

    return build


def _build_alone(module: Any, real: Callable[[Any], Any], dataset: Any) -> Any:
    with _replacing:
        module.torch = _FirstWorker()
        try:
            return real(dataset)
        finally:
            module.torch = torch


def _directory_of(dataset: Any) -> Path | None:
    """Returns the directory of the cache, as megatron-core chooses it; None if nothing is cached."""
    if dataset.config.path_to_cache:
        return Path(dataset.config.path_to_cache)
    if dataset.config.mock or not isinstance(dataset, gpt_dataset.GPTDataset):
        return None
    low_level: Any = dataset.dataset
    return Path(low_level.path_prefix, "cache", f"{type(dataset).__name__}_indices")


def _add_contents(dataset: Any) -> None:
    """Adds the fingerprint of the data to the key; a blend's key has the keys of its datasets."""
    prefix = getattr(dataset, "dataset_path", None)
    if prefix is None or not identity.is_local_pair(prefix):
        return
    dataset.unique_identifiers["contents"] = vars(identity.fingerprint(prefix))
    described = json.dumps(dataset.unique_identifiers, indent=4, default=lambda one: one.unique_identifiers)
    dataset.unique_description = described
    dataset.unique_description_hash = hashlib.md5(described.encode(), usedforsecurity=False).hexdigest()


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lets one worker of a node at a time use a cache, if it can be written: another may be building it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def load(path: str, mmap_mode=None, **_) -> numpy.ndarray:
    """Loads an array like ``numpy.load``, without pickles.

    Raises:
        IndexCacheError: the directory or the file belongs to another user, or the file is no plain array.
    """
    remedy = f"remove it, or pass --data-cache-path with a directory of your own instead of {os.path.dirname(path)}"
    for one in (Path(path).parent, Path(path)):
        if one.stat().st_uid not in (os.geteuid(), 0):
            raise IndexCacheError(f"{one} of the sample index belongs to another user, and is not read. Fix: {remedy}")
    try:
        with open(path, "rb") as file:
            numpy.lib.format.read_magic(file)  # refuses archives, for which numpy.load returns no array
        return numpy.load(path, mmap_mode=mmap_mode, allow_pickle=False)
    except _REFUSED as error:
        why = f"{type(error).__name__}: {error}".encode("unicode_escape").decode()[:200]
        raise DamagedIndexError(f"{path} is no plain array ({why}). Fix: {remedy}") from None
