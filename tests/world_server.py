"""The warm process behind :mod:`tests.worlds`: imports everything once, then forks worlds of workers.

server -- forks for each connection a --> supervisor -- forks --> workers

A supervisor watches one world: it ends with its connection, and kills whatever its workers leave behind.  The server
computes nothing itself, since a process that has run autograd must not fork.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import multiprocessing.util
import os
import random
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests import warm

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_LEAST_PATIENCE = 20  # seconds that processes of an ended worker have to end, on a busy machine


def serve(path: str) -> None:
    """Forks a supervisor for each connection to the Unix socket at ``path``, for ever."""
    die_with_parent()
    warm_up()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    serve_forks(listener)


def serve_forks(listener: socket.socket) -> None:
    """Forks a supervisor for each connection to a listener, for ever."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for supervisors
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            supervise(connection)
            os._exit(0)
        connection.close()


def warm_up() -> None:
    """Imports what workers need, without starting a thread or computing a gradient."""
    import torch

    torch.set_num_threads(1)
    import moc.megatron  # adapts megatron-core, before others import it

    for module in ("megatron.pretraining.entry.gpt", "pretrain_gpt_moe", *_IMPORTED_LATE):
        importlib.import_module(module)
    moc.megatron.warm_up()
    moc.megatron.import_lazy_modules()
    from megatron.pretraining.config.groups import all_flags

    all_flags()  # read from the classes once, not in each worker
    if importlib.util.find_spec("deepspeed"):
        from megatron.pretraining.engine.zero import build

        build.load()
    gc.collect()
    gc.freeze()


# what torch and megatron-core import only while they work
_IMPORTED_LATE = (
    "moc.launch",
    "moc.runtime.controller",
    "moc.runtime.replica_server",
    "moc.runtime.forkserver",
    "torch._dynamo",
    "torch._inductor.utils",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.tokenizers.text.models.gpt_tokenizer",
    "multiprocessing.popen_fork",
)


def supervise(connection: socket.socket) -> None:
    """Runs one world and reports how its workers ended; or starts a program (:mod:`tests.warm`)."""
    die_with_parent()
    lines = connection.makefile("rw", encoding="utf-8")
    request = json.loads(lines.readline())
    if "arguments_of_program" in request:
        return warm.start(request, connection, serve_forks)
    _prctl(_SET_CHILD_SUBREAPER, 1)  # orphans of workers become our children: none is overlooked
    size, port = request["size"], _free_port()
    files = [(tempfile.TemporaryFile(), tempfile.TemporaryFile()) for _ in range(size)]
    pids = [_fork_worker(request, rank, port, *files[rank]) for rank in range(size)]
    print(json.dumps({"pids": pids}), file=lines, flush=True)

    exits, problem = _watch(pids, connection, request)
    strays = _end_strays(max(request["patience"], _LEAST_PATIENCE))
    if strays and not problem:
        problem = f"workers left processes behind: {strays}"
    workers = [
        {"exit": code, "value": json.loads(_content(value) or "null"), "output": _content(output)}
        for code, (value, output) in zip(exits, files, strict=True)
    ]
    print(json.dumps({"workers": workers, "problem": problem}), file=lines, flush=True)


def _watch(pids: list[int], connection: socket.socket, request: dict) -> tuple[list[int], str | None]:
    """Waits for the workers; their exit codes, and what was wrong."""
    exits: dict[int, int] = {}
    problem, deadline = None, time.monotonic() + request["timeout"]
    while len(exits) < len(pids):
        for pid in set(pids) - set(exits):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                exits[pid] = os.waitstatus_to_exitcode(status)
                if exits[pid]:
                    deadline = min(deadline, time.monotonic() + request["patience"])
        late = time.monotonic() > deadline
        if late and not any(exits.values()):
            problem = f"killed after {request['timeout']} s"
        if late or _asked_to_kill(connection):
            for pid in set(pids) - set(exits):
                os.kill(pid, signal.SIGKILL)
    return [exits[pid] for pid in pids], problem


def _asked_to_kill(connection: socket.socket) -> bool:
    """Waits a moment; whether the test asked to kill the world, or is gone."""
    readable, _, _ = select.select([connection], [], [], 0.005)
    return bool(readable)


def _end_strays(patience: float) -> list[str]:
    """Waits for what workers left behind; kills and names what does not end by itself."""
    strays, deadline = {}, time.monotonic() + patience
    while True:
        try:
            done, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return list(strays.values())
        if not done:
            time.sleep(0.005)
        if not done and time.monotonic() > deadline:
            for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                strays[pid] = Path(f"/proc/{pid}/stat").read_text().partition(")")[0] + ")"
                os.kill(int(pid), signal.SIGKILL)


def _fork_worker(request: dict, rank: int, port: int, value, output) -> int:
    pid = os.fork()
    if pid:
        return pid
    die_with_parent()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    size = str(request["size"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    code = 1
    try:
        module, _, function = request["body"].partition(":")
        answer = getattr(importlib.import_module(module), function)(**request["arguments"])
        value.write(json.dumps(answer).encode())
        value.flush()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    multiprocessing.util._exit_function()  # what a Python program does at its end with processes of its own
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _content(file) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _free_port() -> int:
    """A free port that the kernel does not hand out to other sockets meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


def die_with_parent() -> None:
    """Asks Linux to kill this process when its parent dies."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    serve(sys.argv[1])
