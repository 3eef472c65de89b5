"""The process that looks after one node: has workers forked, sees them end, and speaks for them to the controller."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from moc.runtime import async_connections as wire
from moc.runtime import children, environment
from moc.runtime.hangs import Limits
from moc.runtime.keeper import keep
from moc.runtime.message import Message
from moc.runtime.signals import StoppedError
from moc.runtime.wire import PeerGoneError, WireError

SAYS_S = 1.0
"""How often an agent tells the controller that it is there."""

_log = logging.getLogger("moc")


class LostError(RuntimeError):
    """What the agent cannot do without is gone."""


@dataclass
class _Process:
    """A worker of this node, and what the controller knows of it; see :class:`moc.runtime.membership.Worker`."""

    name: str
    rank: int
    together: bool
    built: bool = False
    here: int = -1
    pid: int | None = None
    connection: wire.AsyncConnection | None = None
    heard: float = 0.0
    section: str | None = None
    since: float = 0.0
    waits: bool = False
    why_killed: str = ""


@dataclass(frozen=True)
class Node:
    """What an agent is told.

    Attributes:
        number: of the node, from 0; which workers it has follows from the place that it is given.
        per_node: workers.
        size: workers of the job.
        controller: its address.
        token: the job's.
        directory: of this agent's own socket.
        logs: directory for the output of workers; None to let them write where this process does.
        silence_s: a worker that has said nothing for so long is lost.
        hang_caps: seconds that a worker may be in a section, by section; see :mod:`moc.runtime.hangs`.
        patience_s: how long the controller may be gone, and how long workers may take to leave when the job is over.
    """

    number: int
    per_node: int
    size: int
    controller: str
    token: bytes
    directory: Path
    logs: Path | None
    silence_s: float
    hang_caps: dict[str, float]
    patience_s: float


class Agent:
    """Runs a node's part of the job.

    Args:
        node: which.
        command: the workers' program and its arguments.
    """

    def __init__(self, node: Node, command: list[str]):
        self._node, self._command = node, command
        self._workers: dict[str, _Process] = {}
        self._generation, self._reason, self._news = 0, "", time.monotonic()
        self._limits = Limits(node.hang_caps)
        self._asked: int | None = None  # by a signal, to stop
        self._joined = False  # the controller has heard of this node
        self._controller: wire.AsyncConnection | None = None
        self._ended: asyncio.Future[dict] = asyncio.get_running_loop().create_future()
        self._keeper = f"unix:{node.directory}/keeper"

    async def run(self) -> int:
        """Until the job is over; its exit code.

        Raises:
            LostError: the controller, or what forks workers, is gone.
            StoppedError: the node was asked to stop before it had found the controller.
        """
        address = f"unix:{self._node.directory}/agent"
        async with await wire.serve(address, self._node.token, self._serve_worker):
            self._zygote = await self._start_zygote()
            keeping = keep(self._node.controller, self._keeper, self._node.token)
            jobs = self._hear_zygote(), self._hear_controller(), self._watch(), keeping
            tasks = [asyncio.create_task(job) for job in jobs]
            try:
                await asyncio.wait([self._ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
                return await self._let_leave()
            finally:
                for task in tasks:
                    task.cancel()
                if self._controller is not None:
                    self._controller.close()  # this process may live on, and the node is lost
                with contextlib.suppress(ProcessLookupError):
                    self._zygote.kill()  # workers that are left die with it
                await self._zygote.wait()

    def signal(self, number: int) -> None:
        """The launcher got a signal: workers get it too, and whoever ends now is not replaced."""
        self._asked = number
        self._tell("stopping", signal=number)
        for worker in self._workers.values():
            self._signal(worker, number)

    async def _start_zygote(self) -> asyncio.subprocess.Process:
        return await children.start(
            "moc.runtime.zygote",
            *self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            limit=1 << 20,
            env=environment.UNLESS_SET | os.environ | environment.SET,
        )

    async def _hear_zygote(self) -> None:
        while line := await self._zygote.stdout.readline():
            said = json.loads(line)
            if "started" in said:
                worker = self._workers.get(said["started"])
                if worker is None:  # it was not wanted any more before it was there
                    os.kill(said["pid"], signal.SIGKILL)
                    continue
                worker.pid = said["pid"]
                _log.info("worker %d is process %d", worker.rank, worker.pid)
                if self._asked is not None:  # before it was there
                    self._signal(worker, self._asked)
            elif "ended" in said and (worker := self._workers.pop(said["ended"], None)):
                self._tell("ended", worker=worker.name, code=said["code"], why=worker.why_killed)
        raise LostError("the process that workers are forked from has died: see what it wrote above")

    async def _hear_controller(self) -> None:
        while not self._ended.done():
            await self._find_controller()
            try:
                while True:
                    self._obey((await self._controller.recv()).header)
            except PeerGoneError:
                self._controller = None  # it may be started again, and training goes on meanwhile

    async def _find_controller(self) -> None:
        deadline = time.monotonic() + self._node.patience_s
        while True:
            try:
                connection = await wire.open(self._node.controller, self._node.token)
                break
            except PeerGoneError as error:
                if self._asked is not None and not self._joined:
                    raise StoppedError(self._asked) from None
                if time.monotonic() > deadline:
                    raise LostError(f"the controller is gone: {error}") from None
                await asyncio.sleep(0.1)
        workers = [
            {"name": w.name, "node": self._node.number, "rank": w.rank, "together": w.together, "built": w.built,
             "here": w.here} for w in self._workers.values()]  # fmt: skip
        hello = {"kind": "hello", "node": self._node.number, "workers": workers, "generation": self._generation}
        await connection.send(Message(hello | {"asked": self._asked}))
        self._controller, self._joined = connection, True

    def _tell(self, kind: str, **what) -> None:
        try:
            if self._controller is not None:
                self._controller.post(Message({"kind": kind} | what))
        except WireError:
            pass  # the next hello tells what is true then

    def _obey(self, order: dict) -> None:
        kind = order["kind"]
        if kind == "start":
            self._start(order)
        elif kind == "kill" and (worker := self._workers.pop(order["worker"], None)):
            self._signal(worker, signal.SIGKILL)
        elif kind in ("abort", "go"):
            self._generation, self._reason = order["generation"], order.get("reason", self._reason)
            self._news = time.monotonic()
            for worker in self._workers.values():
                self._pass_on(worker, order)
        elif kind == "end" and not self._ended.done():
            self._tell("heard")
            self._ended.set_result(order)

    def _start(self, order: dict) -> None:
        worker = _Process(order["worker"], order["rank"], order["together"])
        self._workers[worker.name] = worker
        place, local = divmod(worker.rank, self._node.per_node)
        values = {
            "RANK": worker.rank,
            "LOCAL_RANK": local,
            "WORLD_SIZE": self._node.size,
            "LOCAL_WORLD_SIZE": self._node.per_node,
            "GROUP_RANK": place,
            environment.NODE: self._node.number,
            environment.AGENT: f"unix:{self._node.directory}/agent",
            environment.WORKER: worker.name,
            environment.GENERATION: order["generation"],
            environment.TOGETHER: int(worker.together),
            environment.KEEPER: self._keeper,
        }
        output = None
        if self._node.logs is not None:
            output = str(self._node.logs / f"rank_{worker.rank:05d}.log")
        request = {"start": worker.name, "output": output, "environment": {k: str(v) for k, v in values.items()}}
        self._zygote.stdin.write(json.dumps(request).encode() + b"\n")

    async def _serve_worker(self, connection: wire.AsyncConnection) -> None:
        worker = self._workers.get((await connection.recv()).header["worker"])
        if worker is None:  # it was killed, and does not know it yet
            return
        worker.connection, worker.heard = connection, time.monotonic()
        if self._generation:
            self._pass_on(worker, {"kind": "abort", "generation": self._generation, "reason": self._reason})
        while True:
            said = (await connection.recv()).header
            worker.heard = time.monotonic()
            if said["kind"] == "built":
                worker.built = True
            elif said["kind"] == "here":
                worker.here = said["generation"]
            elif said["kind"] == "alive":
                worker.section, worker.since, worker.waits = said["section"], said["since"], said["waits"]
                self._limits.learn(said["longest"])
            if said["kind"] != "alive":
                self._tell(**said, worker=worker.name)

    def _pass_on(self, worker: _Process, order: dict) -> None:
        try:
            if worker.connection is not None:
                worker.connection.post(Message(order))
        except WireError:
            pass  # its end will be heard of

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(SAYS_S)
            self._tell("alive")
            for worker in self._workers.values():
                silent = time.monotonic() - worker.heard
                # building an index may hold the interpreter's lock for minutes
                if worker.built and silent > self._node.silence_s:
                    self._kill(worker, f"had said nothing for {silent:.0f} s")
                elif worker.section is not None:
                    self._judge(worker, worker.since + silent)

    def _judge(self, worker: _Process, seconds: float) -> None:
        """A worker has been in its section for some seconds.

        Who keeps others waiting cannot always be told from those who wait.  So a generation begins without a loss: who
        waits is woken, and comes; who hangs does not.
        """
        met = worker.here == self._generation
        if seconds <= self._limits.of(worker.section, waits=worker.waits and met):
            return
        if met:
            how = f"has been in its {worker.section} for {seconds:.0f} s"
            self._tell("hangs", worker=worker.name, generation=self._generation, how=how)
        elif worker.here < 0 or time.monotonic() - self._news > self._node.silence_s:
            self._kill(worker, f"had been in its {worker.section} for {seconds:.0f} s")

    def _kill(self, worker: _Process, why: str) -> None:
        if not worker.why_killed:
            worker.why_killed = why
            _log.warning("worker %d %s: killed", worker.rank, why)
        self._signal(worker, signal.SIGKILL)

    async def _let_leave(self) -> int:
        """The job is over: gives workers that are about to end some time to do so by themselves."""
        end = self._ended.result()
        deadline = time.monotonic() + (self._node.patience_s if end["leaving"] else 0.2)
        while self._workers and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return end["code"]

    def _signal(self, worker: _Process, number: int) -> None:
        if worker.pid is not None:
            try:
                os.kill(worker.pid, number)
            except ProcessLookupError:
                pass
