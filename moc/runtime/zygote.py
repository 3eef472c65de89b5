"""A warm process that workers are forked from: what they need is imported already, so one is there in milliseconds.

It reads orders from its standard input and writes what happens to its standard output, one JSON object a line:

    {"start": name, "environment": {...}, "output": path or null}    -->    {"started": name, "pid": number}
                                                                             {"ended": name, "code": exit code}
    {"ask": true}                                                    -->    {"ready": true}

It only imports: a process that has computed a gradient, started a thread or touched CUDA must not fork.  It dies with
the agent that started it, and its workers with it, so that nothing is left behind.  Signals that ask the job to stop
are blocked here; a worker gets those that came before it was ready for them.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import json
import multiprocessing.util
import os
import runpy
import select
import signal
import sys
import traceback
from pathlib import Path

from moc.runtime.children import belong, die_with_parent
from moc.runtime.signals import STOPS


def main(script: str, arguments: list[str]) -> None:
    """Warms up, then forks whatever is ordered, until its input ends."""
    belong()
    orders, tell = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # programs write to their own output; ours is for the agent alone
    warm_up(script)
    gc.collect()
    gc.freeze()  # what is there stays, and is shared by all workers
    Zygote(script, arguments, orders, tell).serve()


def warm_up(script: str) -> None:
    """Imports torch, and calls the script's own ``warm_up()`` if it has one that can be reached without running it."""
    import torch

    torch.set_num_threads(1)  # a pool of threads would not be there after a fork
    if not _is_guarded(Path(script).read_text()):
        return
    sys.path.insert(0, str(Path(script).resolve().parent))
    program = runpy.run_path(script, run_name="__warm_up__")
    if "warm_up" in program:
        program["warm_up"]()


def _is_guarded(source: str) -> bool:
    """Whether a script does its work under ``if __name__ == "__main__"``, so that importing it runs nothing."""
    guards = (node.test for node in ast.parse(source).body if isinstance(node, ast.If))
    return any(isinstance(test, ast.Compare) and "__name__" in ast.dump(test.left) for test in guards)


class Zygote:
    """Forks, and waits for what it has forked.

    Args:
        script: the program of the workers.
        arguments: what it is called with.
        orders: descriptor to read from.
        tell: descriptor to write to.
    """

    def __init__(self, script: str, arguments: list[str], orders: int, tell: int):
        self._script, self._arguments, self._orders, self._tell = script, arguments, orders, tell
        self._workers: dict[int, str] = {}
        self._woken, self._wake = os.pipe()  # a signal wakes select() by writing here
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Until the input ends; then the workers die with this process."""
        self._say({"ready": True})
        waiting = b""
        while True:
            readable, _, _ = select.select([self._orders, self._woken], [], [])
            if self._woken in readable:
                os.read(self._woken, 4096)
                self._tell_ended()
            if self._orders in readable:
                data = os.read(self._orders, 1 << 16)
                if not data:
                    return
                *lines, waiting = (waiting + data).split(b"\n")
                for order in map(json.loads, lines):
                    if "ask" in order:
                        self._say({"ready": True})
                    else:
                        self._start(order)

    def _say(self, what: dict) -> None:
        os.write(self._tell, json.dumps(what).encode() + b"\n")

    def _tell_ended(self) -> None:
        while self._workers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self._say({"ended": self._workers.pop(pid), "code": os.waitstatus_to_exitcode(status)})

    def _start(self, order: dict) -> None:
        own = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(order, own)
        self._workers[pid] = order["start"]
        self._say({"started": order["start"], "pid": pid})

    def _become_worker(self, order: dict, parent: int) -> None:
        code = 1
        try:
            die_with_parent(parent)
            self._forget_zygote()
            os.environ.update(order["environment"])
            if order["output"] is not None:
                _write_to(order["output"])
            code = run(self._script, self._arguments)
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except BaseException:
            traceback.print_exc()
        finally:
            # what a Python program does at its end with processes of its own
            multiprocessing.util._exit_function()  # pyright: ignore[reportAttributeAccessIssue]  # not in typeshed
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):  # its disk may be full
                    stream.flush()
            os._exit(code)

    def _forget_zygote(self) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        for descriptor in (self._orders, self._tell, self._woken, self._wake):
            os.close(descriptor)


def _write_to(path: str) -> None:
    """Lets this process write to a file; to where the launcher writes, if that cannot be."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        print(f"mocrun: {path} cannot be written ({error.strerror}): its worker writes here", file=sys.stderr)
        return
    os.dup2(output, 1)
    os.dup2(output, 2)


def run(script: str, arguments: list[str]) -> int:
    """Runs a program as ``python SCRIPT ARGUMENTS`` would; its exit code."""
    sys.argv = [script, *arguments]
    directory = str(Path(script).resolve().parent)
    if sys.path[:1] != [directory]:
        sys.path.insert(0, directory)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
