"""A process that works for a worker: it is asked over a pipe, one line of JSON for each call and one for its answer."""

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
from moc.runtime import children

PATIENCE_S = 600.0
"""Seconds after which a process counts as hanging: what is asked of one may be to read or copy a node's memory."""

_AT_ONCE = select.PIPE_BUF  # bytes that a pipe takes without waiting, if it takes any
_READ = 1 << 16  # bytes


class HelperError(Exception):
    """The process does not work; the message is a predicate, as in "has died"."""


class Helper:
    """The process, as the worker sees it; it dies with the thread that starts it.

    One thread asks at a time; others may start it and end it meanwhile.

    Args:
        module: what it runs: it calls :func:`~moc.runtime.children.belong_beside`, and then :func:`serve`.
        env: variables of its environment, beside this process's.
        patience_s: seconds after which it is killed if it has not answered.
    """

    def __init__(self, module: str, env: Mapping[str, str] = MappingProxyType({}), patience_s: float = PATIENCE_S):
        self._module, self._env, self.patience_s = module, env, patience_s
        self._process: subprocess.Popen[bytes] | None = None
        self._changing = threading.Lock()  # which process it is
        self._started = self._closed = False

    @property
    def runs(self) -> bool:
        """Whether the process runs; it may not have started yet."""
        return self._process is not None and self._process.poll() is None

    @property
    def processes(self) -> list[int]:
        """Id of the process, once it has started; until then it is in nobody's way for long."""
        process = self._process
        return [process.pid] if process is not None and self._started and self.runs else []

    def start(self) -> bool:
        """Starts the process, unless it runs; returns whether it is a new one.  It may not answer for seconds.

        Raises:
            HelperError: it cannot be started, or was closed.
        """
        with self._changing:
            if self._closed:
                raise HelperError("has been ended")
            if self.runs:
                return False
            me = os.getpid()
            command, env = children.command_of(self._module, dies_with=me), {**self._env, children.PARENT: str(me)}
            self._started = False
            try:
                with children.report_pipe() as (pipe, end):
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=children.STDERR,
                        bufsize=0,
                        env=os.environ | env | {children.REPORTS: str(end)},
                        pass_fds=[end],
                    )
            except OSError as error:
                raise HelperError(f"cannot be started: {error}") from None
            process.stdout = pipe
            self._process = process
            return True

    def has_started(self) -> bool:
        """Whether the process, which was started before, would answer now.

        Raises:
            HelperError: it has died.
        """
        if not self._started and _ready(self._pipes[1], select.POLLIN, time.monotonic()):
            self._receive(time.monotonic())
            self._started = True
        return self._started

    def ask(self, call: Any) -> Any:
        """Returns the answer of the process, which was started before, to a call; both are what JSON has.

        Raises:
            HelperError: it has died, or has been killed since it did not answer.
        """
        until = time.monotonic() + self.patience_s
        if not self._started:
            self._receive(until)
            self._started = True
        self._send(json.dumps(call).encode() + b"\n", until)
        return parse(self._receive(until))

    def close(self) -> None:
        """Ends the process at once; whoever waits for its answer is told so."""
        with self._changing:
            self._closed = True
        self._kill()

    @property
    def _pipes(self) -> tuple[int, int]:
        """Of the process: what it reads, and what it writes."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None  # it was started
        return process.stdin.fileno(), process.stdout.fileno()

    def _send(self, line: bytes, until: float) -> None:
        pipe, _ = self._pipes
        while line:
            self._wait(pipe, select.POLLOUT, until)
            try:
                line = line[os.write(pipe, line[:_AT_ONCE]) :]
            except OSError:
                self._fails("has died")

    def _receive(self, until: float) -> bytes:
        (_, pipe), line = self._pipes, b""
        while not line.endswith(b"\n"):
            self._wait(pipe, select.POLLIN, until)
            read = os.read(pipe, _READ)
            if not read:
                self._fails("has died")
            line += read
        return line

    def _wait(self, pipe: int, event: int, until: float) -> None:
        if not _ready(pipe, event, until):
            self._fails(f"has not answered for {self.patience_s:g} s")

    def _fails(self, how: str) -> None:
        self._kill()
        raise HelperError(how)

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            process.wait()


def serve(answer: Callable[[Any], Any]) -> None:
    """Answers calls, in the process, until the worker ends, also if it ends before an answer."""
    with contextlib.suppress(BrokenPipeError), open(children.reports(), "w") as worker:
        print("null", file=worker, flush=True)  # it has started
        for line in sys.stdin:
            print(json.dumps(answer(parse(line))), file=worker, flush=True)


def _ready(pipe: int, event: int, until: float) -> bool:
    """Waits until a pipe can be read or written, or is broken; returns whether it is."""
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(max(0.0, until - time.monotonic()) * 1e3))
