"""A message: a header that JSON knows, and raw bytes. Never a pickle."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

HEADER_LIMIT = 1 << 20
"""Bytes of a message's header, as JSON."""


class WireError(RuntimeError):
    """The peer broke a rule of the wire, or is no peer at all; the connection is of no more use."""


class _Header(dict):
    """One that arrived; what it should have and has not is the sender's mistake."""

    def __missing__(self, name: str):
        raise WireError(f"its message {self.get('kind')} does not say {name}")


@dataclass(frozen=True)
class Message:
    """What one process says to another.

    Attributes:
        header: values that JSON knows, and ``kind``, a string, among them. As in JSON, keys are strings and tuples
            arrive as lists; infinities and NaN are allowed.
        body: any contiguous buffer to send, which must not change meanwhile; where it arrives, a ``memoryview`` that
            can only be read.
    """

    header: dict
    body: bytes | bytearray | memoryview = field(default=b"", repr=False)

    @property
    def kind(self) -> str:
        """What this message is about."""
        return self.header["kind"]


def encode(header: dict) -> bytes:
    """A header as JSON.

    Raises:
        ValueError, TypeError: it is no header, is too large, or JSON does not know what is in it.
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
    """A header from JSON.

    Raises:
        ValueError: it is none.
    """
    try:
        header = json.loads(data.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise ValueError("it is not a dict with a string named kind")
    return _Header(header)


def flat(body) -> memoryview:
    """The bytes of any contiguous buffer, not copied.

    Raises:
        TypeError: it is not a buffer, or not contiguous.
    """
    view = memoryview(body)
    return view.cast("B") if view.nbytes else memoryview(b"")  # empty ones of other shapes cannot be cast
