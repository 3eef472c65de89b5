"""Agents as the controller sees them."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from dataclasses import dataclass, field

from moc.runtime import async_connections as wire
from moc.runtime.control_state import ControlState
from moc.runtime.membership import Worker
from moc.runtime.message import Message
from moc.runtime.wire import WireError

_PROBE_S = 1.0


@dataclass(eq=False)
class Peer:
    """An agent that is connected.

    Attributes:
        node: its number.
        connection: to it.
        hello: what it has said first.
        workers: that it has, or had when it said so.
        state: what it has kept of an earlier controller's knowledge.
        heard: when it said something last, by the controller's clock.
        epoch: that it has promised.
        asked: in which epoch it was last asked for its promise.
        admitted: it is one of the job's nodes; what it says before that is held.
        held: what it has said that is to be heard later.
        knows_end: it has heard that the job is over.
        lost: it has said itself that its workers are dead.
    """

    node: int
    connection: wire.AsyncConnection
    hello: dict
    workers: list[Worker]
    state: ControlState | None
    heard: float
    epoch: int
    asked: int | None = None
    admitted: bool = False
    held: collections.deque[Message] = field(default_factory=collections.deque)
    knows_end: bool = False
    lost: bool = False

    @classmethod
    def from_hello(cls, hello: dict, connection: wire.AsyncConnection, now: float) -> Peer:
        """An agent that introduces itself.

        Raises:
            WireError: its hello cannot be understood.
        """
        for name in ("generation", "asked", "instance", "called", "door", "free_in", "silent", "at"):
            hello[name]
        try:
            workers = [Worker(**worker) for worker in hello["workers"]]
            state = ControlState.from_told(hello["state"])
        except TypeError as error:
            raise WireError(f"what its hello says cannot be understood ({error})") from None
        return cls(hello["node"], connection, hello, workers, state, now, hello["epoch"])

    @property
    def instance(self) -> str:
        """Of its process: one that is started again has another."""
        return self.hello["instance"]

    @property
    def called(self) -> str:
        """What to call its process in a message."""
        return self.hello["called"]

    @property
    def door(self) -> str | None:
        """Where its process listens as long as it lives."""
        return self.hello["door"]

    @property
    def free_in(self) -> float:
        """Seconds until it may promise something, when it came."""
        return self.hello["free_in"]

    @property
    def silent(self) -> float:
        """Seconds since it had heard of a controller that led, when it came."""
        return self.hello["silent"]


async def process_has_died(door: str) -> bool:
    """Whether the machine is there and says that nobody listens at a door; where nobody answers, that is not known."""
    host, _, port = door.rpartition(":")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), _PROBE_S)
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return False
