"""Reads the bytes that each rank saved from manifests during a run, because later manifests replace them."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from moc.store.errors import CheckpointError
from moc.store.host_memory import find_memory_storage
from moc.store.storage import LocalStorage
from moc.store.store import Store

PERIOD_S = 0.2


class Watch:
    """Background thread, as a context manager, that reads new manifests in ``--ckpt-dir`` and ``--ckpt-memory-dir``.

    ``sizes`` has the bytes of each rank's file by level (``memory``, ``storage``) and iteration, in order of ranks.
    """

    def __init__(self, storage: Path, memory: Path):
        self._storage, self._memory = storage, memory
        self._stores = {"storage": Store(LocalStorage(storage))}
        self.sizes: dict[str, dict[int, list[int]]] = {"storage": {}, "memory": {}}
        self._over, self._thread = threading.Event(), threading.Thread(target=self._look_again, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.look()

    def look(self) -> None:
        """Reads new manifests."""
        if "memory" not in self._stores:
            with contextlib.suppress(CheckpointError):  # the run has not started yet
                self._stores["memory"] = Store(find_memory_storage(self._memory, str(self._storage)))
        for level, store in self._stores.items():
            for iteration in store.iterations():
                if iteration not in self.sizes[level]:
                    with contextlib.suppress(CheckpointError):  # the snapshot was just removed
                        files = store.read_manifest(iteration).files
                        self.sizes[level][iteration] = [files[name].bytes for name in sorted(files)]

    def _look_again(self) -> None:
        while not self._over.wait(PERIOD_S):
            self.look()
