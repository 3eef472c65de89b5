"""Rendezvous store of a generation's workers, served by the controller over the wire protocol.

Torch's own store answers any client; this one requires the job's token.
:class:`~moc.runtime.managed_job.RendezvousClient` is the worker's side.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from moc.runtime.async_connections import AsyncConnection
from moc.runtime.protocol import Message, WireError, check_key, check_keys, pack_values, unpack_values


class RendezvousStore:
    """Values by key, of one generation at a time; the first worker of a newer generation empties the store.

    A connection begins with ``meets`` and its ``generation``, and ends with that generation.  Its requests:

    * ``set`` stores values under ``keys``, with their ``sizes``, and the concatenated values as body.  No answer.
    * ``get`` waits until all ``keys`` are set, and answers ``values`` in the same format.  It adds values with the same
      key prefix, up to the last slash, that this connection has not received: gloo requests them next.  If ``keys``
      are missing after ``within`` seconds, it answers ``late`` with these ``keys``.
    * ``check`` answers ``there``, with ``all``: whether all ``keys`` are set.
    * ``add`` adds ``amount`` to the number at ``key``, and answers ``sum``.
    * ``delete`` removes ``key`` and answers ``deleted``, with ``was``: whether it was set.
    """

    def __init__(self):
        self._generation = -1
        self._values: dict[str, bytes] = {}
        self._keys_by_prefix: dict[str, set[str]] = defaultdict(set)  # keys by prefix
        self._waiting: dict[str, list[asyncio.Future]] = {}

    async def serve(self, connection: AsyncConnection, generation: int) -> None:
        """Serves a worker until it disconnects or its generation is over."""
        if not isinstance(generation, int):
            raise WireError(f"it meets in generation {generation!r}, which is no number")
        if generation > self._generation:
            self._start_generation(generation)
        sent_keys: set[str] = set()
        while generation == self._generation:
            message = await connection.recv()
            if generation == self._generation and (reply := await self._answer(message, sent_keys)) is not None:
                await connection.send(reply)

    def _start_generation(self, generation: int) -> None:
        futures = [future for waiting in self._waiting.values() for future in waiting]
        self._generation, self._values, self._waiting = generation, {}, {}
        self._keys_by_prefix.clear()
        for future in futures:
            future.cancel()

    async def _answer(self, message: Message, sent_keys: set[str]) -> Message | None:
        header, kind = message.header, message.kind
        if kind == "set":
            for key, value in unpack_values(header, message.body).items():
                self._set(key, value)
            return None
        if kind == "get":
            return await self._get(check_keys(header["keys"]), header["within"], sent_keys)
        if kind == "check":
            return Message({"kind": "there", "all": all(key in self._values for key in check_keys(header["keys"]))})
        if kind == "add":
            key = check_key(header["key"])
            try:
                total = int(self._values.get(key, b"0")) + int(header["amount"])
            except (TypeError, ValueError):
                raise WireError(f"it adds {header['amount']!r} to {key}: one of them is no number") from None
            self._set(key, b"%d" % total)
            return Message({"kind": "sum", "sum": total})
        if kind == "delete":
            return Message({"kind": "deleted", "was": self._values.pop(check_key(header["key"]), None) is not None})
        raise WireError(f"it asks the store to {kind}, which it does not know")

    async def _get(self, keys: list[str], timeout_s: float, sent_keys: set[str]) -> Message:
        if not isinstance(timeout_s, (int, float)):
            raise WireError(f"it waits {timeout_s!r} s, which is no number")
        try:
            if not self._values.keys() >= set(keys):
                await asyncio.wait_for(self._wait_until_set(keys), timeout_s)
        except TimeoutError:
            return Message({"kind": "late", "keys": [key for key in keys if key not in self._values]})
        values = {key: self._values[key] for key in keys}
        for prefix in {key.rpartition("/")[0] for key in keys}:
            values |= {
                key: self._values[key] for key in self._keys_by_prefix[prefix] - sent_keys if key in self._values
            }
        sent_keys |= values.keys()
        return pack_values("values", values)

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._keys_by_prefix[key.rpartition("/")[0]].add(key)
        for future in self._waiting.pop(key, ()):
            if not future.done():
                future.set_result(None)

    async def _wait_until_set(self, keys: list[str]) -> None:
        for key in keys:
            while key not in self._values:
                future = asyncio.get_running_loop().create_future()
                self._waiting.setdefault(key, []).append(future)
                await future
