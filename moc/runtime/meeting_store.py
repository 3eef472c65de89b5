"""The store over which the workers of a generation find each other, served by the controller over the wire.

Torch's own store answers whoever connects; this one is reached by processes that know the job's token.
:class:`~moc.runtime.meeting_client.MeetingClient` is the worker's side.
"""

from __future__ import annotations

import asyncio

from moc.runtime.async_connections import AsyncConnection
from moc.runtime.message import Message, WireError


class MeetingStore:
    """Values by key, of one generation at a time: the first worker of a newer one empties it.

    A connection begins with ``meets`` and its ``generation``, and belongs to it: it ends with the generation.  Then

    * ``set`` stores the body under ``key``, without an answer;
    * ``get`` waits until all ``keys`` are there, and answers ``values``: their ``sizes``, and the bodies in a row;
    * ``check`` answers ``there``: whether ``all`` of the ``keys`` are;
    * ``add`` adds ``amount`` to the number at ``key``, and answers its ``sum``;
    * ``delete`` answers whether there was a ``key``: ``was``.
    """

    def __init__(self):
        self._generation = -1
        self._values: dict[str, bytes] = {}
        self._awaited: dict[str, list[asyncio.Future]] = {}

    async def serve(self, connection: AsyncConnection, generation: int) -> None:
        """Answers a worker until it disconnects or its generation is over."""
        if not isinstance(generation, int):
            raise WireError(f"it meets in generation {generation!r}, which is no number")
        if generation > self._generation:
            self._begin(generation)
        while generation == self._generation:
            message = await connection.recv()
            if generation == self._generation and (answer := await self._answer(message)) is not None:
                await connection.send(answer)

    def _begin(self, generation: int) -> None:
        awaited = [one for those in self._awaited.values() for one in those]
        self._generation, self._values, self._awaited = generation, {}, {}
        for one in awaited:
            one.cancel()

    async def _answer(self, message: Message) -> Message | None:
        said, kind = message.header, message.kind
        if kind == "set":
            self._set(_text(said["key"]), bytes(message.body))
            return None
        if kind == "get":
            keys = _texts(said["keys"])
            for key in keys:
                await self._comes(key)
            values = [self._values[key] for key in keys]
            return Message({"kind": "values", "sizes": [len(value) for value in values]}, b"".join(values))
        if kind == "check":
            return Message({"kind": "there", "all": all(key in self._values for key in _texts(said["keys"]))})
        if kind == "add":
            key = _text(said["key"])
            try:
                total = int(self._values.get(key, b"0")) + int(said["amount"])
            except (TypeError, ValueError):
                raise WireError(f"it adds {said['amount']!r} to {key}: one of them is no number") from None
            self._set(key, b"%d" % total)
            return Message({"kind": "sum", "sum": total})
        if kind == "delete":
            return Message({"kind": "deleted", "was": self._values.pop(_text(said["key"]), None) is not None})
        raise WireError(f"it asks the store to {kind}, which it does not know")

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for one in self._awaited.pop(key, ()):
            if not one.done():
                one.set_result(None)

    async def _comes(self, key: str) -> None:
        while key not in self._values:
            one = asyncio.get_running_loop().create_future()
            self._awaited.setdefault(key, []).append(one)
            await one


def _text(key: object) -> str:
    if not isinstance(key, str):
        raise WireError(f"a key of the store is text, not {key!r}")
    return key


def _texts(keys: object) -> list[str]:
    if not isinstance(keys, list):
        raise WireError(f"the keys of the store are a list, not {keys!r}")
    return [_text(key) for key in keys]
