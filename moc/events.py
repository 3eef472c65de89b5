"""Writes ``events.jsonl``, the source of all figures and reports; :mod:`moc.event_types` defines its events."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from moc.errors import warning
from moc.files import decode
from moc.files.events import NAME
from moc.files.tree import Tree, open_single
from moc.runtime.clocks import Lease
from moc.snapshot.background import Background
from moc.trouble import Trouble

_TAIL = 1 << 20  # bytes
_MOST_WAITING = 100_000  # lines
_PATIENCE_S = 1.0  # seconds to wait for a hanging write, once


class EventLog:
    """Writer of events to ``events.jsonl``; a no-op without a directory.

    A line is normally complete before :meth:`write` returns, so a killed worker leaves at most one torn line at the
    end.  Numbers without a JSON representation (nan, inf) are written as null.

    File errors neither end nor delay the caller.  Failed lines stay in memory and are retried; a hanging write is
    waited for once.  When writing works again, a ``log_failed`` event reports it.

    Args:
        directory: directory of the file; created if missing, also later.
        say: receives a message when writing fails, works again or has lost lines; may be called from a thread.
    """

    def __init__(self, directory: str | Path | None, say: Callable[[str], None] = lambda text: None):
        self._path = Path(directory or "") / NAME  # not opened without a directory
        self._lines: deque[bytes] = deque()
        self._lock, self._say, self._trouble = threading.Lock(), say, Trouble()
        self._descriptor: int | None = None
        self._lease = Lease.from_environment()
        self._written = self._lost = 0  # bytes written of the first line; lines lost
        self._late: Future | None = None
        self._thread = None if directory is None else Background("event-log")
        self._ask(self._drain)

    def write(self, event: str, **fields) -> None:
        """Appends one event; ``type`` and ``time`` (Unix seconds) are the first fields."""
        if self._thread is not None:
            self._keep(event, fields)
            self._ask(self._drain)

    def newest(self, event: str) -> dict:
        """Returns the newest event of a type in the last MiB of the file, from any process; empty if there is none."""
        return self._ask(self._newest, event) or {}

    def close(self) -> None:
        """Closes the file; later events are dropped."""
        if self._thread is None:
            return
        if self._late is not None:
            wait([self._late], timeout=_PATIENCE_S)
        self._ask(self._close)
        self._thread.end()
        self._thread = None
        if self._lines:
            self._say(
                warning(
                    f"{len(self._lines) + self._lost} lines of {self._path} are lost: it cannot be written. Fix: "
                    "correct its permissions or make room",
                    code="log-unwritable",
                )
            )

    def _ask(self, action: Callable, *args):
        """Runs an action in the thread; returns its result, or None if it fails or takes too long."""
        if self._thread is None or (self._late is not None and not self._late.done()):
            return None
        self._late = self._thread.submit(action, *args)
        wait([self._late], timeout=_PATIENCE_S)
        failed = not self._late.done() or self._late.exception() is not None
        return None if failed else self._late.result()

    def _keep(self, event: str, fields: dict) -> None:
        record = {"type": event, "time": round(time.time(), 3), **fields}
        line = (json.dumps({k: _finite(v) for k, v in record.items()}) + "\n").encode()
        with self._lock:
            self._lines.append(line)
            if len(self._lines) > _MOST_WAITING:
                self._lines.pop()
                self._lost += 1

    def _drain(self, last: bool = False) -> None:
        """Writes waiting lines, unless a failure is recent; runs in the thread, like all methods below."""
        if self._trouble.rests and not last:
            return
        try:
            self._open()
            while self._lines:
                self._write_first()
        except OSError as error:
            self._forget_file()
            if self._trouble.failed():
                self._tell(
                    warning(
                        f"{self._path} cannot be written ({error.strerror or error}), and events wait in memory. Fix: "
                        "correct its permissions or make room",
                        code="log-unwritable",
                    )
                )
            return
        if self._trouble:
            count, lasted = self._trouble.count, self._trouble.over()
            self._keep("log_failed", dict(what="events", tries=count, lasted_s=round(lasted, 3), lost=self._lost))
            self._tell(f"{self._path} can be written again, after {lasted:.0f} s; {self._lost} lines are lost")
            self._lost = 0
            self._drain()

    def _write_first(self) -> None:
        if self._lease is not None:  # a stopped worker must not write the same lines as its successor
            self._lease.kill_if_expired()
        line = self._lines[0]
        assert self._descriptor is not None  # _open() was called
        while self._written < len(line):
            self._written += os.write(self._descriptor, line[self._written :])
        self._lines.popleft()
        self._written = 0

    def _open(self) -> None:
        if self._descriptor is not None and self._is_there(self._descriptor):
            return
        self._forget_file()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = open_single(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":  # torn
            os.write(self._descriptor, b"\n")

    def _is_there(self, descriptor: int) -> bool:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        return False

    def _forget_file(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._written = None, 0

    def _newest(self, event: str) -> dict:
        try:
            descriptor = Tree(self._path.parent).open(self._path.name)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        with open(descriptor, "rb", buffering=0) as file:
            tail = os.pread(descriptor, _TAIL, max(0, os.fstat(file.fileno()).st_size - _TAIL))
        told = [line for line in tail.splitlines() if line.startswith(b'{"type": "%s"' % event.encode())]
        for line in reversed(told):
            with contextlib.suppress(ValueError):  # torn
                return decode.decode(line, dict[str, Any])
        return {}

    def _close(self) -> None:
        self._drain(last=True)
        self._forget_file()

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._say(text)


def _finite(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value
