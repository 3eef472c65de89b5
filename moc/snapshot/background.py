"""Daemon threads for operations that may hang; callers can stop waiting, and the process can exit.

Threads of :mod:`concurrent.futures` are joined at interpreter exit. A write to storage that never returns would keep
the process alive forever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from moc.store.errors import CheckpointError, TakenError


class GivenUpError(Exception):
    """Error of an abandoned write that no caller waits for."""


class Background:
    """A daemon thread that runs actions one at a time, in the order of submission."""

    def __init__(self, name: str):
        self._name, self._asked, self._starting = name, SimpleQueue(), threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, action: Callable, *args) -> Future:
        """Queues an action without waiting for it.

        The future has its result or exception, and can be cancelled until the action starts.
        """
        done: Future = Future()
        self._asked.put((done, action, args))
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
        return done

    def end(self) -> None:
        """Ends the thread after all submitted actions; nothing may be submitted afterwards."""
        self._asked.put(None)

    def _work(self) -> None:
        while self._do(self._asked.get()):  # a separate call frees the large arguments
            pass

    def _do(self, asked: tuple[Future, Callable, tuple] | None) -> bool:
        """Runs one action; returns whether more may follow."""
        if asked is None:
            return False
        done, action, args = asked
        if not done.set_running_or_notify_cancel():
            return True
        try:
            result = action(*args)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(result)
        return True


_of_process: dict[str, Background] = {}


def background(name: str) -> Background:
    """Returns the process-wide thread of this name.

    An action starts once all earlier ones have ended, abandoned ones included. So writes of two generations cannot mix.
    """
    return _of_process.setdefault(name, Background(name))


def with_retries(action: Callable[[], None], pauses_s: Sequence[float], given_up: threading.Event) -> int:
    """Runs a storage operation, and repeats it after each pause while it fails; returns the number of repetitions.

    Raises:
        TakenError: another job owns the storage.
        CheckpointError, OSError: the last repetition failed, too.
        GivenUpError: the operation was given up during a pause.
    """
    for number, pause_s in enumerate(pauses_s):
        try:
            action()
        except TakenError:
            raise
        except (CheckpointError, OSError):
            if given_up.wait(pause_s):
                raise GivenUpError from None
        else:
            return number
    action()
    return len(pauses_s)


def within(seconds: float | None, action: Callable, *args):
    """Returns the result of an action, or None after ``seconds``; the action then continues in the background.

    Without a limit (None) it runs on this thread.
    """
    if seconds is None:
        return action(*args)
    asked = Background("moc-within")
    done = asked.submit(action, *args)
    asked.end()
    try:
        return done.result(timeout=seconds)
    except TimeoutError:
        if done.done():
            raise
        return None
