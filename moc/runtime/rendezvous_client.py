"""A worker's client of the rendezvous store (:mod:`moc.runtime.rendezvous_store`), as a ``Store`` for gloo and NCCL."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # public, but not in __all__

from moc.runtime.connections import HANDSHAKE_TIMEOUT_S, Connection, connect, retry_connect
from moc.runtime.protocol import Message, PeerGoneError
from moc.runtime.rendezvous_store import pack_values, unpack_values

_GRACE_S = 30.0
"""Seconds that the store may take to answer, in addition to a requested wait."""


class ValueTimeoutError(RuntimeError):
    """A value was not set in time."""


class RendezvousClient(Store):
    """The rendezvous store of one generation.

    torch calls the methods from any thread; the creator must keep this object while torch uses it.  After an error
    other than :class:`ValueTimeoutError` the connection is closed, and every method raises.

    Args:
        address: address of the controller.
        token: the job's secret.
        generation: number of the generation.
        timeout: default timeout of a wait.

    Raises:
        WireError: the controller cannot be reached.
    """

    def __init__(self, address: str, token: bytes, generation: int, timeout: timedelta):
        super().__init__()
        self.set_timeout(timeout)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._known: dict[str, bytes] = {}  # set or awaited here, and not read yet: most waits precede a get
        self._connection = _connect(address, token)
        self._connection.send(Message({"kind": "meets", "generation": generation}))

    def set(self, key: str, value: str | bytes) -> None:
        """Stores a value."""
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        """Returns a value once it is set."""
        return self._values([key], self._timeout, keep=False)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns several values once all are set."""
        return self._values(keys, self._timeout, keep=False)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Stores several values."""
        data = {k: v.encode() if isinstance(v, str) else bytes(v) for k, v in zip(keys, values, strict=True)}
        with self._lock:
            self._known |= data
            self._connection.send(pack_values("set", data))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch: two overloads
        """Waits until all keys are set."""
        self._values(keys, self._timeout if timeout is None else timeout, keep=True)

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys are set."""
        return self._request(Message({"kind": "check", "keys": list(keys)})).header["all"]

    def add(self, key: str, amount: int) -> int:
        """Adds to the number at a key; returns the sum."""
        return self._request(Message({"kind": "add", "key": key, "amount": amount})).header["sum"]

    def delete_key(self, key: str) -> bool:
        """Removes a key; returns whether it was set."""
        self._known.pop(key, None)
        return self._request(Message({"kind": "delete", "key": key})).header["was"]

    def has_extended_api(self) -> bool:
        """Returns whether one call can read several values."""
        return True

    def clone(self) -> Store:
        """Returns itself, since a connection serves all threads."""
        return self

    def close(self) -> None:
        """Closes the connection; waiting threads get a :class:`PeerGoneError`."""
        self._connection.close()

    def _values(self, keys: Sequence[str], timeout: timedelta, keep: bool) -> list[bytes]:
        missing = [key for key in keys if key not in self._known]
        if missing:
            seconds = timeout.total_seconds()
            answer = self._request(Message({"kind": "get", "keys": missing, "within": seconds}), seconds + _GRACE_S)
            if answer.kind == "late":
                raise ValueTimeoutError(f"{', '.join(answer.header['keys'])} did not arrive within {seconds:g} s")
            self._known |= unpack_values(answer.header, answer.body)
        return [self._known[key] if keep else self._known.pop(key) for key in keys]

    def _request(self, message: Message, seconds: float = _GRACE_S) -> Message:
        with self._lock:
            self._connection.send(message)
            try:
                return self._connection.recv(seconds)
            except TimeoutError:
                self._connection.close()  # a late answer would be taken for the answer to the next request
                raise PeerGoneError(f"the store has not answered within {seconds:g} s") from None


def _connect(address: str, token: bytes) -> Connection:
    """Connects, with retries: in a large job, the server drops connections if too many are in the handshake."""
    return retry_connect(lambda: connect(address, token), HANDSHAKE_TIMEOUT_S, except_cause=ConnectionRefusedError)
