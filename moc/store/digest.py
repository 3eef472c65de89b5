"""The hash that verifies stored data when it is read."""

from __future__ import annotations

from collections.abc import Callable
from io import BufferedIOBase, RawIOBase

import xxhash

_BLOCK = 4 << 20


def digest_of(data) -> str:
    """Returns the xxh3-128 of a buffer, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_of_file(
    file: BufferedIOBase | RawIOBase, size: int, advance: Callable[[int], object] = lambda count: None
) -> str:
    """Returns the xxh3-128 of the next ``size`` bytes of a file, or of fewer if it ends, in hex.

    Calls ``advance`` with the number of bytes of each block read.
    """
    hasher, block = xxhash.xxh3_128(), memoryview(bytearray(min(size, _BLOCK)))
    while size and (count := file.readinto(block[: min(size, len(block))])):
        hasher.update(block[:count])
        advance(count)
        size -= count
    return hasher.hexdigest()
