"""Runs the forkserver of a node: it has imported all modules that workers need, and forks them in milliseconds.

It reads orders from standard input and reports events to the agent, one JSON object per line:

    {"start": name, "environment": {...}, "output": path or null}    -->    {"started": name, "pid": number}
                                                                             {"ended": name, "code": exit code}
                                                                             {"refuses": lines, "exit": exit code}
    {"ask": true}                                                    -->    {"ready": true}

It only imports: a process that has computed a gradient, started a thread or touched CUDA must not fork.  If a program's
imports touch CUDA, as Transformer Engine does with flash-attn, workers are new processes with their own imports.

It dies with the agent that started it, and its workers die with it.  Signals that ask the job to stop are blocked here;
a worker receives the signals that arrived before it was ready.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing.util
import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from moc import private_interfaces
from moc.cli_output import print_lines, print_traceback
from moc.errors import UserError, codes_in, with_code
from moc.files.decode import parse
from moc.files.safe_directory import open_without_links
from moc.runtime import environment, import_hook
from moc.runtime.child_processes import attach_to_parent, die_with_parent, report_descriptor
from moc.runtime.program import (
    REFUSED_EXIT_CODE,
    ProgramError,
    is_guarded,
    load_program,
    program_directory,
    read_program,
)
from moc.runtime.program import flag_errors as errors_of_flags
from moc.runtime.termination import FAILED, STOP_SIGNALS

_MAX_DESCRIPTORS = 1 << 16
_CUDA_CONTEXT_DEVICE = "/dev/nvidia-uvm"  # open while there is a CUDA context


def main(script: str, arguments: list[str]) -> None:
    """Imports the modules that workers need, then forks a worker per order until its input ends."""
    attach_to_parent()
    orders, events = os.dup(0), report_descriptor()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # programs print to stderr
    sys.argv = [script, *arguments]  # a program's imports may depend on its flags
    refusal, code = warm_up(script), FAILED
    if refusal is None:
        refusal, code = (
            errors_of_flags(script, arguments, int(os.environ.get(environment.JOB_SIZE, "1"))),
            REFUSED_EXIT_CODE,
        )
    if refusal is not None:
        os.write(events, json.dumps({"refuses": refusal, "exit": code}).encode() + b"\n")
        return
    import_hook.import_lazy_modules()  # a second that a refusal need not wait for
    can_fork = not has_touched_cuda()
    if not can_fork:
        print_lines(f"mocrun: {script} starts CUDA during import: workers import it again instead of being forked")
    gc.collect()
    gc.freeze()  # workers share all objects that exist now
    Forkserver(script, arguments, orders, events, can_fork).serve()


def has_touched_cuda() -> bool:
    """Returns whether this process has a CUDA context, of torch or a library; forked children could not compute."""
    import torch

    if torch.cuda.is_initialized():
        return True
    paths = (Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
    return any(str(path.readlink()).startswith(_CUDA_CONTEXT_DEVICE) for path in paths if path.is_symlink())


def warm_up(script: str) -> str | None:
    """Imports torch, and calls the script's ``warm_up()`` if a ``__main__`` guard makes loading it safe.

    Returns:
        The reason why no worker can run, from torch's check or ``warm_up()``; None if workers can run.
    """
    import torch

    torch.set_num_threads(1)  # threads of a pool would not survive the fork
    try:
        private_interfaces.require("mocrun", "snapshots")
    except private_interfaces.UnknownReleaseError as error:
        return f"mocrun: error: {with_code(error)}"
    try:
        if not is_guarded(read_program(script)):
            return None
    except ProgramError as error:
        return f"mocrun: error: {with_code(error)}"
    sys.path.insert(0, program_directory(script))
    import_hook.install()
    try:
        program = load_program(script, "__warm_up__")
        program.get("warm_up", import_hook.warm_up)()
    except SystemExit as exit_request:
        if isinstance(exit_request.code, str):
            if codes_in(exit_request.code):
                return exit_request.code
            refusal = UserError(
                f"{script} refuses to run: {exit_request.code}. Fix: correct what it names", code="worker-cannot-start"
            )
            return f"mocrun: error: {with_code(refusal)}"
        raise
    return None


class Forkserver:
    """Forks and reaps workers; reads orders from one descriptor, and writes events to another."""

    def __init__(self, script: str, arguments: list[str], orders: int, events: int, can_fork: bool = True):
        self._script, self._arguments, self._orders, self._events = script, arguments, orders, events
        self._can_fork = can_fork
        self._workers: dict[int, str] = {}
        self._wakeup_reader, self._wakeup_writer = os.pipe()  # a signal wakes select() by writing here
        for end in (self._wakeup_reader, self._wakeup_writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wakeup_writer)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Serves until the input ends; then the workers die with this process."""
        self._report({"ready": True})
        partial_line = b""
        while True:
            readable, _, _ = select.select([self._orders, self._wakeup_reader], [], [])
            if self._wakeup_reader in readable:
                os.read(self._wakeup_reader, 4096)
                self._report_exits()
            if self._orders in readable:
                data = os.read(self._orders, 1 << 16)
                if not data:
                    return
                *lines, partial_line = (partial_line + data).split(b"\n")
                for order in map(parse, lines):
                    if "ask" in order:
                        self._report({"ready": True})
                    else:
                        self._start(order)

    def _report(self, event: dict) -> None:
        os.write(self._events, json.dumps(event).encode() + b"\n")

    def _report_exits(self) -> None:
        while self._workers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if (name := self._workers.pop(pid, None)) is not None:  # imports may have started other processes
                self._report({"ended": name, "code": os.waitstatus_to_exitcode(status)})

    def _start(self, order: dict) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(order, parent)
        self._workers[pid] = order["start"]
        self._report({"started": order["start"], "pid": pid})

    def _become_worker(self, order: dict, parent: int) -> None:
        try:
            die_with_parent(parent)
            self._reset_inherited_state()
            os.environ.update(order["environment"])
            _raise_descriptor_limit()
            if order["output"] is not None:
                _copy_output(order["output"])
            if not self._can_fork:
                flags = subprocess._args_from_interpreter_flags()  # pyright: ignore[reportAttributeAccessIssue]
                code = (
                    "import sys; from moc.runtime import forkserver; forkserver.run_worker(sys.argv[1], sys.argv[2:])"
                )
                os.execv(sys.executable, [sys.executable, *flags, "-c", code, self._script, *self._arguments])
        except BaseException as error:
            print_traceback(error)
            os._exit(1)
        run_worker(self._script, self._arguments)

    def _reset_inherited_state(self) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, *STOP_SIGNALS):  # SIGINT too: a KeyboardInterrupt only prints a traceback
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        for descriptor in (self._orders, self._events, self._wakeup_reader, self._wakeup_writer):
            os.close(descriptor)


