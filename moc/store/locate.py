"""Resolves an address to a storage location."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from moc.store.claims import Claim
from moc.store.errors import CheckpointError
from moc.store.objects import ObjectPlace
from moc.store.storage import LocalPlace, Storage

_URL = re.compile(r"^([a-z][a-z0-9+.-]*):/(/?)")


def place_of(address: str | Path, claim: Claim | None = None) -> Storage:
    """Returns the storage location of an address; nothing is read, written or connected to.

    Args:
        address: a directory (a path or ``file:///path``), or ``s3://bucket/prefix``, ``gs://bucket/prefix``, or, for
            tests, ``memory://prefix``, which lives in the process.
        claim: claim under which files are written.

    Raises:
        CheckpointError: the address is invalid, or its library is not installed.
    """
    address = str(address)
    match = _URL.match(address)
    if match is None:
        return LocalPlace(address, claim=claim)
    if not match[2]:  # pathlib turns s3:// into s3:/, which would become a directory
        raise CheckpointError(
            f"{address} is neither a path nor a URL. Fix: write two slashes, as in s3://bucket/prefix",
            code="address-invalid",
        )
    if match[1] != "file":
        return ObjectPlace(address, claim=claim)
    parts = urlsplit(address)
    if parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
        raise CheckpointError(
            f"{address} is not a directory of this machine. Fix: write file:///path, with three slashes",
            code="address-invalid",
        )
    return LocalPlace(unquote(parts.path), claim=claim)
