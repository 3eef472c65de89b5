"""Delivers the signals that ask a job to stop, for launchers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from moc.runtime.stop_report import STOPS, received_stops, stop_sentence

T = TypeVar("T")


class StoppedError(Exception):
    """The signal ``number`` asked the job to stop before it had begun."""

    def __init__(self, number: int):
        super().__init__(stop_sentence(number, 128 + number, None))
        self.number = number


class Signals:
    """Delivers every stop signal to each listener, including signals that arrived before it registered."""

    def __init__(self):
        # an inherited SIG_IGN would discard children's exit codes, so that each would seem to fail
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._listeners: list[Callable[[int], object]] = []
        self._come: list[int] = []
        for number in received_stops():
            asyncio.get_running_loop().add_signal_handler(number, self._comes, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # launchers start their children with these blocked

    @contextlib.contextmanager
    def heard_by(self, listener: Callable[[int], object]) -> Iterator[None]:
        """Calls a listener with each signal number within the block."""
        self._listeners.append(listener)
        try:
            for number in self._come:
                listener(number)
            yield
        finally:
            self._listeners.remove(listener)

    async def unless_stopped(self, beginning: Coroutine[Any, Any, T]) -> T:
        """Awaits a coroutine; a stop signal cancels it and raises StoppedError."""
        task = asyncio.create_task(beginning)
        with self.heard_by(lambda _: task.cancel()):
            try:
                return await task
            except asyncio.CancelledError:
                raise StoppedError(self._come[0]) from None

    def _comes(self, number: int) -> None:
        self._come.append(number)
        for listener in self._listeners:
            listener(number)
