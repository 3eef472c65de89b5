"""Worlds of real worker processes, forked from one warm process: a test pays milliseconds, not seconds of imports.

    losses = run_world(4, "tests.integration.bodies:train", flags={...})      # what each worker returned

    world = start_world(2, "tests.integration.bodies:train", flags={...})     # to do something to it meanwhile
    os.kill(world.pids[1], signal.SIGTERM)
    results = world.wait()

Arguments and results travel as JSON.  A world that takes too long is killed, and with a worker that fails the others
are ended, as torchrun would; the error shows what the workers said.  A process that a worker leaves behind is an
error too.  The server (:mod:`tests.world_server`) starts at the first world, and everything dies with pytest.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests import warm

REPOSITORY = Path(__file__).resolve().parents[1]
_TAIL = 2000  # characters of each worker's output in an error


class WorldFailed(AssertionError):
    """A world did not end as it should; the message holds the ends of its workers' outputs."""


@dataclass(frozen=True)
class Result:
    """How a worker ended.

    Attributes:
        exit: its exit code; minus the number of the signal that killed it.
        value: what its body returned; None if it did not.
        output: all that it wrote to stdout and stderr.
    """

    exit: int
    value: object
    output: str


class World:
    """A running world.

    Attributes:
        pids: process numbers of its workers, by rank.
    """

    def __init__(self, request: dict):
        self._request = request
        self._connection = _server().connect()
        self._lines = self._connection.makefile("rw", encoding="utf-8")
        print(json.dumps(request), file=self._lines, flush=True)
        self.pids: list[int] = self._receive()["pids"]

    def kill(self) -> None:
        """Kills all workers at once, as a power failure would."""
        print("kill", file=self._lines, flush=True)

    def ended(self) -> bool:
        """Whether all workers have ended."""
        return bool(select.select([self._connection], [], [], 0)[0])

    def wait(self) -> list[Result]:
        """Waits for all workers; how they ended, by rank.

        Raises:
            WorldFailed: they took too long, or left a process behind.
        """
        report = self._receive()
        self._connection.close()
        results = [Result(**worker) for worker in report["workers"]]
        if report["problem"]:
            raise WorldFailed(f"{self._request['body']}: {report['problem']}{tails(results)}")
        return results

    def _receive(self) -> dict:
        line = self._lines.readline()
        if not line:
            raise WorldFailed("the world server died; see what it wrote above")
        return json.loads(line)


def start_world(size: int, body: str, *, timeout: float = 240, patience: float = 60, **arguments) -> World:
    """Starts ``size`` workers.

    Args:
        size: number of workers; each finds RANK, WORLD_SIZE, MASTER_ADDR, ... as torchrun sets them.
        body: the function that they call, as ``package.module:function``.
        timeout: seconds until the world is killed.
        patience: seconds that workers have when another has failed, and processes when their worker has ended.
        arguments: keyword arguments of the function, as JSON knows them.
    """
    return World({"size": size, "body": body, "timeout": timeout, "patience": patience, "arguments": arguments})


def run_world(size: int, body: str, **arguments) -> list:
    """Runs a world to its end; what each worker returned, by rank.  Arguments as for :func:`start_world`.

    Raises:
        WorldFailed: a worker failed, or as in :meth:`World.wait`.
    """
    results = start_world(size, body, **arguments).wait()
    if any(result.exit for result in results):
        raise WorldFailed(f"{body}: exit codes {[r.exit for r in results]}{tails(results)}")
    return [result.value for result in results]


def tails(results: list[Result]) -> str:
    """The ends of the workers' outputs."""
    return "".join(
        f"\n--- worker {rank} (exit {result.exit})\n{result.output[-_TAIL:]}" for rank, result in enumerate(results)
    )


class _Server:
    def __init__(self):
        self._directory = tempfile.mkdtemp(prefix="worlds-")
        self.path = f"{self._directory}/socket"
        command = [sys.executable, "-m", "tests.world_server", self.path, warm.PADDING]
        # on machines with GPUs too these tests are about gloo
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": _python_path()}
        self._process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True)
        atexit.register(self.stop)
        if self._process.stdout.readline() != "ready\n":
            raise WorldFailed("the world server did not start; see what it wrote above")

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.path)
        return connection

    def stop(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


_running: _Server | None = None


def _server() -> _Server:
    global _running
    if _running is None:
        _running = _Server()
    return _running


def server_path() -> str:
    """Where the server listens, which is started if need be."""
    return _server().path


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
