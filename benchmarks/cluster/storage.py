"""A file system of its own that can be frozen: what a storage server that does not answer looks like."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path


class Storage:
    """A file system in a file, as a context manager; hosts that are made meanwhile see it.

    Args:
        directory: for the file and the place where it is mounted; made.
        megabytes: its size.

    Attributes:
        path: where it is mounted.
    """

    def __init__(self, directory: Path, megabytes: int = 512):
        self.path, self._image = directory / "storage", directory / "storage.img"
        self._megabytes = megabytes

    def __enter__(self) -> Storage:
        self.path.mkdir(parents=True)
        with open(self._image, "wb") as image:
            os.truncate(image.fileno(), self._megabytes << 20)
        _call("mkfs.ext4", "-q", "-F", self._image)
        _call("mount", "-o", "loop,noatime", self._image, self.path)  # reading must not write the time of it
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(RuntimeError):  # it is not frozen
            self.thaw()
        _call("umount", "--lazy", self.path)
        self._image.unlink()

    def freeze(self) -> None:
        """From now on whoever writes, or waits for what was written, hangs."""
        _call("fsfreeze", "--freeze", self.path)

    def thaw(self) -> None:
        """All that was waited for comes to pass."""
        _call("fsfreeze", "--unfreeze", self.path)


def _call(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