def _raise_descriptor_limit() -> None:
    """Raises this process's limit of open files; with the usual 1024, too many connections would end gloo."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_MAX_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _copy_output(path: str) -> None:
    """Copies this process's output to a file and to the console; on failure, only to the console.

    A process ``tee`` for each stream outlives this process, so that its last output is in the file, too.
    """
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = open_without_links(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            reader, writer = os.pipe()
            command = ["tee", "-a", "-i", f"/dev/fd/{file}"]
            subprocess.Popen(command, stdin=reader, stdout=stream, pass_fds=(file,), start_new_session=True)
            os.close(reader)
            os.dup2(writer, stream)
            os.close(writer)
        os.close(file)
    except OSError as error:
        print_lines(f"mocrun: {path} cannot be written ({error.strerror}): its worker writes here", error=True)


def run_worker(script: str, arguments: list[str]) -> NoReturn:
    """Runs the program as a worker, and exits with its code."""
    code = 1
    try:
        code = run_program(script, arguments)
    except BaseException as error:
        print_traceback(error)
    finally:
        # multiprocessing's own exit handler, which os._exit() skips
        multiprocessing.util._exit_function()  # pyright: ignore[reportAttributeAccessIssue]  # not in typeshed
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # the disk may be full
                stream.flush()
        os._exit(code)


def run_program(script: str, arguments: list[str]) -> int:
    """Runs a program as ``python SCRIPT ARGUMENTS`` would; returns its exit code."""
    sys.argv = [script, *arguments]
    import_hook.install()
    directory = program_directory(script)
    if sys.path[:1] != [directory]:
        sys.path.insert(0, directory)
    try:
        load_program(script, "__main__")
    except SystemExit as exit_request:
        if exit_request.code is None or isinstance(exit_request.code, int):
            return exit_request.code or 0
        print_lines(*str(exit_request.code).split("\n"), error=True)
        return 1
    except UserError as error:  # not handled by the program
        print_lines(f"{Path(script).name}: error (worker {os.environ.get('RANK')}): {with_code(error)}", error=True)
        return 1
    if (warning := import_hook.unused_warning()) is not None and os.environ.get("RANK", "0") == "0":
        print_lines(f"mocrun: {warning}", error=True)
    return 0


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
