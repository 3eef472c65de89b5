"""Ends a worker on a signal before the flags are known, or without ``--exit-signal-handler``."""

from __future__ import annotations

import os

from moc.runtime import environment
from moc.runtime.progress import PROGRESS
from moc.runtime.termination import die_by_signal, end_on_signals, stop_message


def end_at_once(program: str) -> None:
    """Makes signals that request a stop end this worker immediately, with one line of rank 0.

    Under ``mocrun``, the launcher reports the signal, which keeps its default action.
    """
    if environment.AGENT in os.environ:
        return

    def report(number: int) -> str | None:
        if os.environ.get("RANK", "0") != "0":
            return None
        return f"{program}: {stop_message(number, 128 + number, PROGRESS.iteration)}"

    end_on_signals(report, die_by_signal)
