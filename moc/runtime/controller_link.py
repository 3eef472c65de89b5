"""Connects an agent to the controller: finds the leader, renews the lease, and requests a planned departure."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import secrets
import socket
import time
from collections.abc import Callable

from moc.errors import UserError, cause_of
from moc.runtime import async_connections
from moc.runtime.child_processes import StoppedError
from moc.runtime.connections import local_address_towards
from moc.runtime.election import Follower, SilenceLimits, lease_end
from moc.runtime.progress import Lease, RunningClock
from moc.runtime.protocol import Message, PeerGoneError, WireError

_RETRY_S = 0.1
_FIRST_SEARCH_S, _SEARCH_INTERVAL_S = 0.2, 2.0

_log = logging.getLogger("moc")

DUPLICATE_S = 2.0
"""Seconds from the first SIGTERM within which others are the same request: Slurm and a template may both send one."""


class DependencyLostError(UserError, RuntimeError):
    """Loss of a process or service that the node depends on."""


class NoControllerError(DependencyLostError):
    """Absence of a leading controller for longer than the patience."""

    code = "controller-missing"


class NodeRefusedError(DependencyLostError):
    """Refusal of this agent by the controller, whose sentence includes a code."""


class NodeRemovedError(DependencyLostError):
    """Removal of the node from the job for a broken device; the controller's sentence includes a code."""


