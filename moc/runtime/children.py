"""Child processes that die with their parent, in sessions of their own, so that terminal signals do not reach them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from moc.runtime import async_connections as wire
from moc.runtime.stop_report import STOPS
from moc.runtime.wire import WireError

PARENT = "MOC_PARENT"
"""Environment variable set by :func:`start`: process id of the parent."""

REPORTS = "MOC_REPORTS"
"""Environment variable: descriptor of the pipe over which a child reports to its parent (:func:`reports`)."""

STDERR = 2
"""Descriptor of this process's standard error."""

DEVICES = "/dev/nvidia"
"""What paths of GPUs begin with."""

_ROOT = str(Path(__file__).resolve().parents[2])

_ISOLATED = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; module = sys.argv[3]; del sys.argv[1:4]; {dies}"
    "import runpy; runpy.run_module(module, run_name='__main__', alter_sys=True)"
)
"""``python -m MODULE``, but without the working directory among the places that modules are imported from.

Python has ``-P`` for this from 3.11 on.  Our own root comes last, for a checkout that is not installed.
"""

_LINE = 1 << 20  # most bytes of a report

_SET_PDEATHSIG = 1  # linux/prctl.h

_DIES = f"import ctypes, os; ctypes.CDLL(None).prctl({_SET_PDEATHSIG}, {int(signal.SIGKILL)}); "
_DIES += "os.getppid() == {parent} or os._exit(1); "
"""What :func:`die_with_parent` does, before it can be imported."""


def command_of(module: str, *arguments: str, dies_with: int | None = None) -> list[str]:
    """The command line of ``python -m MODULE`` that imports nothing from where it starts.

    If it ``dies_with`` a process, its parent, it does so before it imports the module, which may take a second.
    """
    dies = "" if dies_with is None else _DIES.format(parent=dies_with)
    return [sys.executable, "-c", _ISOLATED.format(dies=dies), _ROOT, "-m", module, *arguments]


async def start(module: str, *arguments: str, env: dict[str, str] | None = None, **how) -> asyncio.subprocess.Process:
    """Starts ``python -m MODULE``, which must first call :func:`belong`; nothing is imported from where it starts.

    The child starts with :data:`~moc.runtime.signals.STOPS` blocked, so that none can kill it, not even before it has
    its own session; a child that handles them unblocks them and then receives pending ones.

    Args:
        module: to run.
        arguments: command line of the module.
        env: its environment; None to inherit this process's.
        how: further arguments of :func:`asyncio.create_subprocess_exec`.
    """
    environment = (os.environ if env is None else env) | {PARENT: str(os.getpid())}
    command = command_of(module, *arguments)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:  # the child is forked before the first suspension, so no other task can unblock the signals earlier
        return await asyncio.create_subprocess_exec(*command, env=environment, start_new_session=True, **how)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


async def start_reporting(
    module: str, *arguments: str, env: dict[str, str] | None = None, pass_fds: tuple[int, ...] = (), **how
) -> asyncio.subprocess.Process:
    """As :func:`start`, for a child that writes reports (:func:`reports`); ``stdout`` of the result reads them."""
    with report_pipe() as (pipe, end):
        variables = (os.environ if env is None else env) | {REPORTS: str(end)}
        process = await start(module, *arguments, env=variables, stdout=STDERR, pass_fds=(*pass_fds, end), **how)
        process.stdout = reader = asyncio.StreamReader(_LINE)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return process


@contextlib.contextmanager
def report_pipe() -> Iterator[tuple[FileIO, int]]:
    """Yields both ends of a new pipe: one for this process, which stays open, and one for a child to be started inside.

    The child finds its end by :data:`REPORTS`, and writes to :func:`reports`.  Its standard output has to be
    :data:`STDERR`: the output of a ``sitecustomize.py`` or a library is then on the console, and in no report.
    """
    reads, writes = os.pipe()
    pipe = open(reads, "rb", buffering=0)
    try:
        yield pipe, writes
    except BaseException:
        pipe.close()
        raise
    finally:
        os.close(writes)


def reports() -> int:
    """A descriptor for reports to the parent, one line for each: its pipe, or a copy of standard output without one.

    To be called once; the caller closes it.
    """
    descriptor = os.environ.pop(REPORTS, None)  # a child of this process has no such descriptor
    if descriptor is None:
        return os.dup(1)
    os.set_inheritable(int(descriptor), False)
    return int(descriptor)


async def until_over(
    process: asyncio.subprocess.Process, address: str, token: bytes, every_s: float, hangs_s: float
) -> str:
    """Waits until a child that serves an address has died, or hangs and is killed; returns which.

    It is asked every ``every_s`` seconds whether it is well, and hangs if it has not answered within ``hangs_s``.
    """
    died = asyncio.create_task(process.wait())
    try:
        while not (await asyncio.wait([died], timeout=every_s))[0]:
            try:
                await asyncio.wait_for(wire.ask(address, token, hangs_s), hangs_s)
            except (WireError, TimeoutError):
                if not died.done():
                    process.kill()
                    await died
                    return f"has not answered for {hangs_s:g} s"
    finally:
        died.cancel()
    return "has died"


def belong() -> None:
    """Ties this process's life to its parent's: see :func:`die_with_parent`."""
    die_with_parent(int(os.environ.pop(PARENT, os.getppid())))


def belong_beside() -> None:
    """:func:`belong`, for a process that shares its parent's processors and is less urgent.

    It leaves the parent's process group, which a terminal signals, but not its session: Linux may share processors out
    between sessions first (autogroup), whatever the niceness of processes in them.
    """
    belong()
    os.setpgrp()


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when process ``parent`` dies; exits if that is no longer the parent."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve_host(parent: int) -> None:
    """For a process that a worker forks, and that needs no GPU: ties its life to its parent's, and its hands off CUDA.

    A forked process inherits what the driver knows its parent by.  As long as it lives, device memory of a killed
    worker is not free for the worker that replaces it.
    """
    die_with_parent(parent)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself is closed by now
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(DEVICES):
                os.dup2(null, int(descriptor), inheritable=False)  # CUDA's library may close that number again
    os.close(null)


def is_dying(pid: int) -> bool:
    """Whether a process is a zombie or has a pending SIGKILL; it executes no more user code."""
    try:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except OSError:
        return False
    pending = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
    return status["State"][0] in "ZX" or bool(pending >> (signal.SIGKILL - 1) & 1)
