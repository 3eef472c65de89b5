"""A worker's side of :mod:`moc.runtime.meeting_store`, as the ``Store`` that gloo and NCCL take."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # public, but not in __all__

from moc.runtime.connections import HANDSHAKE_SECONDS, Connection, connect, patiently
from moc.runtime.meeting_store import pack, unpack
from moc.runtime.message import Message
from moc.runtime.wire import PeerGoneError

_GRACE_S = 30.0
"""Seconds that the store may take to answer, beyond those for which it is asked to wait."""


class LateError(RuntimeError):
    """A value has not come in time."""


class MeetingClient(Store):
    """The store of one generation.

    torch calls the methods from any thread; who made this object must keep it for as long as torch uses it.  After an
    error other than :class:`LateError` the connection is closed, and every method raises.

    Args:
        address: of the controller.
        token: the job's secret.
        generation: its number.
        timeout: of a wait that has none of its own.

    Raises:
        WireError: the controller cannot be reached.
    """

    def __init__(self, address: str, token: bytes, generation: int, timeout: timedelta):
        super().__init__()
        self.set_timeout(timeout)
        self._timeout = timeout
        self._one_at_a_time = threading.Lock()
        self._known: dict[str, bytes] = {}  # set here or waited for, and not read yet: most waits precede a get
        self._connection = _connected(address, token)
        self._connection.send(Message({"kind": "meets", "generation": generation}))

    def set(self, key: str, value: str | bytes) -> None:
        """Stores a value."""
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        """A value, once it is there."""
        return self._values([key], self._timeout, keep=False)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Several values, once all are there."""
        return self._values(keys, self._timeout, keep=False)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Stores several values."""
        data = {k: v.encode() if isinstance(v, str) else bytes(v) for k, v in zip(keys, values, strict=True)}
        with self._one_at_a_time:
            self._known |= data
            self._connection.send(pack("set", data))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch: two overloads
        """Waits until all keys are there."""
        self._values(keys, self._timeout if timeout is None else timeout, keep=True)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self._ask(Message({"kind": "check", "keys": list(keys)})).header["all"]

    def add(self, key: str, amount: int) -> int:
        """Adds to the number at a key; returns the sum."""
        return self._ask(Message({"kind": "add", "key": key, "amount": amount})).header["sum"]

    def delete_key(self, key: str) -> bool:
        """Removes a key; returns whether it was there."""
        self._known.pop(key, None)
        return self._ask(Message({"kind": "delete", "key": key})).header["was"]

    def has_extended_api(self) -> bool:
        """Whether several values can be read at once."""
        return True

    def clone(self) -> Store:
        """Itself: a connection serves all threads."""
        return self

    def close(self) -> None:
        """Ends the connection; threads that wait get a :class:`PeerGoneError`."""
        self._connection.close()

    def _values(self, keys: Sequence[str], timeout: timedelta, keep: bool) -> list[bytes]:
        missing = [key for key in keys if key not in self._known]
        if missing:
            seconds = timeout.total_seconds()
            answer = self._ask(Message({"kind": "get", "keys": missing, "within": seconds}), seconds + _GRACE_S)
            if answer.kind == "late":
                raise LateError(f"{', '.join(answer.header['keys'])} did not come within {seconds:g} s")
            self._known |= unpack(answer.header, answer.body)
        return [self._known[key] if keep else self._known.pop(key) for key in keys]

    def _ask(self, question: Message, seconds: float = _GRACE_S) -> Message:
        with self._one_at_a_time:
            self._connection.send(question)
            try:
                return self._connection.recv(seconds)
            except TimeoutError:
                self._connection.close()  # the answer may still come, and would be taken for that to another question
                raise PeerGoneError(f"the store has not answered within {seconds:g} s") from None


def _connected(address: str, token: bytes) -> Connection:
    """Connects, again if all workers of a large job came at once and some had to make room for others."""
    return patiently(lambda: connect(address, token), HANDSHAKE_SECONDS, unless=ConnectionRefusedError)
