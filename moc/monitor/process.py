"""Follows the event file of a run and the state of its job, and runs the hook of events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import psutil

from moc.errors import cause_of, warning
from moc.files.decode import parse
from moc.files.event_log import Event, EventFollower
from moc.monitor.job_view import JobView
from moc.report.run_state import FREQUENT_TYPES, RunFold, RunState
from moc.runtime.termination import STOP_SIGNALS

POLL_S = 0.25
"""Seconds between two reads of the event file."""

_HOOK_TIMEOUT_S = 60.0
_MAX_WAITING = 1000  # events for the hook

_log = logging.getLogger("moc")


def node_memory() -> dict[str, int]:
    """Returns the total and the available host memory of this machine, in bytes."""
    memory = psutil.virtual_memory()
    return {"total": int(memory.total), "available": int(memory.available)}


class FollowedRun:
    """State of the run whose event file a link names, updated by :meth:`poll`.

    Attributes:
        version: increases with each change.
        events: number of events so far.
    """

    def __init__(self):
        self.version = self.events = 0
        self._follower: EventFollower | None = None
        self._fold, self._state = RunFold(keeps_events=False), None

    @property
    def skipped(self) -> int:
        """Number of lines so far that are not events."""
        return 0 if self._follower is None else self._follower.skipped

    @property
    def state(self) -> RunState:
        """State after all events that were read."""
        if self._state is None:
            self._state = self._fold.snapshot()
        return self._state

    def poll(self, path: Path | None) -> list[Event]:
        """Reads the next events of a file; begins again if another file has taken its place."""
        if path is None:
            return []
        if self._follower is None or self._follower.path != path:
            self._follower = EventFollower(path)
            self._reset()
        try:
            events = self._follower.read()
        except OSError:  # not written yet, or storage is away for a while
            return []
        if events is None:
            self._reset()
            return []
        accepted = [event for event in events if self._add(event)]
        self._changed(len(accepted))
        return accepted

    def _add(self, event: Event) -> bool:
        try:
            self._fold.add(event)
        except ValueError:
            return False
        return True

    def _reset(self) -> None:
        self._fold, self.events = RunFold(keeps_events=False), 0
        self._changed(1)
        self.events = 0

    def _changed(self, count: int) -> None:
        if count:
            self.version, self.events, self._state = self.version + 1, self.events + count, None


class EventHook:
    """Runs a shell command with each event, one at a time; events that wait too long are dropped and counted.

    Args:
        command: shell command, which reads the event as JSON from its standard input and its type from ``MOC_EVENT``;
            None to do nothing.
        since: earlier events, in Unix seconds, are not passed.

    Attributes:
        results: number of commands that ended well (``done``) or badly (``failed``), and of events ``dropped``.
    """

    def __init__(self, command: str | None, since: float):
        self._command, self._since = command, since
        self._waiting: deque[Event] = deque()
        self.results: Counter[str] = Counter(done=0, failed=0, dropped=0)

    def pass_on(self, events: list[Event]) -> None:
        """Queues events, except of types that occur in each iteration."""
        for event in events if self._command else ():
            if event["type"] not in FREQUENT_TYPES and event["time"] >= self._since:
                if len(self._waiting) < _MAX_WAITING:
                    self._waiting.append(event)
                else:
                    self.results["dropped"] += 1

    async def run_waiting(self) -> None:
        """Runs the command with each event that waits."""
        while self._waiting:
            self.results[await self._run(self._waiting.popleft())] += 1

    async def _run(self, event: Event) -> str:
        try:
            code = await self._exit_code(event)
        except (OSError, ValueError) as error:  # no process, or a foreign type that no environment can have
            code = cause_of(error)
        if code:
            _log.warning(
                "%s",
                warning(
                    f"--on-event ended with {code} for the event {event['type']}. Fix: correct the command",
                    code="hook-failed",
                ),
            )
        return "failed" if code else "done"

    async def _exit_code(self, event: Event) -> int | None:
        assert self._command is not None  # no event waits without one
        process = await asyncio.create_subprocess_shell(
            self._command,
            stdin=subprocess.PIPE,
            stdout=2,
            env=os.environ | {"MOC_EVENT": str(event["type"])},
            start_new_session=True,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS),  # blocked by the launcher
        )
        try:
            await asyncio.wait_for(process.communicate(json.dumps(event).encode()), _HOOK_TIMEOUT_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            await process.wait()
        return process.returncode


class Monitor:
    """State known to one node's monitor.

    Args:
        find_file: returns the path of the event file; raises OSError while there is none.
        hook: hook of events.

    Attributes:
        run: state of the run.
        job: state of the job at this node.
        has_ended: whether the launcher has closed the pipe.
    """

    def __init__(self, find_file: Callable[[], Path], hook: EventHook):
        self.run, self.job, self.hook = FollowedRun(), JobView(), hook
        self._find_file, self._path = find_file, None
        self.has_ended = self._has_read_all = False

    async def follow_events(self) -> None:
        """Reads events until the launcher ends."""
        while not self._has_read_all:
            self._has_read_all = self.has_ended  # reads the events written before the end
            with contextlib.suppress(OSError):
                self._path = self._find_file()
            while events := self.run.poll(self._path):
                self.hook.pass_on(events)
                await asyncio.sleep(0)
            await asyncio.sleep(0 if self._has_read_all else POLL_S)

    async def run_hook(self) -> None:
        """Runs the hook with new events until all were read."""
        while not self._has_read_all:
            await self.hook.run_waiting()
            await asyncio.sleep(POLL_S)
        await self.hook.run_waiting()

    async def read_launcher(self, reader: asyncio.StreamReader) -> None:
        """Takes over the states that the launcher sends, until it closes the pipe."""
        while line := await reader.readline():
            self.job = self.job.updated(parse(line), time.time())
        self.has_ended = True
