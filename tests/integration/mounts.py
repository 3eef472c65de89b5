"""File systems of a size, for tests that fill them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(directory: Path, size: str) -> Iterator[Path]:
    """A small memory file system."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root, to mount a small tmpfs")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)
