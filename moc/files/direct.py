"""Writes the contents of large files past the page cache.

Copying bytes to the page cache and writing them back takes processor time and memory bandwidth from training.  Direct
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

_FILE_SYSTEMS = frozenset({"ext3", "ext4", "overlay", "xfs"})
"""Of local disks.  Other file systems may forbid direct writes, or send each one over a network before the next."""
_BLOCK = 4096
_BUFFER = 8 << 20
_SMALL = 1 << 16
_MOUNT = re.compile(r"\S+ \S+ (?P<device>\d+:\d+) .* - (?P<kind>\S+) ")


def write_parts(file: int, parts: Iterable) -> None:
    """Writes buffers to an empty file, one after the other; past the page cache if they are many bytes.

    Args:
        file: descriptor of the file.
        parts: the buffers.

    Raises:
        OSError: the file system is full, or the file cannot be written.
    """
    staged, count, direct = memoryview(mmap.mmap(-1, _BUFFER)), 0, None
    for part in parts:
        data = memoryview(part)
        if not data.nbytes:
            continue  # an empty array cannot be cast
        data = data.cast("B")
        while data.nbytes and direct is not False:
            some = min(data.nbytes, _BUFFER - count)
            _copy(data[:some], staged[count : count + some])
            data, count = data[some:], count + some
            if count == _BUFFER:
                direct = _begins_direct(file) if direct is None else direct
                _write(file, staged)
                count = 0
        _write(file, data)
    blocks = count // _BLOCK * _BLOCK
    _write(file, staged[:blocks])
    if direct:
        _set_direct(file, False)
    _write(file, staged[blocks:count])


def _copy(data: memoryview, target: memoryview) -> None:
    if data.nbytes < _SMALL:
        target[:] = data
        return
    import numpy as np  # copies without Python's lock; programs that write small files only need not import it

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))


def _write(file: int, data: memoryview) -> None:
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


def _begins_direct(file: int) -> bool:
    """Turns direct writes on, if the file system is known to gain from them; returns whether they are on."""
    if _kind_of(file) not in _FILE_SYSTEMS:
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


def _kind_of(file: int) -> str | None:
    """Returns the type of the file system of an open file; None if it is not known."""
    device = os.fstat(file).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            found = (_MOUNT.match(line) for line in mounts)
            return next((one["kind"] for one in found if one is not None and one["device"] == name), None)
    except OSError:
        return None
