"""Writes Megatron's .bin/.idx pairs, so that an incomplete pair never looks complete."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Any

from megatron.pretraining.data import identity
from megatron.pretraining.data.documents import sync
from moc.files.safe_directory import create_file, open_without_links, remove_owned
from moc.output import ToolError

_TRIES, _PAUSE_S = 20, 0.1


def _locked(descriptor: int) -> bool:
    """Locks a file for this process only, retrying while the workers of a killed process still hold the lock."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_PAUSE_S)
    return False


def _again(descriptor: int) -> str:
    """Returns a path that opens the same file again, even if its name has been reused."""
    return f"/proc/self/fd/{descriptor}"


class PairWriter:
    """Writes one .bin/.idx pair under temporary names, which are removed at the end unless published.

    ``eod`` ends documents, if given; an existing pair is replaced only with ``overwrite``.  The file of its fingerprint
    records the ``vocabulary`` of the tokenizer.
    """

    def __init__(
        self, prefix: str, dtype, eod: int | None, overwrite: bool, vocabulary: identity.Vocabulary | None = None
    ):
        self.prefix, self.dtype, self.tokens = prefix, dtype, 0
        self._eod, self._overwrite, self._vocabulary, self._parts = eod, overwrite, vocabulary, []
        self._bin, self._idx = f"{prefix}.bin.partial", f"{prefix}.idx.partial"

    def __enter__(self) -> PairWriter:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        os.makedirs(os.path.dirname(os.path.abspath(self.prefix)), exist_ok=True)
        self._lock = open(self._bin, "ab", opener=open_without_links)
        if not _locked(self._lock.fileno()):
            self._lock.close()
            raise ToolError(
                f"another process is writing {self.prefix}.bin. Fix: wait for its end, or choose another "
                "--output-prefix",
                code="output-in-use",
            )
        for path in (f"{self.prefix}.bin", f"{self.prefix}.idx"):
            if os.path.exists(path) and not self._overwrite:
                self._discard()
                raise ToolError(f"{path} exists. Fix: add --overwrite to replace it", code="output-exists")
        self._builder = IndexedDatasetBuilder(_again(self._lock.fileno()), dtype=self.dtype)
        return self

    def __exit__(self, *exception) -> None:
        del self._builder  # closes its file
        self._discard()

    def _discard(self) -> None:
        for path in (self._bin, self._idx):
            remove_owned(Path(path))
        self._lock.close()

    def add(self, tokens) -> None:
        """Appends token ids to the current document."""
        self._parts.append(tokens)

    def end_document(self) -> bool:
        """Ends the current document; returns False if it is empty and left out."""
        import numpy

        parts, self._parts = self._parts, []
        if not any(len(part) for part in parts):
            return False
        if self._eod is not None:
            parts.append(numpy.array([self._eod], dtype=self.dtype))
        document: Any = numpy.concatenate(parts)  # megatron-core annotates a tensor, and accepts an array
        self._builder.add_document(document, [len(document)])
        self.tokens += len(document)
        return True

    def drop_document(self) -> None:
        """Discards the current document."""
        self._parts = []

    def complete(self) -> None:
        """Writes the index and flushes both files to disk, still under their temporary names."""
        remove_owned(Path(self._idx))
        with open(create_file(Path(self._idx)), "wb") as index:
            self._builder.finalize(_again(index.fileno()))
        sync(self._bin)
        sync(self._idx)

    def publish(self) -> None:
        """Renames both files to their final names; an .idx is never visible together with another pair's .bin."""
        for suffix in (".idx", identity.SUFFIX):
            remove_owned(Path(f"{self.prefix}{suffix}"))
        # megatron-core caches sample indices there by path; the old pair's indices are invalid for the new pair
        with contextlib.suppress(OSError):
            remove_owned(Path(self.prefix, "cache"))
        os.replace(self._bin, f"{self.prefix}.bin")
        os.replace(self._idx, f"{self.prefix}.idx")
        identity.record(self.prefix, self._vocabulary)
        sync(os.path.dirname(os.path.abspath(self.prefix)))
