"""TensorBoard beside training: what it cannot write is counted and dropped, since ``events.jsonl`` has it too."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path

from moc.snapshot.background import Background
from moc.trouble import Trouble

_MOST_WAITING = 1000  # batches of values; more come only if a write hangs
_CLOSING_S = 10.0


class Board:
    """Writes scalars, in a thread of its own.

    Args:
        directory: of TensorBoard's files.
        queue_size: values that TensorBoard holds before it writes.
        say: takes a line of prose, in that thread.
        lost: is told, there, when files can be written again: how many values are lost, and after how many seconds.
    """

    def __init__(self, directory: str, queue_size: int, say: Callable[[str], None], lost: Callable[[int, float], None]):
        from torch.utils.tensorboard import SummaryWriter  # a second to import: only where it is wanted

        self._make = lambda: SummaryWriter(directory, max_queue=queue_size)
        self._directory, self._say, self._lost = directory, say, lost
        self._thread, self._trouble, self._dropped = Background("tensorboard"), Trouble(), 0
        self._writer: SummaryWriter | None = None
        self._waiting: list[Future] = []
        _silence_writers()
        self.add_scalars({}, 0)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """As TensorBoard's own."""
        self.add_scalars({name: value}, step)

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Several values of one moment; returns at once."""
        self._waiting = [one for one in self._waiting if not one.done()]
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(self._thread.submit(self._write, dict(values), step))
        else:
            self._dropped += len(values)

    def close(self) -> None:
        """Writes what is left, if that can be done."""
        closed = self._thread.submit(self._close)
        self._thread.end()
        wait([closed], timeout=_CLOSING_S)

    def _write(self, values: dict[str, float], step: int) -> None:
        if self._trouble.rests:
            self._dropped += len(values)
            return
        try:
            if self._writer is not None and not Path(self._directory).is_dir():
                self._writer = None  # somebody has removed it, and writes to what is removed succeed
            self._writer = self._writer or self._make()
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            if self._trouble:
                self._writer.flush()
        except Exception as error:  # whatever TensorBoard makes of it
            self._writer = None
            self._dropped += len(values)
            if self._trouble.failed():
                self._say(
                    f"WARNING: TensorBoard's files in {self._directory} cannot be written "
                    f"({getattr(error, 'strerror', None) or error}). Training goes on, and tries again"
                )
            return
        if self._trouble:
            self._lost(self._dropped, self._trouble.over())
            self._dropped = 0

    def _close(self) -> None:
        with contextlib.suppress(Exception):
            if self._writer is not None:
                self._writer.close()


def _silence_writers() -> None:
    """TensorBoard's threads end with the error that is reported here anyway."""
    before = threading.excepthook
    if getattr(before, "of_board", False):
        return

    def hook(what) -> None:
        if type(what.thread).__module__.partition(".")[0] != "tensorboard":
            before(what)

    hook.of_board = True
    threading.excepthook = hook
