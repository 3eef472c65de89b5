"""Threads for what may hang: nobody need wait for them, and a process can end while the kernel holds one.

Those of :mod:`concurrent.futures` are joined when the interpreter ends, so that one write to storage that never returns
would keep the process for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue


class Background:
    """A thread that does one thing after the other, in the order in which it was asked.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str):
        self._name, self._asked, self._starting = name, SimpleQueue(), threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, action: Callable, *args) -> Future:
        """Asks for something; returns at once.

        Args:
            action: what to do.
            args: what it takes.

        Returns:
            Its result, or what it raised; it can be cancelled until it has begun.
        """
        done: Future = Future()
        self._asked.put((done, action, args))
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
        return done

    def end(self) -> None:
        """The thread ends when it has done what it was asked so far; nothing may be asked of it after that."""
        self._asked.put(None)

    def _work(self) -> None:
        while self._do(self._asked.get()):  # in a function, since what it was given is large and must not stay
            pass

    def _do(self, asked: tuple[Future, Callable, tuple] | None) -> bool:
        """Whether there may be more to do."""
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
    """The thread of this process that has a name.

    What is asked of it begins when all that was asked before has ended, also what was given up since: so what one
    generation has begun to write cannot mix with what the next one writes.
    """
    return _of_process.setdefault(name, Background(name))


def within(seconds: float | None, action: Callable, *args):
    """What an action returns; None if it does not return soon, and then it goes on beside.

    Args:
        seconds: for so long; None to wait for it in any case.
        action: what to do.
        args: what it takes.
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
