"""The process that hashes a worker's snapshots (:mod:`moc.session.hasher`), as the worker sees it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence

from moc.runtime import children
from moc.snapshot.saver import hashed
from moc.store.buffers import Buffer

Spans = Sequence[tuple[int, int]]

PATIENCE_S = 60.0
"""Seconds after which a process that has not answered is given up; it hashes gigabytes in one."""


class Hasher:
    """Hashes entries of buffers that are files; the process is started when first needed, by the thread that asks.

    Whatever the process cannot do, that thread does: all buffers until it has started, and once it has died, and those
    without a file.
    """

    def __init__(self):
        self._process: subprocess.Popen | None = None
        self._started = self._failed = False

    def digests(self, buffer: Buffer, spans: Spans) -> tuple[str, ...]:
        """The hashes of spans of a buffer, each of bytes [start, stop)."""
        if buffer.path is not None and not self._failed:
            try:
                if self._has_started():
                    return self._ask([str(buffer.path), buffer.nbytes, spans])
            except (OSError, ValueError) as error:
                self._failed = True
                self.close()
                print(
                    f"WARNING: the process that hashes snapshots cannot do so ({error}): a thread of the worker does "
                    "from now on, and training is about a percent slower",
                    file=sys.stderr,
                    flush=True,
                )
        return hashed(buffer, spans)

    @property
    def processes(self) -> list[int]:
        """Id of the process, if there is one."""
        process = self._process
        return [] if process is None else [process.pid]

    def close(self) -> None:
        """Ends the process; nothing may be asked any more."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _has_started(self) -> bool:
        """Whether the process can be asked: to start it takes seconds, in which a snapshot can be lost."""
        self._process = self._process or _start()
        if not self._started and self._answers(0):
            self._started = bool(self._answer())
        return self._started

    def _ask(self, call: list) -> tuple[str, ...]:
        assert self._process is not None and self._process.stdin is not None  # a pipe
        print(json.dumps(call), file=self._process.stdin, flush=True)
        if not self._answers(PATIENCE_S):
            raise TimeoutError(f"it has not answered for {PATIENCE_S:g} s")
        found = json.loads(self._answer())
        if not isinstance(found, list):
            raise ValueError(found)
        return tuple(found)

    def _answers(self, within_s: float) -> bool:
        assert self._process is not None
        return bool(select.select([self._process.stdout], [], [], within_s)[0])

    def _answer(self) -> str:
        assert self._process is not None and self._process.stdout is not None  # a pipe
        answer = self._process.stdout.readline()
        if not answer.endswith("\n"):
            raise ValueError("it has died")
        return answer


def _start() -> subprocess.Popen:
    ours, pipe = {children.PARENT: str(os.getpid())}, subprocess.PIPE
    command = children.command_of("moc.session.hasher")
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | ours)
