"""Starts child processes that die with their parent, and delivers stop signals to a launcher.

Children run in separate sessions, which terminal signals do not reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from moc.runtime import async_connections
from moc.runtime.protocol import WireError
from moc.runtime.termination import STOP_SIGNALS, handled_stop_signals, stop_message

PARENT = "MOC_PARENT"
"""Environment variable set by :func:`start`: process ID of the parent."""

REPORT_DESCRIPTOR = "MOC_REPORTS"
"""Environment variable: descriptor of the pipe over which a child reports to its parent (:func:`report_descriptor`)."""

STDERR = 2
"""Descriptor of this process's standard error."""

GPU_DEVICES = "/dev/nvidia"
"""Prefix of the device paths of GPUs."""

_ROOT = str(Path(__file__).resolve().parents[2])

_RUN_MODULE = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]]; module = sys.argv[3]; del sys.argv[1:4]; {dies}"
    "import runpy; runpy.run_module(module, run_name='__main__', alter_sys=True)"
)
"""Code equivalent to ``python -m MODULE``, but without the working directory in the module search path.

Python has ``-P`` for this since 3.11.  Our own root is last, for a checkout that is not installed.
"""

_MAX_REPORT_BYTES = 1 << 20  # largest report in bytes

_SET_PDEATHSIG = 1  # linux/prctl.h

_DIE_WITH_PARENT = f"import ctypes, os; ctypes.CDLL(None).prctl({_SET_PDEATHSIG}, {int(signal.SIGKILL)}); "
_DIE_WITH_PARENT += "os.getppid() == {parent} or os._exit(1); "
"""Code that does the same as :func:`die_with_parent` before that can be imported."""


def module_command(module: str, *arguments: str, parent: int | None = None) -> list[str]:
    """Returns a command line like ``python -m MODULE`` that imports nothing from the working directory.

    With ``parent``, its parent's ID, the process is tied to the parent before the import, which may take a second.
    """
    prologue = "" if parent is None else _DIE_WITH_PARENT.format(parent=parent)
    return [sys.executable, "-c", _RUN_MODULE.format(dies=prologue), _ROOT, "-m", module, *arguments]


