"""Defines messages: a JSON header and raw bytes, never a pickle."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from moc.errors import UserError
from moc.files.decode import parse

HEADER_LIMIT = 1 << 20
"""Maximum bytes of a message's JSON header."""


class WireError(UserError, RuntimeError):
    """The peer violated the protocol, or does not use it; the connection is unusable."""

    code = "wire-protocol-violated"
    remedy = "install the same release on all nodes; report the message as an issue if they have the same"


class _Header(dict):
    """A received header; a missing key is the sender's error."""

    def __missing__(self, name: str):
        raise WireError(f"its message {self.get('kind')} does not say {name}")


@dataclass(frozen=True)
class Message:
    """A message between two processes.

    Attributes:
        header: JSON values, with a string ``kind`` among them. As in JSON, keys are strings and tuples arrive as lists;
            infinities and NaN are allowed.
        body: any contiguous buffer, which must not change while it is sent; it arrives as a read-only ``memoryview``.
    """

    header: dict
    body: bytes | bytearray | memoryview = field(default=b"", repr=False)

    @property
    def kind(self) -> str:
        """The kind of the message."""
        return self.header["kind"]


def encode(header: dict) -> bytes:
    """Encodes a header as JSON.

    Raises:
        ValueError, TypeError: it is no valid header, is too large, or has values that JSON cannot represent.
    """
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise ValueError("the header of a message is a dict with a string named kind")
    try:
        text = json.dumps(header, separators=(",", ":")).encode()
    except RecursionError:
        raise ValueError(f"{header['kind']}: the header is nested too deeply") from None
    if len(text) > HEADER_LIMIT:
        raise ValueError(
            f"{header['kind']}: a header of {len(text)} bytes is over the limit of {HEADER_LIMIT}: put data in the body"
        )
    return text


def decode(data: bytes) -> dict:
    """Decodes a header from JSON.

    Raises:
        ValueError: it is malformed.
    """
    header = parse(data)
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise ValueError("it is not a dict with a string named kind")
    return _Header(header)


def flat(body) -> memoryview:
    """Returns a byte view of any contiguous buffer, without a copy.

    Raises:
        TypeError: it is not a buffer, or not contiguous.
    """
    view = memoryview(body)
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty view of another shape cannot be cast
