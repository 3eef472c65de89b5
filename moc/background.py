"""Background operations, which may hang or fail without ending training: daemon threads, retries and backoff.

Threads of :mod:`concurrent.futures` are joined at interpreter exit. A write to storage that never returns would keep
the process alive forever.

Background threads stay off the training core and hold the GIL only briefly.  A woken thread that copies or hashes often
runs on the training core, where it ran before. Training then waits for milliseconds although another core is idle. On
another core, the thread still competes for the GIL. It takes the GIL for each call and passes it to the first waiting
thread, which may not run yet. Training then sleeps until its switch interval ends. Applied separately, the two measures
save little, since one wait turns into the other; together they save most (``docs/results/selective-overhead.md``).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from moc.errors import warning
from moc.store.errors import CheckpointError, TakenError

SWITCH_S = 1e-4
"""Python's switch interval during snapshots; a copy can take less than its default of 5 ms."""

_BACKGROUND, _AWAITED = "snapshot-", "event-log"
"""Name prefixes of background threads, and of threads that training waits for."""

_LIBC = ctypes.CDLL(None)

_of_process: dict[str, Background] = {}
_SILENCE_S = 60.0  # minimum between two warnings
_SHARE = 20.0  # minimum ratio of a pause to the duration of the attempt before it

_MISTAKES = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of a calculation; errors of files and communication have their own handlers."""


class GivenUpError(Exception):
    """Error of an abandoned write that no caller waits for."""


class Background:
    """A daemon thread that runs actions one at a time, in the order of submission."""

    def __init__(self, name: str):
        self._name, self._requests, self._starting = name, SimpleQueue(), threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, action: Callable, *args) -> Future:
        """Queues an action without waiting for it.

        The future has its result or exception, and can be cancelled until the action starts.
        """
        future: Future = Future()
        self._requests.put((future, action, args))
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
        return future

    def end(self) -> None:
        """Ends the thread after all submitted actions; nothing may be submitted afterwards."""
        self._requests.put(None)

    def _work(self) -> None:
        while self._do(self._requests.get()):  # a separate call frees the large arguments
            pass

    def _do(self, request: tuple[Future, Callable, tuple] | None) -> bool:
        """Runs one action; returns whether more may follow."""
        if request is None:
            return False
        future, action, args = request
        if not future.set_running_or_notify_cancel():
            return True
        try:
            result = action(*args)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        return True


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
    thread = Background("moc-within")
    future = thread.submit(action, *args)
    thread.end()
    try:
        return future.result(timeout=seconds)
    except TimeoutError:
        return future.result() if future.done() else None  # it may have ended, or failed itself


class Trouble:
    """Backoff of a failing operation: retries after 1 s to 1 min, warnings every 1 min to 1 h, both doubling.

    An operation that alternately fails and works also causes at most one warning a minute.

    Attributes:
        count: failures in total.
        warned: a warning was due since the operation began to fail.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.count = 0
        self._since: float | None = None
        self._next_try, self._warned_at, self._next_warning = 0.0, -math.inf, -math.inf
        self._begins()

    def _begins(self) -> None:
        self.warned = False
        self._pause, self._silence = 1.0, _SILENCE_S

    def __bool__(self) -> bool:
        """Whether the operation is failing."""
        return self._since is not None

    @property
    def seconds(self) -> float:
        """Seconds since the first failure; 0 while the operation works."""
        return 0.0 if self._since is None else self._clock() - self._since

    @property
    def rests(self) -> bool:
        """Whether it is too early to retry."""
        return self._since is not None and self._clock() < self._next_try

    def failed(self, took_s: float = 0.0) -> bool:
        """Records a failed attempt, retried less often if it took long; returns whether a warning is due."""
        current_time = self._clock()
        self.count += 1
        if self._since is None:
            self._since = current_time
        self._next_try = current_time + max(self._pause, _SHARE * took_s)
        self._pause = min(2 * self._pause, 60.0)
        if current_time < self._next_warning:
            return False
        self._warned_at = current_time
        self._next_warning = current_time + self._silence
        self._silence = min(2 * self._silence, 3600.0)
        self.warned = True
        return True

    def over(self) -> float:
        """Records that the operation works again; returns the seconds since its first failure."""
        lasted, self._since = self.seconds, None
        self._next_warning = min(self._next_warning, self._warned_at + _SILENCE_S)
        self._begins()
        return lasted


class Harmless:
    """Contexts for choices and reports: an error is printed, and does not end training.

    Args:
        say: prints a message.
        action: the failing calculation, as the subject of a sentence.
        effect: effect of the failure, as a clause.
    """

    def __init__(self, say: Callable[[str], None], action: str, effect: str):
        self._say, self._action, self._effect = say, action, effect
        self._trouble = Trouble()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Suppresses an error of the body; prints it at most once a minute."""
        try:
            yield
        except _MISTAKES as error:
            if self._trouble.failed():
                self._say(
                    warning(
                        f"{self._action} failed ({type(error).__name__}: {error}), and {self._effect}. Fix: report the "
                        "message as an issue",
                        code="calculation-failed",
                    )
                )


def share_interpreter() -> None:
    """Lets waiting threads of this process request the GIL sooner."""
    sys.setswitchinterval(SWITCH_S)


class CpuAffinity:
    """Keeps background threads and processes off the training core if there is another core.

    Args:
        workers: number of workers on this node, each with its own training core.
    """

    def __init__(self, workers: int):
        self._workers, self._moved = workers, None

    def move(self, processes: Iterable[int] = ()) -> None:
        """Moves this process's background threads, and other processes, off the current core.

        The training thread calls it. Background threads and processes may use the other cores that it may use. The
        current core is left to training and the threads that it waits for. Processes run only when no thread needs
        their core; otherwise training could wait for them through such a thread.
        """
        allowed = os.sched_getaffinity(0)
        if len(allowed) <= self._workers:
            return
        core, threads = _processor(), threading.enumerate()
        background, awaited = (
            {thread.native_id for thread in threads if thread.native_id is not None and thread.name.startswith(name)}
            for name in (_BACKGROUND, _AWAITED)
        )
        placement = core, allowed, background | {*processes}, awaited
        if placement == self._moved:
            return
        self._moved = placement
        for thread_ids, cores in ((placement[2], allowed - {core}), (awaited, {core})):
            for thread_id in thread_ids:
                with contextlib.suppress(OSError):  # it has ended, or the machine forbids it
                    os.sched_setaffinity(thread_id, cores)
        for process in processes:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))


def _processor() -> int:
    """Returns the core that the calling thread runs on."""
    return _LIBC.sched_getcpu()
