"""Connects an agent to the controller: finds the leader, follows one candidate at a time, and renews the lease."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import secrets
import socket
import time
from collections.abc import Callable

from moc.errors import UserError, cause_of
from moc.runtime import async_connections as wire
from moc.runtime.addresses import interface_towards
from moc.runtime.child_processes import StoppedError
from moc.runtime.clocks import Lease, RunningClock
from moc.runtime.election import Allegiance, Times, lease_end
from moc.runtime.protocol import Message, PeerGoneError, WireError

_AGAIN_S = 0.1
_LOOK_S = 2.0


class LostError(UserError, RuntimeError):
    """Loss of a process or service that the node depends on."""


class NoControllerError(LostError):
    """Absence of a leading controller for longer than the patience."""

    code = "controller-missing"


class RefusedError(LostError):
    """Refusal of this agent by the controller, whose sentence includes a code."""


class GaveUpError(LostError):
    """Removal of the node from the job for a broken device; the controller's sentence includes a code."""


class ControllerLink:
    """Connection of an agent to the leading controller, in an event loop.

    Args:
        candidates: addresses of the controller candidates.
        token: the job's secret.
        times: silence limits.
        patience_s: seconds that a controller may be missing.
        begin_s: seconds within which a majority of the nodes must first join.
        lease: lease of this node's workers, to be renewed; None if there is no other node, so that it never ends.
        hello: returns the agent's hello and the messages to send after it, for each connection.
        obey: called with every order.

    Attributes:
        joined: whether a controller has admitted this node.
        over: whether the job is over, so that no controller is sought any more.
        follows: number of the current or last leading candidate.
        door: address of a port that is open while this process lives; None until it is opened.
        asked: stop signal that the node received, or None.
    """

    def __init__(
        self,
        candidates: list[str],
        token: bytes,
        times: Times,
        patience_s: float,
        begin_s: float,
        lease: Lease | None,
        hello: Callable[[], tuple[dict, list[dict]]],
        obey: Callable[[dict], None],
    ):
        self._candidates, self._token, self._times = candidates, token, times
        self._patience_s, self._begin_s = patience_s, begin_s
        self._lease, self._hello, self._obey = lease, hello, obey
        self._allegiance = Allegiance(len(candidates), times.promise_s, time.monotonic())
        self._connection: wire.AsyncConnection | None = None
        self._state: dict | None = None
        self._echo: float | None = None
        self._instance, self._called = secrets.token_hex(8), f"process {os.getpid()} of {socket.gethostname()}"
        self._turn = 0
        self._promised_here = self._is_led = False
        self._clock, self._led = RunningClock(most_s=2 * self._most_s), 0.0  # time of the last contact with a leader
        self.joined, self.over, self.follows, self.door = False, False, 0, None
        self.asked: int | None = None

    async def run(self) -> None:
        """Follows the leading controller until the job is over.

        Raises:
            NoControllerError: no candidate was reachable, or had a majority of the nodes, within the patience.
            RefusedError: the controller refused this node.
            StoppedError: the node was asked to stop before it had joined a controller.
            WireError: the peer does not belong to this job.
        """
        async with await self._open_door():
            while not self.over and (found := await self._find()):
                await self._follow(*found)

    def tell(self, kind: str, **what) -> None:
        """Sends a message to the controller if connected; otherwise the next hello carries the current state."""
        if self._connection is not None:
            with contextlib.suppress(WireError):
                self._connection.post(Message({"kind": kind} | what))

    def close(self) -> None:
        """Closes the connection once all messages are sent, and opens no other."""
        self.over = True
        if self._connection is not None:
            self._connection.close()

    async def _open_door(self) -> asyncio.Server | contextlib.AsyncExitStack:
        """Opens a port (*door*) that a disconnected controller probes to check whether this process lives."""
        while True:
            try:
                host = (await asyncio.to_thread(interface_towards, self._candidates[self._turn])).strip("[]")
                server = await asyncio.start_server(lambda _, writer: writer.close(), host, 0)
                break
            except OSError:  # the host may not resolve yet; if it never does, _find() reports it
                self._turn = (self._turn + 1) % len(self._candidates)
                if self._turn == 0:
                    return contextlib.AsyncExitStack()
        self._turn = 0
        host, port = server.sockets[0].getsockname()[:2]
        self.door = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return server

    async def _find(self) -> tuple[int, wire.AsyncConnection] | None:
        since = min(self._clock.now, self._gone_since) if self.joined else self._clock.now
        while not self.over:
            failed = ""
            count = len(self._candidates)
            for index in [(self._turn + further) % count for further in range(count)]:
                try:
                    connection = await wire.open(self._candidates[index], self._token, timeout=self._most_s)
                    self._turn = 0
                    return index, connection
                except PeerGoneError as error:
                    failed = failed or cause_of(error)
                    if isinstance(error.__cause__, ConnectionRefusedError):
                        self._allegiance.died(index)
                self._clock.tick()
            self._turn = 0
            if self.asked is not None and not self.joined:
                raise StoppedError(self.asked)
            most, limit = self._patience()
            if self._clock.now - since > most:
                raise NoControllerError(
                    f"no controller has been there for {most:g} s ({limit}): {failed}. Fix: start node 0, or correct "
                    "--rdzv-endpoint",
                    code="controller-missing",
                )
            await asyncio.sleep(_AGAIN_S)
        return None

    @property
    def _gone_since(self) -> float:
        """Start time of the patience, which begins after ``promise_s`` of silence."""
        return self._led + self._times.promise_s

    def _patience(self, found: bool = False) -> tuple[float, str]:
        """Returns the seconds that this node may be without a leader, and the flag that sets them.

        A candidate that is ``found`` but lacks a majority may have to wait for other nodes to join.
        """
        most, limit = self._patience_s, "--patience"
        if found and not self.joined:
            most, limit = self._begin_s, "--max-wait"
        if self.asked is not None and most > self._times.lease_s:
            most, limit = self._times.lease_s, "--silence-timeout"
        return most, limit

    @property
    def _most_s(self) -> float:
        return wire.HANDSHAKE_SECONDS if len(self._candidates) == 1 else min(2.0, self._times.promise_s / 2)

    async def _follow(self, index: int, connection: wire.AsyncConnection) -> None:
        """Follows a candidate until it disconnects or becomes silent, or another one leads."""
        begun, came, self._echo = time.monotonic(), self._clock.now, None
        self._promised_here = self._is_led = False
        hello, following = self._hello()
        who = {"instance": self._instance, "called": self._called, "door": self.door, "state": self._state}
        free_in, silent = self._allegiance.free_in(index, begun), begun - self._allegiance.heard
        vote = {"epoch": self._allegiance.epoch, "free_in": free_in, "silent": silent, "at": begun}
        beside = []
        try:
            await connection.send(Message({"kind": "hello"} | hello | who | vote))
            for message in following:
                connection.post(Message(message))
            self._connection = connection
            beside = [asyncio.create_task(self._say_alive(connection))]
            if len(self._candidates) > 1:
                beside.append(asyncio.create_task(self._look_around(index, connection)))
            while not self.over:
                said = (await connection.recv(silence=self._times.promise_s)).header
                self._clock.tick()
                self._hear(index, said)
                self._see_whether_led(came)
        except PeerGoneError:
            pass  # training continues: the candidate may be restarted, or another may lead
        except TimeoutError:
            self._turn = (index + 1) % len(self._candidates)  # tried last, since it may only be paused
        finally:
            self._connection = None
            for task in beside:
                task.cancel()
            connection.abort()

    def _see_whether_led(self, came: float) -> None:
        """Raises NoControllerError if no candidate has led within the patience; StoppedError if asked to stop.

        Args:
            came: opening time of the connection to this candidate.
        """
        if self._is_led:
            self._led = self._clock.now
            return
        most, limit = self._patience(found=True)
        if self._clock.now - self._gone_since <= most or self._clock.now - came <= self._times.promise_s:
            return
        if self.asked is not None and not self.joined:
            raise StoppedError(self.asked)
        why = "others are lost, or this node is cut off" if self.joined else "others have not come"
        raise NoControllerError(
            f"no controller has had a majority of the nodes for {most:g} s ({limit}): {why}. Fix: start the other "
            "nodes, or repair the network",
            code="controller-without-majority",
        )

    def _hear(self, index: int, said: dict) -> None:
        now, kind = time.monotonic(), said["kind"]
        if kind == "beat":
            self._is_led = said["leads"] and self._promised_here
            self._echo = said["sent"]
            if self._is_led:
                self.follows = index
                self._allegiance.beat(now)
                self._renew(lease_end(said["at"], said["age"], self._times.runs_s))
        elif kind == "elect":
            free_in = self._allegiance.asked(said["epoch"], said["sure"], now)
            self._promised_here = self._promised_here or free_in is not None
            self.tell("promise", epoch=self._allegiance.epoch, free_in=free_in or 0.0)
        elif kind == "refused":
            raise RefusedError(said["why"])
        elif kind == "state":
            self._state = {name: value for name, value in said.items() if name != "kind"}
            if not self.joined:  # the patience starts with the first admission
                self._led = self._clock.now
            self._promised_here = self.joined = True
        else:
            self._obey(said)

    def _renew(self, end: float) -> None:
        if self._lease is not None:
            before = self._lease.end
            self._lease.end = end if math.isinf(before) else max(before, end)

    async def _say_alive(self, connection: wire.AsyncConnection) -> None:
        while True:
            with contextlib.suppress(WireError):
                connection.post(Message({"kind": "alive", "at": time.monotonic(), "echo": self._echo}))
            await asyncio.sleep(self._times.says_s)

    async def _look_around(self, index: int, connection: wire.AsyncConnection) -> None:
        """Searches the other candidates for a leader; without one, prefers the lowest reachable index."""
        came, stays = time.monotonic(), self._times.lease_s * (1 + random.random())
        while True:
            await asyncio.sleep(min(_LOOK_S, self._times.promise_s / 4))
            if self._is_led:
                came = time.monotonic()
                continue
            others = {other: await self._leads(other) for other in range(len(self._candidates)) if other != index}
            better = [other for other, leads in others.items() if leads]
            better += [other for other, leads in others.items() if leads is not None and other < index]
            if not better and time.monotonic() - came > stays:  # other nodes may reach different candidates
                better = [(index + 1) % len(self._candidates)]
            if better:
                self._turn = better[0]
                connection.abort()
                return

    async def _leads(self, index: int) -> bool | None:
        """Returns whether a candidate leads; None if unreachable."""
        try:
            return bool((await wire.ask(self._candidates[index], self._token, self._most_s))["leads"])
        except (WireError, TimeoutError) as error:
            if isinstance(error.__cause__, ConnectionRefusedError):
                self._allegiance.died(index)
            return None
