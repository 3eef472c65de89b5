"""A thread that waits in another's place, so that the other can be called away."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class CalledAway(Exception):
    """The deputy was left behind, in the middle of something."""


class InterruptibleThread:
    """Does what may block where no exception reaches it.

    The thread starts with the first task and ends when it is left behind and has finished what it was doing.
    """

    def __init__(self):
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._started = self._left = False

    def do(self, task: Callable):
        """Does a task in the deputy's thread, and waits for it.

        Returns:
            What the task returns.

        Raises:
            CalledAway: :meth:`leave` was called; the task goes on, and its answer is lost.
            BaseException: what the task raises.
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
        """Calls away whoever waits in :meth:`do`; from any thread."""
        with self._changed:
            self._left = True
            self._tasks.put(None)
            self._changed.notify_all()

    def _serve(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, answers = item
            try:
                answer = (task(), None)
            except BaseException as error:  # raised by whoever waits for it
                answer = (None, error)
            with self._changed:
                answers.append(answer)
                self._changed.notify_all()
            del item, task, answers, answer  # not kept until the next one