class ControllerLink:
    """Connection of an agent to the leading controller, in an event loop.

    Args:
        candidates: addresses of the controller candidates.
        token: the job's secret.
        times: silence limits.
        patience_s: seconds that a controller may be missing.
        join_timeout_s: seconds within which a majority of the nodes must first join.
        lease: lease of this node's workers, to be renewed; None if there is no other node, so that it never ends.
        make_hello: returns the agent's hello and the messages to send after it, for each connection.
        execute: called with every order.

    Attributes:
        is_admitted: whether a controller has admitted this node.
        is_closed: whether the job is over, so that no controller is sought any more.
        leader: number of the current or last leading candidate.
        liveness_address: address of a port that is open while this process lives; None until it is opened.
        stop_signal: stop signal that the node received, or None.
    """

    def __init__(
        self,
        candidates: list[str],
        token: bytes,
        times: SilenceLimits,
        patience_s: float,
        join_timeout_s: float,
        lease: Lease | None,
        make_hello: Callable[[], tuple[dict, list[dict]]],
        execute: Callable[[dict], None],
    ):
        self._candidates, self._token, self._times = candidates, token, times
        self._patience_s, self._join_timeout_s = patience_s, join_timeout_s
        self._lease, self._make_hello, self._execute = lease, make_hello, execute
        self._follower = Follower(len(candidates), times.promise_s, time.monotonic())
        self._connection: async_connections.AsyncConnection | None = None
        self._state: dict | None = None
        self._echo: float | None = None
        self._instance, self._process_name = secrets.token_hex(8), f"process {os.getpid()} of {socket.gethostname()}"
        self._next_index = 0
        self._has_promised = self._is_led = False
        self._free_in = 0.0  # value in the last hello
        self._clock, self._led_at = (
            RunningClock(max_step_s=2 * self._request_timeout_s),
            0.0,
        )  # time of the last contact with a leader
        self._unanswered_since = math.inf  # start of the search for a candidate that sends a message
        self.is_admitted, self.is_closed, self.leader, self.liveness_address = False, False, 0, None
        self.stop_signal: int | None = None

    async def run(self) -> None:
        """Follows the leading controller until the job is over.

        Raises:
            NoControllerError: no candidate was reachable, or had a majority of the nodes, within the patience.
            NodeRefusedError: the controller refused this node.
            StoppedError: the node was asked to stop before it had joined a controller.
            WireError: the peer does not belong to this job, and no controller has admitted this node.
        """
        async with await self._open_liveness_port():
            while not self.is_closed and (candidate := await self._connect_to_candidate()):
                if (failed := await self._follow(*candidate)) is not None and not self.is_closed:
                    await self._pause(failed)

    @property
    def state(self) -> dict | None:
        """Newest :class:`~moc.runtime.controller.ControlState` that a controller sent, as a dictionary."""
        return self._state

    def send(self, kind: str, **fields) -> None:
        """Sends a message to the controller if connected; otherwise the next hello carries the current state."""
        if self._connection is not None:
            with contextlib.suppress(WireError):
                self._connection.post(Message({"kind": kind} | fields))

    def close(self) -> None:
        """Closes the connection once all messages are sent, and opens no other."""
        self.is_closed = True
        if self._connection is not None:
            self._connection.close()

    async def _open_liveness_port(self) -> asyncio.Server | contextlib.AsyncExitStack:
        """Opens a port (*door*) that a disconnected controller probes to check whether this process lives."""
        while True:
            try:
                host = (await asyncio.to_thread(local_address_towards, self._candidates[self._next_index])).strip("[]")
                server = await asyncio.start_server(lambda _, writer: writer.close(), host, 0)
                break
            except OSError:  # the host may not resolve yet; if it never does, _find() reports it
                self._next_index = (self._next_index + 1) % len(self._candidates)
                if self._next_index == 0:
                    return contextlib.AsyncExitStack()
        self._next_index = 0
        host, port = server.sockets[0].getsockname()[:2]
        self.liveness_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return server

    async def _connect_to_candidate(self) -> tuple[int, async_connections.AsyncConnection] | None:
        self._unanswered_since = min(self._unanswered_since, self._clock.now)
        while not self.is_closed:
            failed = ""
            count = len(self._candidates)
            for index in [(self._next_index + further) % count for further in range(count)]:
                try:
                    connection = await async_connections.open_connection(
                        self._candidates[index], self._token, timeout=self._request_timeout_s
                    )
                    self._next_index = 0
                    return index, connection
                except WireError as error:
                    self._refuse_foreign_peer(error)
                    failed = failed or cause_of(error)
                    if isinstance(error.__cause__, ConnectionRefusedError):
                        self._follower.record_death(index)
                self._clock.tick()
            self._next_index = 0
            await self._pause(failed)
        return None

    def _refuse_foreign_peer(self, error: WireError) -> None:
        """Raises an error of the protocol before this node is admitted, when the user can correct flags or token.

        Afterwards a peer that does not belong to the job is like an absent one: its port may be another program's now.
        """
        if not (self.is_admitted or isinstance(error, PeerGoneError)):
            raise error

    async def _pause(self, failed: str) -> None:
        """Waits until the next attempt; raises StoppedError or NoControllerError if there shall be none."""
        self._clock.tick()
        if self.stop_signal is not None and not self.is_admitted:
            raise StoppedError(self.stop_signal)
        since = min(self._unanswered_since, self._patience_start if self.is_admitted else math.inf)
        seconds, limit = self._patience()
        if self._clock.now - since > seconds:
            raise NoControllerError(
                f"no controller was reachable for {seconds:g} s ({limit}): {failed}. Fix: start node 0, or correct "
                "--rdzv-endpoint",
                code="controller-missing",
            )
        await asyncio.sleep(_RETRY_S)

    @property
    def _patience_start(self) -> float:
        """Start time of the patience, which begins after ``promise_s`` of silence."""
        return self._led_at + self._times.promise_s

    def _patience(self, is_connected: bool = False) -> tuple[float, str]:
        """Returns the seconds that this node may be without a leader, and the flag that sets them.

        A candidate that is ``is_connected`` but lacks a majority may have to wait for other nodes to join.
        """
        seconds, limit = self._patience_s, "--patience"
        if is_connected and not self.is_admitted:
            seconds, limit = self._join_timeout_s, "--max-wait"
        if self.stop_signal is not None and seconds > self._times.lease_s:
            seconds, limit = self._times.lease_s, "--silence-timeout"
        return seconds, limit

    @property
    def _request_timeout_s(self) -> float:
        return (
            async_connections.HANDSHAKE_TIMEOUT_S if len(self._candidates) == 1 else min(2.0, self._times.promise_s / 2)
        )

    async def _follow(self, index: int, connection: async_connections.AsyncConnection) -> str | None:
        """Follows a candidate until it disconnects or becomes silent, or another one leads.

        Returns:
            The reason to wait before the next attempt, if the candidate has sent no message or a malformed one.
        """
        start, connected_at, self._echo = time.monotonic(), self._clock.now, None
        self._has_promised = self._is_led = False
        hello, unsent = self._make_hello()
        identity = {
            "instance": self._instance,
            "called": self._process_name,
            "door": self.liveness_address,
            "state": self._state,
        }
        free_in, silent = self._follower.free_in(index, start), start - self._follower.last_contact
        self._free_in = free_in
        election_state = {"epoch": self._follower.epoch, "free_in": free_in, "silent": silent, "at": start}
        background = []
        try:
            await connection.send(Message({"kind": "hello"} | hello | identity | election_state))
            for message in unsent:
                connection.post(Message(message))
            self._connection = connection
            background = [asyncio.create_task(self._send_heartbeats(connection))]
            if len(self._candidates) > 1:
                background.append(asyncio.create_task(self._search_leader(index, connection)))
            while not self.is_closed:
                message = (await connection.recv(silence_s=self._times.promise_s)).header
                self._clock.tick()
                self._unanswered_since = math.inf
                self._handle(index, message)
                self._check_leadership(connected_at)
        except PeerGoneError as error:  # training continues: the candidate may be restarted, or another may lead
            return None if math.isinf(self._unanswered_since) else cause_of(error)
        except WireError as error:
            self._refuse_foreign_peer(error)
            _log.warning("this node connects to its controller again: %s", cause_of(error))
            return cause_of(error)
        except TimeoutError:
            self._next_index = (index + 1) % len(self._candidates)  # tried last, since it may only be paused
        finally:
            self._connection = None
            for task in background:
                task.cancel()
            connection.abort()
        return None

    def _check_leadership(self, connected_at: float) -> None:
        """Raises NoControllerError if no candidate has led within the patience; StoppedError if asked to stop.

        Args:
            connected_at: opening time of the connection to this candidate.
        """
        if self._is_led:
            self._led_at = self._clock.now
            return
        seconds, limit = self._patience(is_connected=True)
        if self._clock.now - self._patience_start <= seconds or self._clock.now - connected_at <= self._times.promise_s:
            return
        if self.stop_signal is not None and not self.is_admitted:
            raise StoppedError(self.stop_signal)
        cause = "others are lost, or this node is cut off" if self.is_admitted else "others have not connected"
        raise NoControllerError(
            f"no controller has had a majority of the nodes for {seconds:g} s ({limit}): {cause}. Fix: start the other "
            "nodes, or repair the network",
            code="controller-without-majority",
        )

    def _handle(self, index: int, message: dict) -> None:
        now, kind = time.monotonic(), message["kind"]
        if kind == "beat":
            self._is_led = message["leads"] and self._has_promised
            self._echo = message["sent"]
            if self._is_led:
                self.leader = index
                self._follower.record_heartbeat_reply(now)
                self._renew_lease(lease_end(message["at"], message["age"], self._times.worker_limit_s))
        elif kind == "elect":
            free_in = self._follower.handle_request(message["epoch"], message["sure"], now)
            self._has_promised = self._has_promised or free_in is not None
            self.send("promise", epoch=self._follower.epoch, free_in=free_in or 0.0)
        elif kind == "refused":
            raise NodeRefusedError(message["why"])
        elif kind == "state":
            self._state = {name: value for name, value in message.items() if name != "kind"}
            if not self.is_admitted:  # the patience starts with the first admission
                self._led_at = self._clock.now
                self._follower.record_admission()
            self._has_promised = self.is_admitted = True
        else:
            self._execute(message)

    def _renew_lease(self, end: float) -> None:
        if self._lease is not None:
            before = self._lease.end
            self._lease.end = end if math.isinf(before) else max(before, end)

    async def _send_heartbeats(self, connection: async_connections.AsyncConnection) -> None:
        while True:
            with contextlib.suppress(WireError):
                connection.post(Message({"kind": "alive", "at": time.monotonic(), "echo": self._echo}))
            await asyncio.sleep(self._times.heartbeat_interval_s)

    async def _search_leader(self, index: int, connection: async_connections.AsyncConnection) -> None:
        """Searches the other candidates for a leader; without one, prefers the lowest reachable index.

        A candidate that has died may still have been reachable when this agent connected, through its launcher.  Once
        its port refuses connections, this agent reconnects and reports that it is free.
        """
        led_at, patience_s = time.monotonic(), self._times.lease_s * (1 + random.random())
        pause_s = _FIRST_SEARCH_S
        while True:
            await asyncio.sleep(min(pause_s, self._times.promise_s / 4))
            pause_s = min(2 * pause_s, _SEARCH_INTERVAL_S)
            if self._is_led:
                led_at = time.monotonic()
                continue
            state = self._state
            leads_by_candidate = {
                candidate: await self._is_leading(candidate)
                for candidate in range(len(self._candidates))
                if candidate != index
            }
            if self._is_led or self._state is not state:  # this candidate has admitted the node meanwhile
                continue
            preferred = [candidate for candidate, leads in leads_by_candidate.items() if leads]
            preferred += [
                candidate for candidate, leads in leads_by_candidate.items() if leads is not None and candidate < index
            ]
            if not preferred and time.monotonic() - led_at > patience_s:  # other nodes may reach different candidates
                preferred = [(index + 1) % len(self._candidates)]
            if not preferred and self._free_in > 0 and self._follower.free_in(index, time.monotonic()) == 0:
                preferred = [index]
            if preferred:
                self._next_index = preferred[0]
                connection.abort()
                return

    async def _is_leading(self, index: int) -> bool | None:
        """Returns whether a candidate leads; None if unreachable."""
        try:
            return bool(
                (await async_connections.check_health(self._candidates[index], self._token, self._request_timeout_s))[
                    "leads"
                ]
            )
        except (WireError, TimeoutError) as error:
            if isinstance(error.__cause__, ConnectionRefusedError):
                self._follower.record_death(index)
            return None


