"""Files that tools write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """A name to write to, which takes the place of ``path`` once all is well; its directory is made."""
    partial = f"{os.fspath(path)}.partial"
    os.makedirs(os.path.dirname(os.path.abspath(partial)), exist_ok=True)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)
