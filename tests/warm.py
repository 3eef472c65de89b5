"""Programs of tests, forked from a process that has imported everything: a job costs tenths of a second, not eight.

    with warm.starts():
        process = subprocess.Popen([sys.executable, "-m", "moc.launch", ...], start_new_session=True)

Such a process equals a cold one: it is a child of its starter, which receives its exit code, with the given command
line, environment, directory and descriptors.  Launchers and controllers start their processes in the same way.
Settings that Python reads at its start (options of the C library, ``PYTHON*``) are the server's, except for
``PYTHONWARNINGS=ignore``; tests of these start their programs cold.

A process that runs threads must not fork, and a launcher does.  So each gets a server of its own before it begins,
which forks for it.  A ``sitecustomize.py`` in the first directory of ``PYTHONPATH`` runs first, as in a cold process::

    server -- forks for each request a --> middle -- forks and ends --> program, by then a child of the requester
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing.util
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

PADDING = " " * 4096
"""An argument of the server, in whose place its forks have their command lines."""

STARTERS = ("moc.launch", "moc.runtime.controller", "torch.distributed.run")
"""Programs that start others."""

_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_cold = getattr(subprocess, "_fork_exec", None)  # from Python 3.11 on; before, all starts are cold


@contextlib.contextmanager
def starts(any_session: bool = False) -> Iterator[None]:
    """Inside, ``subprocess`` forks Python programs that get a session of their own from the warm process of worlds.

    Args:
        any_session: also others, which get one nevertheless.
    """
    from tests import worlds

    if _cold is None:
        yield
        return
    _fork_at(worlds.server_path, any_session)
    try:
        yield
    finally:
        subprocess._fork_exec = _cold


def _fork_at(address: Callable[[], str], any_session: bool = False) -> None:
    """From now on, ``subprocess`` has programs forked by the server at an address."""
    subprocess._fork_exec = lambda *how: _fork(address(), how) if _can_be_forked(how, any_session) else _cold(*how)


def _can_be_forked(how: tuple, any_session: bool) -> bool:
    """Whether it is Python, in a session of its own and with nothing unusual."""
    executable, own_session, rest = how[1][0], how[15] or any_session, how[16:-1]
    return executable == os.fsencode(sys.executable) and own_session and rest == (-1, None, None, None, -1, None)


def _fork(address: str, how: tuple) -> int:
    """As ``_posixsubprocess.fork_exec``, but for the exec."""
    arguments, _, _, kept, directory, environment = how[:6]
    read, write, errors, told = how[6], how[9], how[11], how[13]
    standard = [descriptor if descriptor != -1 else own for own, descriptor in enumerate((read, write, errors))]
    kept = [descriptor for descriptor in kept if descriptor != told]
    variables = os.environb if environment is None else dict(one.split(b"=", 1) for one in environment)
    request = {
        "parent": os.getpid(),
        "arguments_of_program": [os.fsdecode(one) for one in arguments],
        "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()},
        "directory": os.fsdecode(directory or os.getcwd()),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "descriptors": [0, 1, 2, *kept],
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        _prctl(_SET_CHILD_SUBREAPER, 1)  # the middle process ends, and the program becomes a child of this one
        try:
            connection.sendall(json.dumps(request).encode() + b"\n")
            connection.recv(1)
            socket.send_fds(connection, [b"\n"], [*standard, *kept])
            pid = connection.makefile("rb").readline()
        finally:
            _prctl(_SET_CHILD_SUBREAPER, 0)
    if not pid:
        raise RuntimeError("the warm process did not start a program; see what it wrote above")
    return int(pid)


def start(request: dict, connection: socket.socket, serve_forks) -> None:
    """In the middle process: forks the program that was asked for.

    Args:
        request: what :func:`_fork` has sent.
        connection: to the process that asks.
        serve_forks: has a fork of this process serve a listener for ever, for a program that starts others.
    """
    middle = os.getpid()
    if os.fork():
        return
    while os.getppid() == middle:
        time.sleep(0.0005)
    if os.getppid() != request["parent"]:
        os._exit(1)  # who asked is gone
    code = 1
    try:
        code = _run(request, connection, serve_forks)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        multiprocessing.util._exit_function()  # what a Python program does at its end with processes of its own
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)


def _run(request: dict, connection: socket.socket, serve_forks) -> int:
    _, *options = request["arguments_of_program"]
    if options[0] == "-u":  # as torchrun does: its output is printed at its end
        options = options[1:]
    if options[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        options = options[2:]
    if isolated := options[0] == "-c":  # a child of ours: the code, our root, and then as usual
        options = options[3:]
    if options[0] == "-m" and options[1] in STARTERS:
        _fork_at(_own_server(serve_forks, connection))
    connection.sendall(b"\n")
    _, descriptors, *_ = socket.recv_fds(connection, 1, 64)
    os.setsid()
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    _show(request["arguments_of_program"])
    _take(descriptors, request["descriptors"], connection)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    sys.orig_argv = request["arguments_of_program"]
    scripts = [Path(one) for one in options if one.endswith(".py") and Path(one).is_file()]
    if scripts and not any(re.search("megatron|pretrain", script.read_text()) for script in scripts):
        sys.modules.pop("moc.megatron", None)  # its presence has the launcher run the script once more, for its flags
    site = Path(os.environ.get("PYTHONPATH", "").partition(":")[0]) / "sitecustomize.py"
    try:
        if site.is_file():
            runpy.run_path(str(site))
        if options[0] == "-m":
            sys.argv = options[1:]
            sys.path[:1] = [] if isolated else [os.getcwd()]
            sys.modules.pop(options[1], None)
            runpy.run_module(options[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = options
            sys.path[0] = str(Path(options[0]).resolve().parent)
            runpy.run_path(options[0], run_name="__main__")
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    return 0


def _own_server(serve_forks, connection: socket.socket):
    """Forks a server that dies with this process; the way to its address."""
    from moc.runtime import child_processes

    path = f"{tempfile.gettempdir()}/warm-{os.getpid()}-{time.monotonic_ns()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{path}")  # it has a name, but no file that could be left behind
    listener.listen()
    parent = os.getpid()
    if os.fork() == 0:
        try:
            child_processes.die_with_parent(parent)
            connection.close()
            os.setsid()
            serve_forks(listener)
        finally:
            os._exit(1)
    listener.close()
    return lambda: f"\0{path}"


def _take(descriptors: list[int], numbers: list[int], connection: socket.socket) -> None:
    """Gives received descriptors the requester's numbers, and reports that this process has started."""
    import fcntl

    beyond = max(*numbers, *descriptors, connection.fileno()) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, beyond) for descriptor in descriptors]
    told = fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD, beyond)
    connection.close()
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.write(told, f"{os.getpid()}\n".encode())
    os.close(told)


def _show(arguments: list[str]) -> None:
    """Replaces the server's command line, where Linux reads it from."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    line = b"".join(os.fsencode(argument) + b"\0" for argument in arguments)[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)
