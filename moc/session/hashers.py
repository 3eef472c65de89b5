"""Starts the process that hashes a worker's snapshots (:mod:`moc.session.hasher`), and calls it from the worker."""

from __future__ import annotations

from collections.abc import Sequence

from moc.cli_output import print_lines
from moc.errors import warning
from moc.runtime.helper_process import HelperError, HelperProcess
from moc.snapshot.saver import hashed
from moc.store.buffers import HostBuffer

Spans = Sequence[tuple[int, int]]


class Hasher:
    """Client of a process that hashes buffers with files; the first thread that needs the process starts it.

    The calling thread computes the hashes itself in these cases:

    * the buffer has no file;
    * the process has not started yet;
    * the process has failed or ended.
    """

    def __init__(self):
        self._helper = HelperProcess("moc.session.hasher")
        self._begun = self._failed = False

    def digests(self, buffer: HostBuffer, spans: Spans) -> tuple[str, ...]:
        """Returns the hashes of spans of a buffer, each of bytes [start, stop)."""
        found = None
        if buffer.path is not None and not self._failed:
            try:
                found = self._ask([str(buffer.path), buffer.nbytes, spans])
            except HelperError as error:
                if not self._failed:
                    self._fails(str(error))
        return hashed(buffer, spans) if found is None else found

    @property
    def processes(self) -> list[int]:
        """Process id, once the process has started."""
        return self._helper.pids

    def close(self) -> None:
        """Ends the process; the calling thread computes pending and later hashes."""
        self._failed = True
        self._helper.close()

    def _ask(self, call: list) -> tuple[str, ...] | None:
        if not self._started():
            return None
        answer = self._helper.call_process(call)
        if isinstance(answer, list):
            return tuple(answer)
        self._fails(f"has failed ({answer})")
        return None

    def _started(self) -> bool:
        """Whether the process accepts calls: its start takes seconds, and a waiting snapshot can be lost meanwhile."""
        if not self._begun:
            self._begun = self._helper.start()
        return self._helper.has_started()

    def _fails(self, how: str) -> None:
        self._failed = True
        self._helper.close()
        print_lines(
            warning(
                f"the process that hashes snapshots {how}: a thread of the worker hashes from now on, and training is "
                "about a percent slower. Fix: read the output of the process above",
                code="helper-lost",
            ),
            error=True,
            flush=True,
        )
