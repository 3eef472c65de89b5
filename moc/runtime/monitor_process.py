"""Runs the monitor as a child process of a launcher, and sends it the state of this node.

The monitor serves metrics and page, and runs the hook of events.  Training does not depend on it: the launcher writes
one line per second into a pipe, and drops it if the monitor does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from moc.errors import warning
from moc.files.event_log import EVENTS_FILE
from moc.files.safe_directory import remove_owned
from moc.runtime import child_processes, environment, protocol
from moc.runtime.connections import is_loopback
from moc.runtime.flags import MonitorFlags

TOKEN_VARIABLE = "MOC_MONITOR_TOKEN"
"""Environment variable: the token that readers of metrics and page need, unless the address is on loopback."""

DIRECTORY_PREFIX, PAGE_FILE = "moc-monitor-", "page"
"""Prefix of the names of monitors' directories in the directory for temporary files, and the file with a page's URL."""

CANNOT_SERVE = 3
"""Exit code of a monitor that has reported why it cannot work; it is not started again."""

_INTERVAL_S = 1.0
_MAX_UNREAD = 1 << 20  # bytes in the pipe's buffer after which lines are dropped
_MAX_BACKOFF_S = 60.0
END_S = 5.0
"""Seconds for the last events and their hook, at the end of a job."""

_log = logging.getLogger("moc")


def serve_events(directory: str | Path, flags: MonitorFlags) -> subprocess.Popen:
    """Starts a process that serves page and metrics of an event file until this process ends.

    For a job without a launcher of ours: members of the job and workers of the node are not shown.

    Args:
        directory: directory of the event file, which need not exist yet.
        flags: ports and address.

    Raises:
        OSError: no process can be started.
    """
    arguments = [str(Path(directory, EVENTS_FILE)), *_flag_arguments(flags, {})]
    return subprocess.Popen(
        child_processes.module_command("moc.monitor.server", *arguments, parent=os.getpid()),
        env=os.environ | {child_processes.PARENT: str(os.getpid())},
        stdout=child_processes.STDERR,
    )


def _flag_arguments(flags: MonitorFlags, extra: dict[str, object]) -> list[str]:
    values = {
        "--address": flags.address,
        "--metrics-port": flags.metrics_port,
        "--dashboard-port": flags.dashboard_port,
        "--on-event": flags.on_event,
    } | extra
    return [argument for name, value in values.items() if value is not None for argument in (name, str(value))]


class MonitorProcess:
    """Asynchronous context manager that runs this node's monitor, and ends it on exit.

    Attributes:
        describe: returns the state of the node's agent (:meth:`moc.runtime.agent.Agent.describe`); None without one.
    """

    def __init__(self, flags: MonitorFlags):
        self._flags, self._new_token = flags, ""
        self.describe: Callable[[], dict] | None = None
        self._directory: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task | None = None
        self._sent: tuple | None = None  # version of the controller's state that the process has

    @property
    def events_file(self) -> Path | None:
        """The event file of the run; None without a monitor, and before a worker has opened it."""
        with contextlib.suppress(OSError):
            return None if self._directory is None else Path(os.readlink(self._directory / environment.EVENTS_LINK))
        return None

    async def __aenter__(self) -> MonitorProcess:
        if self._flags.is_enabled:
            try:
                self._directory = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX))
            except OSError as error:
                _log.warning(
                    "%s",
                    warning(
                        f"there is no monitor, since no directory can be made in {tempfile.gettempdir()} "
                        f"({error.strerror}). Fix: make room there, or set TMPDIR",
                        code="output-not-writable",
                    ),
                )
                return self
            os.environ[environment.MONITOR] = str(self._directory)  # for workers, also those of spares
            if not is_loopback(self._flags.address) and TOKEN_VARIABLE not in os.environ:
                self._new_token = secrets.token_urlsafe(24)
            self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_) -> None:
        if self._task is not None:
            if self._process is not None and self._process.returncode is None:
                self._feed()  # the end of the job
                assert self._process.stdin is not None  # a pipe
                self._process.stdin.close()  # the process reads the last events, and ends
                await asyncio.wait([self._task], timeout=END_S)
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._directory is not None:
            with contextlib.suppress(OSError):
                remove_owned(self._directory)

    async def _run(self) -> None:
        """Runs the process, again when it dies, until it ends with the pipe."""
        pause_s, since = 1.0, time.time()
        while True:
            start = time.monotonic()
            try:
                job_secrets = protocol.TOKEN_VARIABLE, protocol.TOKEN_FILE_VARIABLE  # which the hook must not have
                variables = {name: value for name, value in os.environ.items() if name not in job_secrets}
                variables |= {TOKEN_VARIABLE: self._new_token} if self._new_token else {}
                self._process = await child_processes.start(
                    "moc.monitor.server",
                    *self._arguments(since),
                    env=variables,
                    stdin=subprocess.PIPE,
                    stdout=child_processes.STDERR,
                )
                code = await self._feed_until_ended(self._process)
            except OSError as error:
                code = str(error)
            if code in (0, CANNOT_SERVE):
                return
            _log.warning(
                "%s",
                warning(
                    f"the monitor has ended ({code}), and starts again. Fix: look at what it wrote above",
                    code="monitor-lost",
                ),
            )
            pause_s = 1.0 if time.monotonic() - start > _MAX_BACKOFF_S else min(_MAX_BACKOFF_S, 2 * pause_s)
            await asyncio.sleep(pause_s)
            since = time.time()

    def _arguments(self, since: float) -> list[str]:
        arguments = _flag_arguments(self._flags, {"--directory": self._directory, "--since": since})
        return [*arguments, *(["--prints-token"] if self._new_token else [])]

    async def _feed_until_ended(self, process: asyncio.subprocess.Process) -> int:
        self._sent = None
        exit_task = asyncio.create_task(process.wait())
        while not (await asyncio.wait([exit_task], timeout=_INTERVAL_S))[0]:
            self._feed()
        return exit_task.result()

    def _feed(self) -> None:
        """Sends the state of the node; without the controller's state, if the process has it already."""
        pipe = None if self._process is None else self._process.stdin
        if pipe is None or pipe.is_closing() or self.describe is None:
            return
        if pipe.transport.get_write_buffer_size() > _MAX_UNREAD:
            return
        state = self.describe()
        control = state["control"]
        version = None if control is None else (control["epoch"], control["version"])
        if version is None or version == self._sent:
            state = {name: value for name, value in state.items() if name != "control"}
        self._sent = version or self._sent
        with contextlib.suppress(OSError):
            pipe.write(json.dumps(state).encode() + b"\n")
