"""Represents agents at the controller."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from dataclasses import dataclass, field

from moc.runtime import async_connections as wire
from moc.runtime.control_state import ControlState
from moc.runtime.message import Message
from moc.runtime.orders import Worker
from moc.runtime.wire import WireError

_PROBE_S = 1.0


@dataclass(eq=False)
class Peer:
    """A connected agent."""

    node: int
    connection: wire.AsyncConnection
    hello: dict  # header of its first message
    workers: list[Worker]  # listed in that message
    state: ControlState | None  # its copy of an earlier controller's state
    heard: float  # time of its last message, by the controller's clock
    epoch: int  # epoch that it has promised
    asked: tuple[int, bool] | None = None  # epoch in which its promise was last requested, and ``sure``
    admitted: bool = False  # it belongs to the job; earlier messages are held
    held: collections.deque[Message] = field(default_factory=collections.deque)  # to be handled later
    knows_end: bool = False  # it has acknowledged the end of the job
    lost: bool = False  # it has itself reported its workers dead

    @classmethod
    def from_hello(cls, hello: dict, connection: wire.AsyncConnection, now: float) -> Peer:
        """Parses an agent's hello; raises WireError if it is malformed."""
        for name in ("generation", "asked", "instance", "called", "door", "free_in", "silent", "at"):
            hello[name]
        try:
            workers = [Worker(**worker) for worker in hello["workers"]]
            state = None if hello["state"] is None else ControlState(**hello["state"])
        except TypeError as error:
            raise WireError(f"its hello cannot be decoded ({error})") from None
        return cls(hello["node"], connection, hello, workers, state, now, hello["epoch"])

    @property
    def instance(self) -> str:
        """Id of its process, which a restart changes."""
        return self.hello["instance"]

    @property
    def called(self) -> str:
        """Name of its process, for messages."""
        return self.hello["called"]

    @property
    def door(self) -> str | None:
        """Address at which its process listens while it lives."""
        return self.hello["door"]


async def process_has_died(door: str) -> bool:
    """Returns whether a machine refuses connections to a process's address; without an answer, it may still live."""
    host, _, port = door.rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), _PROBE_S)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return False
