"""Runs a helper process of a worker and calls it over pipes: one line of JSON per call and per answer."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from moc.files.decode import parse
from moc.runtime import child_processes

CALL_TIMEOUT_S = 600.0
"""Seconds without an answer after which a process counts as hung; a call may read or copy a node's memory."""

_PIPE_BYTES = select.PIPE_BUF  # bytes that a writable pipe accepts without blocking
_READ = 1 << 16  # bytes


class HelperError(Exception):
    """The process failed; the message is a predicate, as in "has died"."""


class HelperProcess:
    """A worker's handle of the process, which dies with the thread that starts it.

    One thread makes calls at a time; others may start and end the process meanwhile.

    Args:
        module: module to run; it calls :func:`~moc.runtime.child_processes.attach_in_background`, and then
            :func:`answer_calls`.
        arguments: its command line.
        env: environment variables in addition to this process's.

    Attributes:
        timeout_s: seconds without an answer after which the process is killed.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        env: Mapping[str, str] = MappingProxyType({}),
    ):
        self._command, self._env, self.timeout_s = (module, *arguments), env, CALL_TIMEOUT_S
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # guards starting and closing
        self._started = self._closed = False

    @property
    def is_running(self) -> bool:
        """Whether the process runs; it may not have started yet."""
        return self._process is not None and self._process.poll() is None

    @property
    def pids(self) -> list[int]:
        """Id of the process, once it has started; empty otherwise."""
        process = self._process
        return [process.pid] if process is not None and self._started and self.is_running else []

    def start(self) -> bool:
        """Starts the process unless it runs; returns whether it is new.  Its first answer may take seconds.

        Raises:
            HelperError: it cannot be started, or was closed.
        """
        with self._lock:
            if self._closed:
                raise HelperError("has been ended")
            if self.is_running:
                return False
            me = os.getpid()
            command, env = (
                child_processes.module_command(*self._command, parent=me),
                {**self._env, child_processes.PARENT: str(me)},
            )
            self._started = False
            try:
                with child_processes.report_pipe() as (pipe, end):
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=child_processes.STDERR,
                        bufsize=0,
                        env=os.environ | env | {child_processes.REPORT_DESCRIPTOR: str(end)},
                        pass_fds=[end],
                    )
            except OSError as error:
                raise HelperError(f"cannot be started: {error}") from None
            process.stdout = pipe
            self._process = process
            return True

    def has_started(self) -> bool:
        """Returns whether the process, on which start() was called, would answer now.

        Raises:
            HelperError: it has died.
        """
        if not self._started and _ready(self._pipes[1], select.POLLIN, time.monotonic()):
            self._receive(time.monotonic())
            self._started = True
        return self._started

    def call_process(self, call: Any) -> Any:
        """Calls the process, which must have been started, and returns its answer; both are JSON values.

        Raises:
            HelperError: it has died, or was killed because it did not answer.
        """
        deadline = time.monotonic() + self.timeout_s
        if not self._started:
            self._receive(deadline)
            self._started = True
        self._send(json.dumps(call).encode() + b"\n", deadline)
        return parse(self._receive(deadline))

    def close(self) -> None:
        """Ends the process immediately; a thread that waits for its answer gets an error."""
        with self._lock:
            self._closed = True
        self._kill()

    @property
    def _pipes(self) -> tuple[int, int]:
        """Descriptors for writing to the process and for reading from it."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None  # it was started
        return process.stdin.fileno(), process.stdout.fileno()

    def _send(self, line: bytes, deadline: float) -> None:
        pipe, _ = self._pipes
        while line:
            self._wait(pipe, select.POLLOUT, deadline)
            try:
                line = line[os.write(pipe, line[:_PIPE_BYTES]) :]
            except OSError:
                self._fail("has died")

    def _receive(self, deadline: float) -> bytes:
        (_, pipe), line = self._pipes, b""
        while not line.endswith(b"\n"):
            self._wait(pipe, select.POLLIN, deadline)
            read = os.read(pipe, _READ)
            if not read:
                self._fail("has died")
            line += read
        return line

    def _wait(self, pipe: int, event: int, deadline: float) -> None:
        if not _ready(pipe, event, deadline):
            self._fail(f"has not answered for {self.timeout_s:g} s")

    def _fail(self, reason: str) -> None:
        self._kill()
        raise HelperError(reason)

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            process.wait()


def answer_calls(handler: Callable[[Any], Any]) -> None:
    """Answers calls, in the process, until the worker ends, possibly before an answer."""
    with contextlib.suppress(BrokenPipeError), open(child_processes.report_descriptor(), "w") as worker:
        print("null", file=worker, flush=True)  # reports the start
        for line in sys.stdin:
            print(json.dumps(handler(parse(line))), file=worker, flush=True)


def _ready(pipe: int, event: int, deadline: float) -> bool:
    """Waits until a pipe is readable, writable or broken; returns False on timeout."""
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1e3))
