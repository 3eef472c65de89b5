"""The hash by which everything that is stored is compared when it is read."""

from __future__ import annotations

import xxhash


def digest_of(data) -> str:
    """xxh3-128 of a buffer, in hex."""
    return xxhash.xxh3_128_hexdigest(data)
