"""Writes large files past the page cache.

Copying bytes to the cache and writing them back takes processor time and memory bandwidth from training.  Direct
writes (``O_DIRECT``) avoid this (``docs/results/saving.md``).  Their buffers, lengths and offsets must be multiples of
a block, so all bytes pass through an aligned buffer.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
from collections.abc import Iterable

_DIRECT_FILE_SYSTEMS = frozenset({"ext3", "ext4", "overlay", "xfs"})
"""Of local disks.  Other file systems may forbid direct writes, or send each one over a network before the next."""
_BLOCK = 4096
_BUFFER = 8 << 20
_MAX_PYTHON_COPY_BYTES = 1 << 16
_MOUNT = re.compile(r"\S+ \S+ (?P<device>\d+:\d+) .* - (?P<kind>\S+) ")


def write_buffers(file: int, buffers: Iterable) -> None:
    """Writes buffers to an empty file, one after the other; past the page cache if they are many bytes.

    Raises:
        OSError: the file system is full, or the file cannot be written.
    """
    staging, staged_bytes, is_direct = memoryview(mmap.mmap(-1, _BUFFER)), 0, None
    for part in buffers:
        data = memoryview(part)
        if not data.nbytes:
            continue  # an empty array cannot be cast
        data = data.cast("B")
        while data.nbytes and is_direct is not False:
            size = min(data.nbytes, _BUFFER - staged_bytes)
            _copy_bytes(data[:size], staging[staged_bytes : staged_bytes + size])
            data, staged_bytes = data[size:], staged_bytes + size
            if staged_bytes == _BUFFER:
                is_direct = _enable_direct_writes(file) if is_direct is None else is_direct
                _write_all(file, staging)
                staged_bytes = 0
        _write_all(file, data)
    blocks = staged_bytes // _BLOCK * _BLOCK
    _write_all(file, staging[:blocks])
    if is_direct:
        _set_direct(file, False)
    _write_all(file, staging[blocks:staged_bytes])


def _copy_bytes(data: memoryview, target: memoryview) -> None:
    if data.nbytes < _MAX_PYTHON_COPY_BYTES:
        target[:] = data
        return
    import numpy as np  # copies without Python's lock; programs that write small files only need not import it

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))


def _write_all(file: int, data: memoryview) -> None:
    while data.nbytes:
        try:
            written = os.write(file, data)
        except OSError as error:
            if error.errno != errno.EINVAL or not _is_direct(file):
                raise
            _set_direct(file, False)  # the device has larger blocks
            continue
        data = data[written:]
        if written % _BLOCK and _is_direct(file):  # the file system is nearly full
            _set_direct(file, False)


def _enable_direct_writes(file: int) -> bool:
    """Turns direct writes on, if the file system is known to gain from them; returns whether they are on."""
    if _file_system_of(file) not in _DIRECT_FILE_SYSTEMS:
        return False
    try:
        _set_direct(file, True)
    except OSError:
        return False
    return True


def _is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def _set_direct(file: int, direct: bool) -> None:
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)


def _file_system_of(file: int) -> str | None:
    """Returns the type of the file system of an open file; None if it is not known."""
    device = os.fstat(file).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            matches = (_MOUNT.match(line) for line in mounts)
            return next((match["kind"] for match in matches if match is not None and match["device"] == name), None)
    except OSError:
        return None
