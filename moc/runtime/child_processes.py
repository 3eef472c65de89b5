"""Starts child processes that die with their parent, and delivers stop signals to a launcher.

Children run in separate sessions, which terminal signals do not reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from moc.runtime import async_connections as wire
from moc.runtime.protocol import WireError
from moc.runtime.termination import STOPS, received_stops, stop_sentence

PARENT = "MOC_PARENT"
"""Environment variable set by :func:`start`: process ID of the parent."""

REPORTS = "MOC_REPORTS"
"""Environment variable: descriptor of the pipe over which a child reports to its parent (:func:`reports`)."""

STDERR = 2
"""Descriptor of this process's standard error."""

DEVICES = "/dev/nvidia"
"""Prefix of the device paths of GPUs."""

_ROOT = str(Path(__file__).resolve().parents[2])

_ISOLATED = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; module = sys.argv[3]; del sys.argv[1:4]; {dies}"
    "import runpy; runpy.run_module(module, run_name='__main__', alter_sys=True)"
)
"""Code equivalent to ``python -m MODULE``, but without the working directory in the module search path.

Python has ``-P`` for this since 3.11.  Our own root is last, for a checkout that is not installed.
"""

_LINE = 1 << 20  # largest report in bytes

_SET_PDEATHSIG = 1  # linux/prctl.h

_DIES = f"import ctypes, os; ctypes.CDLL(None).prctl({_SET_PDEATHSIG}, {int(signal.SIGKILL)}); "
_DIES += "os.getppid() == {parent} or os._exit(1); "
"""Code that does the same as :func:`die_with_parent` before that can be imported."""


def command_of(module: str, *arguments: str, dies_with: int | None = None) -> list[str]:
    """Returns a command line like ``python -m MODULE`` that imports nothing from the working directory.

    With ``dies_with``, its parent's ID, the process is tied to the parent before the import, which may take a second.
    """
    dies = "" if dies_with is None else _DIES.format(parent=dies_with)
    return [sys.executable, "-c", _ISOLATED.format(dies=dies), _ROOT, "-m", module, *arguments]


async def start(module: str, *arguments: str, env: dict[str, str] | None = None, **how) -> asyncio.subprocess.Process:
    """Starts a module, which must first call :func:`belong`, without imports from the working directory.

    The child starts with :data:`~moc.runtime.termination.STOPS` blocked.  So these signals cannot kill it, even before
    it has its own session.  A child that handles them unblocks them and then receives the pending ones.

    Args:
        module: module to run, as by ``python -m``.
        arguments: command line of the module.
        env: environment of the child; None to inherit this process's.
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
    """Starts a child as :func:`start` does; ``stdout`` of the result reads its reports (:func:`reports`)."""
    with report_pipe() as (pipe, end):
        variables = (os.environ if env is None else env) | {REPORTS: str(end)}
        process = await start(module, *arguments, env=variables, stdout=STDERR, pass_fds=(*pass_fds, end), **how)
        process.stdout = reader = asyncio.StreamReader(_LINE)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return process


@contextlib.contextmanager
def report_pipe() -> Iterator[tuple[FileIO, int]]:
    """Yields both ends of a new pipe: one stays open in this process; a child started in the block inherits the other.

    The child gets its end from :data:`REPORTS`, and writes to :func:`reports`.  Its standard output must be
    :data:`STDERR`.  Then output of ``sitecustomize.py`` or a library is on the console, not in reports.
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
    """Returns a descriptor for one-line reports to the parent: its pipe, or else a copy of standard output.

    Call it once, and close the descriptor.
    """
    descriptor = os.environ.pop(REPORTS, None)  # children of this process do not have this descriptor
    if descriptor is None:
        return os.dup(1)
    os.set_inheritable(int(descriptor), False)
    return int(descriptor)


async def until_over(
    process: asyncio.subprocess.Process, address: str, token: bytes, every_s: float, hangs_s: float
) -> str:
    """Waits until a child that serves an address dies, or hangs and is killed; returns a clause with the reason.

    A health check is sent every ``every_s`` seconds.  The child hangs if it does not answer within ``hangs_s``.
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
    """Makes this process die with its parent: see :func:`die_with_parent`."""
    die_with_parent(int(os.environ.pop(PARENT, os.getppid())))


def belong_beside() -> None:
    """Does the same as :func:`belong`, for a low-priority process on its parent's processors.

    It leaves the parent's process group, which receives terminal signals, but stays in its session.  Linux may divide
    processor time between sessions first (autogroup), regardless of the niceness of their processes.
    """
    belong()
    os.setpgrp()


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when process ``parent`` dies; exits if it is no longer the parent."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve_host(parent: int) -> None:
    """Makes a process forked by a worker die with its parent, and releases its inherited GPU descriptors.

    These descriptors identify the parent to the driver.  Until they are released, the device memory of a killed worker
    is not available to its replacement.
    """
    die_with_parent(parent)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(DEVICES):
                os.dup2(null, int(descriptor), inheritable=False)  # the CUDA library may close this number again
    os.close(null)


def is_dying(pid: int) -> bool:
    """Whether a process is a zombie or has a pending SIGKILL; it executes no more user code."""
    try:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except OSError:
        return False
    pending = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
    return status["State"][0] in "ZX" or bool(pending >> (signal.SIGKILL - 1) & 1)


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
