"""What workers of a test's world do whose storage is slow, hangs or fails, below the store's file interface."""

from __future__ import annotations

import errno
import itertools
import re
import time

from moc.store.storage import LocalStorage
from tests.integration import bodies
from tests.integration.snapshot_files import events


def train(flags: dict, lag: int = 0, fails_every: int = 0, hangs_from: int | None = None) -> dict:
    """As ``bodies.train``.

    Args:
        flags: of the run.
        lag: iterations that are completed while a file of a snapshot is written.
        fails_every: one in so many of these writes fails; 0 for none.
        hangs_from: iteration from which on they take for ever.
    """
    write, number = LocalStorage.write, itertools.count(1)

    def slow(place: LocalStorage, path: str, parts, is_durable: bool = True) -> None:
        if path.endswith(".safetensors") and place.name == flags["ckpt_dir"]:
            iteration = int(re.findall(r"iter_(\d+)/", path)[0])
            while hangs_from is not None and iteration >= hangs_from or completed(flags) < iteration + lag:
                time.sleep(0.2)
            if fails_every and next(number) % fails_every == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
        write(place, path, parts, is_durable)

    LocalStorage.write = slow
    return bodies.train(flags)


def completed(flags: dict) -> int:
    """The newest iteration that the run has reported."""
    return max((event["iteration"] for event in events(flags, "iteration")), default=0)