async def start(
    module: str, *arguments: str, env: dict[str, str] | None = None, **options
) -> asyncio.subprocess.Process:
    """Starts a module, which must first call :func:`attach_to_parent`, without imports from the working directory.

    The child starts with :data:`~moc.runtime.termination.STOP_SIGNALS` blocked.  So these signals cannot kill it, even
    before it has its own session.  A child that handles them unblocks them and then receives the pending ones.

    Args:
        module: module to run, as by ``python -m``.
        arguments: command line of the module.
        env: environment of the child; None to inherit this process's.
        options: further arguments of :func:`asyncio.create_subprocess_exec`.
    """
    variables = (os.environ if env is None else env) | {PARENT: str(os.getpid())}
    command = module_command(module, *arguments)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:  # the child is forked before the first suspension, so no other task can unblock the signals earlier
        return await asyncio.create_subprocess_exec(*command, env=variables, start_new_session=True, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


async def start_reporting(
    module: str, *arguments: str, env: dict[str, str] | None = None, pass_fds: tuple[int, ...] = (), **options
) -> asyncio.subprocess.Process:
    """Starts a child as :func:`start` does; ``stdout`` of the result reads its reports (:func:`report_descriptor`)."""
    with report_pipe() as (pipe, end):
        variables = (os.environ if env is None else env) | {REPORT_DESCRIPTOR: str(end)}
        process = await start(module, *arguments, env=variables, stdout=STDERR, pass_fds=(*pass_fds, end), **options)
        process.stdout = reader = asyncio.StreamReader(_MAX_REPORT_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return process


@contextlib.contextmanager
def report_pipe() -> Iterator[tuple[FileIO, int]]:
    """Yields both ends of a new pipe: one stays open in this process; a child started in the block inherits the other.

    The child gets its end from :data:`REPORT_DESCRIPTOR`, and writes to :func:`report_descriptor`.  Its standard output
    must be :data:`STDERR`.  Then output of ``sitecustomize.py`` or a library is on the console, not in reports.
    """
    read_end, write_end = os.pipe()
    pipe = open(read_end, "rb", buffering=0)
    try:
        yield pipe, write_end
    except BaseException:
        pipe.close()
        raise
    finally:
        os.close(write_end)


def report_descriptor() -> int:
    """Returns a descriptor for one-line reports to the parent: its pipe, or else a copy of standard output.

    Call it once, and close the descriptor.
    """
    descriptor = os.environ.pop(REPORT_DESCRIPTOR, None)  # children of this process do not have this descriptor
    if descriptor is None:
        return os.dup(1)
    os.set_inheritable(int(descriptor), False)
    return int(descriptor)


async def wait_or_kill(
    process: asyncio.subprocess.Process, address: str, token: bytes, interval_s: float, timeout_s: float
) -> str:
    """Waits until a child that serves an address dies, or hangs and is killed; returns a clause with the reason.

    A health check is sent every ``interval_s`` seconds.  The child hangs if it does not answer within ``timeout_s``.
    """
    exit_task = asyncio.create_task(process.wait())
    try:
        while not (await asyncio.wait([exit_task], timeout=interval_s))[0]:
            try:
                await asyncio.wait_for(async_connections.check_health(address, token, timeout_s), timeout_s)
            except (WireError, TimeoutError):
                if not exit_task.done():
                    process.kill()
                    await exit_task
                    return f"has not answered for {timeout_s:g} s"
    finally:
        exit_task.cancel()
    return "has died"


def attach_to_parent() -> None:
    """Makes this process die with its parent: see :func:`die_with_parent`."""
    die_with_parent(int(os.environ.pop(PARENT, os.getppid())))


def attach_in_background() -> None:
    """Does the same as :func:`attach_to_parent`, for a low-priority process on its parent's processors.

    It leaves the parent's process group, which receives terminal signals, but stays in its session.  Linux may divide
    processor time between sessions first (autogroup), regardless of the niceness of their processes.
    """
    attach_to_parent()
    os.setpgrp()


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when process ``parent`` dies; exits if it is no longer the parent."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def attach_without_gpus(parent: int) -> None:
    """Makes a process forked by a worker die with its parent, and releases its inherited GPU descriptors.

    These descriptors identify the parent to the driver.  Until they are released, the device memory of a killed worker
    is not available to its replacement.
    """
    die_with_parent(parent)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(GPU_DEVICES):
                os.dup2(null, int(descriptor), inheritable=False)  # the CUDA library may close this number again
    os.close(null)


def begin_reader(begin: Callable[[int], None] | None, number: int) -> None:
    """Initializes a reader process of a DataLoader, which dies with its worker and does not use the worker's GPU.

    A reader of a killed worker has the worker's sockets open and may wait forever: its pipe to the worker has another
    end in each reader.  A reader that a fork server starts only has torch's own check, every 5 s.
    """
    worker = multiprocessing.parent_process()
    if worker is not None and worker.pid is not None:
        if not worker.is_alive():
            os._exit(1)
        if os.getppid() == worker.pid:
            attach_without_gpus(worker.pid)
    if begin is not None:
        begin(number)


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
        super().__init__(stop_message(number, 128 + number, None))
        self.number = number


class Signals:
    """Delivers every stop signal to each listener, including signals that arrived before it registered."""

    def __init__(self):
        # an inherited SIG_IGN would discard children's exit codes, so that each would seem to fail
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._listeners: list[Callable[[int], object]] = []
        self._received: list[int] = []
        for number in handled_stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # launchers start their children with these blocked

    @contextlib.contextmanager
    def deliver_to(self, listener: Callable[[int], object]) -> Iterator[None]:
        """Calls a listener with each signal number within the block."""
        self._listeners.append(listener)
        try:
            for number in self._received:
                listener(number)
            yield
        finally:
            self._listeners.remove(listener)

    async def cancel_on_signal(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Awaits a coroutine; a stop signal cancels it and raises StoppedError."""
        task = asyncio.create_task(coroutine)
        with self.deliver_to(lambda _: task.cancel()):
            try:
                return await task
            except asyncio.CancelledError:
                raise StoppedError(self._received[0]) from None

    def _receive(self, number: int) -> None:
        self._received.append(number)
        for listener in self._listeners:
            listener(number)
