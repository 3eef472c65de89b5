"""Runs the controller as a child process of a launcher, and restarts it when it dies or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time

from moc.errors import with_code
from moc.runtime import child_processes
from moc.runtime.connections import format_address, listening_socket
from moc.runtime.controller import STEPPED_DOWN
from moc.runtime.controller_link import DependencyLostError
from moc.runtime.election import SilenceLimits
from moc.runtime.flags import LauncherFlags

_HEALTHY_S, _MAX_BACKOFF_S = 5.0, 10.0

_log = logging.getLogger("moc")


class ControllerProcess:
    """Asynchronous context manager that runs this node's controller candidate, and kills it on exit.

    Attributes:
        endpoints: addresses of all candidates; this candidate's address has its actual port.
    """

    def __init__(self, flags: LauncherFlags, token: bytes):
        self._flags, self._token = flags, token
        self._process: asyncio.subprocess.Process | None = None
        self._listener: socket.socket | None = None
        self.endpoints = list(flags.endpoints)

    async def __aenter__(self) -> ControllerProcess:
        return self

    async def __aexit__(self, *_) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._listener is not None:
            self._listener.close()

    @property
    def _address(self) -> str:
        return self.endpoints[self._flags.node_rank]

    @property
    def bound_address(self) -> str:
        """Numeric address of the listening socket, which needs no name service."""
        assert self._listener is not None  # it was opened
        return format_address(self._listener.family, self._listener.getsockname())

    async def start(self) -> None:
        """Starts the process.

        Raises:
            DependencyLostError: the process does not start.
            OSError: the address cannot be bound.
        """
        host = self._address.rpartition(":")[0]
        beyond_loopback = host not in ("127.0.0.1", "localhost", "[::1]")
        if self._listener is None:  # stays open in this process to reserve the port across restarts
            self._listener = await asyncio.to_thread(listening_socket, self._address, beyond_loopback)
            self.endpoints[self._flags.node_rank] = f"{host}:{self.bound_address.rpartition(':')[2]}"
        flags, descriptor = self._flags, self._listener.fileno()
        self._process = await child_processes.start_reporting(
            *("moc.runtime.controller", "--listen", self._address, "--listen-fd", str(descriptor)),
            *("--nnodes", f"{flags.min_nodes}:{flags.nnodes}", "--nproc-per-node", str(flags.nproc_per_node)),
            *("--spares", str(flags.spares), "--max-restarts", str(flags.max_restarts)),
            *("--max-standstill", str(flags.max_standstill)),
            *("--silence-timeout", str(flags.silence_timeout_s), "--max-wait", str(flags.max_wait_s)),
            *("--grow-wait", str(flags.grow_wait_s)),
            *("--candidate", f"{flags.node_rank}/{len(self.endpoints)}"),
            *(["--beyond-loopback"] if beyond_loopback else []),
            pass_fds=(descriptor,),
        )
        assert self._process.stdout is not None  # a pipe
        if not (await self._process.stdout.readline()).strip():
            raise DependencyLostError(
                f"the controller does not start at {self._address}. Fix: look at what it wrote above",
                code="controller-cannot-start",
            )

    async def run(self) -> None:
        """Restarts the controller when it dies or hangs, until the job is over.  Agents restore its state."""
        pause = 0.0
        while True:
            start = time.monotonic()
            reason = await self._wait_until_ended()
            if reason is None:
                return
            if reason:
                _log.warning("the controller %s: started again", reason)
            # back off if it dies repeatedly
            pause = 0.0 if time.monotonic() - start > _HEALTHY_S else min(_MAX_BACKOFF_S, 2 * pause + 0.1)
            await asyncio.sleep(pause if pause > 0.1 else 0)
            try:
                await self.start()
            except (DependencyLostError, OSError) as error:  # such as too many processes, for the moment
                _log.error("%s", with_code(error))

    async def _wait_until_ended(self) -> str | None:
        """Waits for the process to end; returns the reason, empty if it stepped down, or None if the job is over."""
        assert self._process is not None  # it was started
        hangs_s = SilenceLimits(self._flags.silence_timeout_s).controller_timeout_s
        address = self.bound_address
        reason = await child_processes.wait_or_kill(self._process, address, self._token, hangs_s / 2, hangs_s)
        code = self._process.returncode
        return None if code == 0 else "" if code == STEPPED_DOWN else reason
