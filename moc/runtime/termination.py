"""Defines how a job's processes end: exit codes (docs/reference/exit-codes.md) and stop signals.

A process that a signal stops prints one line, with the iteration, the exit code and how to continue.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import NoReturn

FAILED = 1
"""Exit code of a program that cannot run, for example with an unknown release of a library."""

USAGE = 2
"""Exit code of a program that refuses its settings, such as a batch not divisible among the workers."""

LOST = 70
"""Exit code of a job that has lost something it depends on (sysexits' EX_SOFTWARE)."""

SAVED = 75
"""Exit code of a worker that was asked to stop and has saved all state at risk; for a job: restart it to resume."""

DEPARTED = 79
"""Exit code of a launcher whose node has left a job of MIN to MAX nodes; the other nodes continue."""

START_OVER = 76
"""Exit code of a worker that requests its replacement without an error."""

RESUME_REMEDY = "start the job again; it resumes from the newest valid snapshot or checkpoint"
"""Remedy in the message of a job that ends with :data:`SAVED` after part of its last state was lost."""


def describe_exit(code: int) -> str:
    """Returns a clause that describes a worker's exit code; a negative code is a signal's number."""
    if code < 0:
        return f"was killed by signal {-code}"
    return "was asked to stop, and has ended in good order" if code == SAVED else f"failed (exit code {code})"


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask a job to stop."""


def handled_stop_signals() -> list[signal.Signals]:
    """Returns the signals of :data:`STOP_SIGNALS` that this process receives; with ``nohup`` it ignores SIGHUP."""
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def stop_message(number: int, code: int, iteration: int | None) -> str:
    """Returns the line of a job that a signal has stopped.

    Args:
        number: number of the signal.
        code: exit code of the job.
        iteration: last completed iteration, whose state is saved if the code is 75; None if there is none.
    """
    position = f"after iteration {iteration}" if iteration else "before the first iteration"
    if code == DEPARTED:
        return f"this node has left the job {position} (exit code {code}): the other nodes continue"
    event = f"stopped by {signal.Signals(number).name} {position} (exit code {code})"
    if code == SAVED and iteration:
        return f"{event}: the state of this iteration is saved, and the same command continues from it"
    if iteration:
        return f"{event}: the same command continues from the newest snapshot or checkpoint"
    return f"{event}: nothing has to be saved, and the same command starts again"


def end_on_signals(message_of: Callable[[int], str | None], terminate: Callable[[int], object]) -> None:
    """Makes signals of :func:`handled_stop_signals` end this process immediately, with a line on standard error.

    Args:
        message_of: returns the line for the number of the signal; None for no line.
        terminate: ends the process, which may be importing or waiting for other workers, without ``finally`` blocks.
    """

    def stop(number: int, _frame: object) -> None:
        if (line := message_of(number)) is not None:
            with contextlib.suppress(OSError):  # the disk may be full
                os.write(2, f"{line}\n".encode())
        terminate(number)

    for number in handled_stop_signals():
        signal.signal(number, stop)


def exit_for_signal(number: int) -> NoReturn:
    """Exits with 128 + n, as a launcher does."""
    os._exit(128 + number)


def die_by_signal(number: int) -> None:
    """Ends this process by the signal itself, as for a worker, so that its launcher receives the signal's number."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
