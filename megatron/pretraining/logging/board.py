"""Writes TensorBoard values in the background; counts and drops failed ones, which ``events.jsonl`` also has."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from moc.backoff import Trouble
from moc.errors import warning
from moc.snapshot.background import Background

_MOST_WAITING = 1000  # batches of values; reached only if a write hangs
_CLOSING_S = 10.0


class Board:
    """Writes scalars in its own thread.

    Args:
        directory: TensorBoard's directory.
        queue_size: values that TensorBoard buffers before it writes.
        say: prints a message; runs in that thread.
        lost: runs in that thread when files can be written again, with the number of lost values and the seconds.
    """

    def __init__(self, directory: str, queue_size: int, say: Callable[[str], None], lost: Callable[[int, float], None]):
        from torch.utils.tensorboard.writer import SummaryWriter  # takes a second to import

        self._make = lambda: SummaryWriter(directory, max_queue=queue_size)
        self._directory, self._say, self._lost = directory, say, lost
        self._thread, self._trouble, self._dropped = Background("tensorboard"), Trouble(), 0
        self._writer: SummaryWriter | None = None
        self._waiting: list[Future] = []
        _silence_writers()
        self.add_scalars({}, 0)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Adds one value, like TensorBoard's own method."""
        self.add_scalars({name: value}, step)

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Adds several values of one step; returns immediately."""
        self._add("add_scalar", {name: float(value) for name, value in values.items()}, step)

    def add_text(self, name: str, text: str, global_step: int) -> None:
        """Adds a text, like TensorBoard's own method."""
        self._add("add_text", {name: text}, global_step)

    def flush(self) -> None:
        """Writes added values, if possible."""
        wait([self._thread.submit(self._flush)], timeout=_CLOSING_S)

    def close(self) -> None:
        """Writes the remaining values, if possible."""
        closed = self._thread.submit(self._close)
        self._thread.end()
        wait([closed], timeout=_CLOSING_S)

    def _add(self, method: str, values: dict[str, Any], step: int) -> None:
        self._waiting = [one for one in self._waiting if not one.done()]
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(self._thread.submit(self._write, method, values, step))
        else:
            self._dropped += len(values)

    def _write(self, method: str, values: dict[str, Any], step: int) -> None:
        if self._trouble.rests:
            self._dropped += len(values)
            return
        try:
            if self._writer is not None and not Path(self._directory).is_dir():
                self._writer = None  # the directory was removed, and writes to removed files succeed
            self._writer = self._writer or self._make()
            for name, value in values.items():
                getattr(self._writer, method)(name, value, step)
            if self._trouble:
                self._writer.flush()
        except Exception as error:  # TensorBoard may raise anything
            self._writer = None
            self._dropped += len(values)
            if self._trouble.failed():
                self._say(
                    warning(
                        f"TensorBoard's files in {self._directory} cannot be written "
                        f"({getattr(error, 'strerror', None) or error}); training continues, and tries again. Fix: "
                        "correct the permissions of the directory or make room",
                        code="log-unwritable",
                    )
                )
            return
        if self._trouble:
            self._lost(self._dropped, self._trouble.over())
            self._dropped = 0

    def _flush(self) -> None:
        with contextlib.suppress(Exception):
            if self._writer is not None:
                self._writer.flush()

    def _close(self) -> None:
        with contextlib.suppress(Exception):
            if self._writer is not None:
                self._writer.close()


def _silence_writers() -> None:
    """Hides exceptions of TensorBoard's threads, which are already reported here."""
    before = threading.excepthook
    if getattr(before, "of_board", False):
        return

    def hook(what) -> None:
        if type(what.thread).__module__.partition(".")[0] != "tensorboard":
            before(what)

    hook.of_board = True
    threading.excepthook = hook
