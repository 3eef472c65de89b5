"""What workers of a test's world do whose storage is slow, hangs or fails, below the store's file interface."""

from __future__ import annotations

import errno
import itertools
import re
import time

from moc.store.storage import LocalPlace
from tests.integration import bodies


def train(flags: dict, seconds: float, fails_every: int = 0, hangs_from: int | None = None) -> dict:
    """As ``bodies.train``.

    Args:
        flags: of the run.
        seconds: that each file of a snapshot takes longer to write.
        fails_every: one in so many of these writes fails; 0 for none.
        hangs_from: iteration from which on they take for ever.
    """
    write, number = LocalPlace.write, itertools.count(1)

    def slow(place: LocalPlace, path: str, parts, final: bool = True) -> None:
        if path.endswith(".safetensors") and place.name == flags["ckpt_dir"]:
            iteration = int(re.findall(r"iter_(\d+)/", path)[0])
            time.sleep(1e6 if hangs_from is not None and iteration >= hangs_from else seconds)
            if fails_every and next(number) % fails_every == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
        write(place, path, parts, final)

    LocalPlace.write = slow
    return bodies.train(flags)
