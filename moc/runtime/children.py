"""Processes that belong to this one: they die with it, and what a terminal sends to all does not reach them."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from pathlib import Path

from moc.runtime.signals import STOPS

PARENT = "MOC_PARENT"
"""Environment variable of a process that was started by :func:`start`: the number of the one that it belongs to."""

_SET_PDEATHSIG = 1  # linux/prctl.h


async def start(module: str, *arguments: str, env: dict[str, str] | None = None, **how) -> asyncio.subprocess.Process:
    """Starts ``python -m MODULE``, which calls :func:`belong` first of all.

    It begins with :data:`~moc.runtime.signals.STOPS` blocked, so that none ends it, not even before it has a session of
    its own; whoever wants them unblocks them, and gets what has come.

    Args:
        module: to run.
        arguments: of its command line.
        env: its environment; None for this process's.
        how: more for :func:`asyncio.create_subprocess_exec`.
    """
    environment = (os.environ if env is None else env) | {PARENT: str(os.getpid())}
    command = (sys.executable, "-m", module, *arguments)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:  # the process is there before this waits for anything, and so before anybody else can unblock them
        return await asyncio.create_subprocess_exec(*command, env=environment, start_new_session=True, **how)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def belong() -> None:
    """Makes this process die with the one that has started it, also if that is dead already."""
    die_with_parent(int(os.environ.pop(PARENT, os.getppid())))


def die_with_parent(parent: int) -> None:
    """Asks Linux to kill this process when its parent dies.

    Args:
        parent: its process; if it is not the parent any more, it is dead, and this process ends at once.
    """
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def is_dying(pid: int) -> bool:
    """Whether a process was killed, or has ended, and something of it is still there; it does nothing any more."""
    try:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except OSError:
        return False
    pending = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
    return status["State"][0] in "ZX" or bool(pending >> (signal.SIGKILL - 1) & 1)
