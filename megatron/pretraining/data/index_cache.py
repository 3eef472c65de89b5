"""Reads megatron-core's cache of sample indices without unpickling, and only from the user's own directory.

megatron-core reads it with ``allow_pickle=True``, by default from ``cache/`` next to the data, where others may write.
"""

from __future__ import annotations

import os
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy
from megatron.core.datasets import blended_dataset, gpt_dataset

from moc.store.errors import CheckpointError

_REFUSED = (ValueError, EOFError, TypeError, SyntaxError, ArithmeticError, MemoryError, RecursionError, TokenError)
"""Errors of numpy for files that hold no valid array."""


class IndexCacheError(CheckpointError):
    """Cached index that is not a plain array, or belongs to another user."""

    code = "index-cache-unusable"


def read_plainly() -> None:
    """Makes megatron-core's datasets read their index caches with :func:`load`."""
    modules: tuple[Any, ...] = gpt_dataset, blended_dataset
    for module in modules:
        module.safe_numpy_load = load


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
        raise IndexCacheError(f"{path} is no plain array ({why}). Fix: {remedy}") from None