class DepartureError(NodeRemovedError):
    """End of a departing node before its state was moved."""


class Departure:
    """Request of one node to leave, its deadline, and the effect of further signals.

    Args:
        drain_s: seconds until the node ends in any case; 0 if SIGTERM stops the job.
        request: sends the request to the controller.
        end: ends the node, with the reason as a clause.

    Attributes:
        is_requested: whether the node waits for its release.
    """

    def __init__(self, drain_s: float, request: Callable[[], object], end: Callable[[str], object]):
        self._drain_s, self._request, self._end = drain_s, request, end
        self._requested_at = 0.0
        self._deadline: asyncio.TimerHandle | None = None
        self._is_refused = False
        self.is_requested = False

    def handle_signal(self) -> bool:
        """Handles a SIGTERM; returns False if it stops the job, as other signals do."""
        if not self._drain_s or self._is_refused:
            return False
        now = time.monotonic()
        if not self.is_requested:
            self.is_requested, self._requested_at = True, now
            self._deadline = asyncio.get_running_loop().call_later(self._drain_s, self._expire)
            self._request()
        elif now - self._requested_at >= DUPLICATE_S:
            self._end("has received another SIGTERM")
        return True

    def refuse(self) -> None:
        """Handles the controller's refusal: from now on, SIGTERM stops the job."""
        self._is_refused = True
        self.close()

    def close(self) -> None:
        """Cancels the deadline."""
        self.is_requested = False
        if self._deadline is not None:
            self._deadline.cancel()

    def _expire(self) -> None:
        self._end(f"has not been released for {self._drain_s:g} s (--drain-seconds)")
