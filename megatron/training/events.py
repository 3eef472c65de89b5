"""``events.jsonl``: one typed JSON object a line, the source of every figure, table and report."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from pathlib import Path

_TAIL = 1 << 20  # bytes


class EventLog:
    """Appends events; without a directory it does nothing.

    A line is written whole and flushed, so that a killed worker leaves at most one torn line at the end.  Numbers
    that JSON cannot hold (nan, inf) are written as null.
    """

    def __init__(self, directory: str | Path | None):
        self._file, self._lock = None, threading.Lock()  # savers report from threads of their own
        self._path: Path | None = None
        if directory is not None:
            path = Path(directory)
            self._path = path / "events.jsonl"
            path.mkdir(parents=True, exist_ok=True)
            self._file = open(path / "events.jsonl", "a", encoding="utf-8")
            self._end_torn_line(path / "events.jsonl")

    def write(self, event: str, **fields) -> None:
        """Appends one event; ``type`` and ``time`` (Unix seconds) come first."""
        if self._file is not None:
            record = {"type": event, "time": round(time.time(), 3), **fields}
            line = json.dumps({k: _finite(v) for k, v in record.items()}) + "\n"
            with self._lock:
                self._file.write(line)
                self._file.flush()

    def newest(self, event: str) -> dict:
        """The newest event of a kind among the last thousands, also of earlier processes; empty if there is none."""
        if self._path is None:
            return {}
        with open(self._path, "rb") as lines:
            lines.seek(max(0, self._path.stat().st_size - _TAIL))
            told = [line for line in lines.read().splitlines() if line.startswith(b'{"type": "%s"' % event.encode())]
        for line in reversed(told):
            with contextlib.suppress(ValueError):  # torn
                return json.loads(line)
        return {}

    def close(self) -> None:
        """Closes the file; later events are dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _end_torn_line(self, path: Path) -> None:
        with open(path, "rb") as existing:
            existing.seek(0, 2)
            if existing.tell() == 0:
                return
            existing.seek(-1, 2)
            torn = existing.read(1) != b"\n"
        if torn:
            self._file.write("\n")


def _finite(value):
    return None if isinstance(value, float) and not math.isfinite(value) else value
