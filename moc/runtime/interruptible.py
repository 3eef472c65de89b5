"""Runs blocking calls in a deputy thread, so that the caller can be interrupted."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class CalledAway(Exception):
    """The caller was interrupted; the deputy's task, if it has begun, continues."""


class InterruptibleThread:
    """A thread for calls that block and cannot receive exceptions; after :meth:`leave`, it ends with its last task."""

    def __init__(self):
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._started = self._left = False

    def do(self, task: Callable):
        """Runs a task in the deputy thread, and returns its result or raises its exception.

        Raises:
            CalledAway: :meth:`leave` was called; the task continues, and its result is lost.
        """
        answers: list[tuple] = []
        with self._changed:
            if self._left:
                raise CalledAway
            if not self._started:
                self._started = True
                threading.Thread(target=self._serve, name="deputy", daemon=True).start()
            self._tasks.put((task, answers))
            self._changed.wait_for(lambda: answers or self._left)
            if not answers:
                raise CalledAway
            answer, error = answers.pop()
        if error is not None:
            raise error
        return answer

    def leave(self) -> None:
        """Interrupts the caller of :meth:`do`; any thread may call it."""
        with self._changed:
            self._left = True
            self._tasks.put(None)
            self._changed.notify_all()

    def _serve(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, answers = item
            try:
                answer = (task(), None)
            except BaseException as error:  # re-raised by do()
                answer = (None, error)
            with self._changed:
                answers.append(answer)
                self._changed.notify_all()
            del item, task, answers, answer  # not referenced until the next task
