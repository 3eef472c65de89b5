"""Runs the agent of a node, which starts and monitors its workers and represents them at the controller."""

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

from moc.errors import UserError, code_of, with_code
from moc.files.decode import parse
from moc.runtime import async_connections as wire
from moc.runtime import child_processes, environment
from moc.runtime.addresses import name_of_interface
from moc.runtime.clocks import Lease, RunningClock
from moc.runtime.controller_link import ControllerLink, GaveUpError, LostError, NoControllerError
from moc.runtime.election import BEGIN_S, Times
from moc.runtime.flags import Flags
from moc.runtime.orders import Worker
from moc.runtime.progress import HangLimits
from moc.runtime.protocol import Message, WireError
from moc.runtime.replica_server import keep
from moc.runtime.socket_directory import memory_of_program, socket_directory
from moc.runtime.termination import FROM_WHERE, SAVED
from moc.store.errors import CheckpointError
from moc.store.leftovers import give_back

WATCHES_S = 1.0
"""Seconds between two checks of the workers."""

DIES_S = 10.0
"""Seconds until a killed worker that still exists counts as hung in the kernel; the agent then stops waiting."""

_log = logging.getLogger("moc")


@dataclass
class _Process(Worker):
    """Worker of this node, with the state that only its agent has."""

    pid: int | None = None
    connection: wire.AsyncConnection | None = None
    heard: float = 0.0
    section: str | None = None
    since: float = 0.0
    waits: bool = False
    gives_back: str | None = None
    why_killed: str = ""
    broken: str = ""  # error code of its end, such as device-broken
    dies_since: float | None = None


class CannotStartError(UserError, RuntimeError):
    """Refusal by the program to run.

    Attributes:
        lines: message of the program.
        exit_code: job's exit code.
    """

    def __init__(self, lines: str, exit_code: int):
        super().__init__(lines)
        self.lines, self.exit_code = lines.split("\n"), exit_code


class Agent:
    """Agent of one node of the job.

    Args:
        flags: launcher's flags.
        controllers: actual addresses of the controller candidates.
        token: the job's secret.

    Attributes:
        iteration: newest completed iteration reported by this node's workers.
    """

    def __init__(self, flags: Flags, controllers: list[str], token: bytes):
        self._flags, self._controllers, self._token = flags, controllers, token
        self._workers: dict[str, _Process] = {}
        self.iteration: int | None = None
        self._clock = RunningClock(most_s=3 * WATCHES_S)
        self._generation, self._cause, self._reason, self._news = 0, "", "", 0.0
        self._limits = HangLimits(flags.hang_caps)
        self._unnoted: dict[str, tuple[_Process, int]] = {}  # workers whose exit the controller has not acknowledged
        self._ended: asyncio.Future[dict] = asyncio.get_running_loop().create_future()
        self._address = self._replica_server = ""  # set by run()
        self._lease = Lease.make()
        self._zygote_said: float | None = None  # None until the forkserver is warm
        times = Times(flags.silence_s), flags.patience_s, max(flags.max_wait_s, BEGIN_S)
        lease = self._lease if flags.has_other_nodes else None
        self._link = ControllerLink(controllers, token, *times, lease, self._hello, self._obey)

    def _completed(self, iteration: int | None) -> None:
        self.iteration = iteration if self.iteration is None else max(self.iteration, iteration or 0)

    async def run(self) -> tuple[int, int]:
        """Runs until the job ends; returns its exit code and the number of the last leading controller candidate.

        Raises:
            NoControllerError: no controller has led for longer than the patience.
            LostError: the forkserver has died or hangs, or the controller refused this node.
            GaveUpError: one of this node's devices does not work.
            CannotStartError: the forkserver refuses the program.
            StoppedError: the node was asked to stop before it had joined a controller.
            OSError: no directory can be created for this node's sockets.
        """
        with socket_directory(memory_of_program(self._flags.command)) as directory:
            self._address, self._replica_server = f"unix:{directory}/agent", f"unix:{directory}/replicas"
            return await self._run()

    async def _run(self) -> tuple[int, int]:
        async with await wire.serve(self._address, self._token, self._serve_worker):
            self._zygote = await self._start_zygote()
            interface = self._flags.network_interface
            keeping = keep(self._controllers, self._replica_server, self._token, interface=interface)
            jobs = self._hear_zygote(), self._link.run(), self._watch(), keeping
            tasks, leaves_others = [asyncio.create_task(job) for job in jobs], True
            try:
                await asyncio.wait([self._ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
                code = await self._let_leave()
            except NoControllerError as error:
                code = self._ends_without_controller(error)
            except CannotStartError:
                leaves_others = self._flags.has_other_nodes
                raise
            finally:
                with contextlib.suppress(ProcessLookupError):
                    self._zygote.kill()  # remaining workers die with the forkserver
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._zygote.wait(), 5.0)
                if leaves_others:  # otherwise the job ends with this process, and its controller reports no lost node
                    self._link.tell("lost")  # the node is lost now, unless the job is over; this process may run longer
                    self._link.close()
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks, timeout=5.0)
        await self._give_memory_back()
        return code, self._link.follows

    @property
    def stopped_by(self) -> int | None:
        """Number of the signal that ended the job as requested; None if the job runs or ended for another reason."""
        return self._ended.result()["asked"] if self._ended.done() else None

    async def _give_memory_back(self) -> None:
        """Removes the run's snapshots from this node's memory; a spare may hold some from an earlier rank block."""
        memory = self._ended.result()["gives_back"] if self._ended.done() else None
        if memory is None:
            return
        try:
            await asyncio.to_thread(give_back, Path(memory), str(self._flags.node_rank))
        except (CheckpointError, OSError) as error:
            _log.warning("what the run has left in this node's memory stays there: %s", error)

    def _ends_without_controller(self, error: NoControllerError) -> int:
        """Returns the exit code if no controller can report how the job ended."""
        if not self._link.joined:
            raise error
        codes = [code for _, code in self._unnoted.values()]
        if len(codes) == self._flags.nproc_per_node and not any(codes) and not self._workers:
            _log.warning("%s: all workers of this node have ended well", error)
            return 0
        cause = str(error).partition(". Fix: ")[0]
        _log.error("%s", with_code(NoControllerError(f"{cause}. Fix: {FROM_WHERE}", code=code_of(error))))
        return SAVED

    def signal(self, number: int) -> None:
        """Forwards the launcher's signal to the workers, which save and exit once all of them are running."""
        self._link.asked = number
        self._link.tell("stopping", signal=number)
        for worker in self._workers.values():
            self._ask(worker)

    def _ask(self, worker: _Process) -> None:
        """Forwards the stop signal to a worker, if this node has received one.

        Once the job has begun, a worker receives the signal only when it has connected.  Earlier, the signal would kill
        it, while others with state to save may wait for it.
        """
        begins = worker.together and worker.born == 0
        if self._link.asked is not None and (begins or worker.connection is not None):
            self._signal(worker, self._link.asked)

    def _size(self) -> dict[str, str]:
        """Returns variables with the number of workers, which the forkserver needs to check a script's flags."""
        flags = self._flags
        return {
            environment.SIZE: str(flags.workers),
            environment.PLACES: str(flags.nnodes),
            environment.LEAST_PLACES: str(flags.least_nodes),
            "LOCAL_WORLD_SIZE": str(flags.nproc_per_node),
        }

    async def _start_zygote(self) -> asyncio.subprocess.Process:
        return await child_processes.start_reporting(
            "moc.runtime.forkserver",
            *self._flags.command,
            stdin=subprocess.PIPE,
            env=environment.UNLESS_SET | os.environ | environment.SET | self._size(),
            pass_fds=(self._lease.descriptor,),
        )

    async def _hear_zygote(self) -> None:
        answers = self._zygote.stdout
        assert answers is not None  # a pipe
        while line := await answers.readline():
            said = parse(line)
            self._zygote_said = self._clock.now
            if "refuses" in said:
                raise CannotStartError(said["refuses"], said["exit"])
            if "started" in said:
                worker = self._workers.get(said["started"])
                if worker is None:  # killed before its process existed
                    os.kill(said["pid"], signal.SIGKILL)
                    continue
                worker.pid = said["pid"]
                _log.info("worker %d is process %d", worker.rank, worker.pid)
                self._ask(worker)
            elif "ended" in said and said["ended"] in self._workers:
                self._has_ended(self._workers[said["ended"]], said["code"])
        raise LostError(
            "the process that workers are forked from has died. Fix: look at what it wrote above",
            code="zygote-lost",
        )

    def _has_ended(self, worker: _Process, code: int) -> None:
        del self._workers[worker.name]
        self._unnoted[worker.name] = worker, code
        self._link.tell(**_end_of(worker, code))

    def _hello(self) -> tuple[dict, list[dict]]:
        """Returns this node's state for a controller, and messages that an earlier controller may have missed."""
        there = {one.rank for one in self._workers.values() if not one.guest}  # exits of replaced workers are known
        dead = [(worker, code) for worker, code in self._unnoted.values() if worker.rank not in there]
        workers = [worker.told for worker in [*self._workers.values(), *(w for w, _ in dead)]]
        hello = dict(node=self._flags.node_rank, workers=workers, generation=self._generation, asked=self._link.asked)
        return hello, [_end_of(worker, code) for worker, code in dead]

    def _obey(self, order: dict) -> None:
        kind = order["kind"]
        if kind == "start":
            self._start(order)
        elif kind == "kill" and (worker := self._workers.pop(order["worker"], None)):
            self._signal(worker, signal.SIGKILL)
        elif kind == "seat" and (worker := self._workers.get(order["worker"])):
            worker.rank, worker.born, worker.size = order["rank"], order["generation"], order["size"]
            worker.guest, worker.helpers = False, order["helpers"]
        elif kind == "leave":
            for worker in self._workers.values():
                self._signal(worker, signal.SIGTERM)
        elif kind == "welcome":
            for worker in self._workers.values():
                self._pass_on(worker, order)
        elif kind == "noted":
            self._unnoted.pop(order["worker"], None)
        elif kind in ("abort", "go") and order["generation"] >= self._generation:
            self._generation, self._cause = order["generation"], order.get("cause", self._cause)
            self._reason = order.get("reason", self._reason)
            self._news = self._clock.now
            for worker in self._workers.values():
                worker.gives_back = None if kind == "abort" else worker.gives_back  # needed to resume
                if kind == "abort" or not worker.guest:
                    seat = {"rank": worker.rank, "size": worker.size, "helpers": worker.helpers}
                    self._pass_on(worker, order | {"store": self._controllers[self._link.follows]} | seat)
        elif kind == "give_up" and not self._ended.done():
            self._ended.set_exception(GaveUpError(order["why"]))
        elif kind == "end":
            self._link.tell("heard")
            self._link.over = True
            if not self._ended.done():
                self._ended.set_result(order)

    def _start(self, order: dict) -> None:
        born = order["generation"]
        worker = _Process(order["worker"], self._flags.node_rank, order["rank"], order["together"], born=born)
        worker.guest, worker.size, worker.helpers = order["guest"], order["size"], order["helpers"]
        self._workers[worker.name] = worker
        self._generation = max(self._generation, born)
        values = {
            "RANK": worker.rank,
            "LOCAL_RANK": worker.rank % self._flags.nproc_per_node,
            "WORLD_SIZE": order["size"],
            "LOCAL_WORLD_SIZE": self._flags.nproc_per_node,
            "GROUP_RANK": order["place"],
            environment.NODE: self._flags.node_rank,
            environment.PLACES: self._flags.nnodes,
            environment.LEAST_PLACES: self._flags.least_nodes,
            environment.AGENT: self._address,
            environment.LEASE: self._lease.descriptor,
            environment.WORKER: worker.name,
            environment.GENERATION: born,
            environment.TOGETHER: int(worker.together),
            environment.HELPERS: ",".join(map(str, worker.helpers)),
            environment.REPLICA_SERVER: self._replica_server,
            environment.SILENCE: self._flags.silence_s,
        } | self._network()
        logs = self._flags.log_dir
        output = None if logs is None else str(logs / f"rank_{worker.rank:05d}.log")
        self._order({"start": worker.name, "output": output, "environment": {k: str(v) for k, v in values.items()}})

    def _network(self) -> dict[str, str]:
        """Returns variables that make gloo and NCCL use the job's interface, not the address of the host's name."""
        name = self._flags.network_interface
        if name is None and self._link.door is not None:
            name = name_of_interface(self._link.door.rpartition(":")[0])
        given = () if self._flags.network_interface is not None else os.environ
        return {variable: name for variable in environment.INTERFACES if name is not None and variable not in given}

    def _order(self, request: dict) -> None:
        assert self._zygote.stdin is not None  # a pipe
        self._zygote.stdin.write(json.dumps(request).encode() + b"\n")

    async def _serve_worker(self, connection: wire.AsyncConnection) -> None:
        worker = self._workers.get((await connection.recv()).header["worker"])
        if worker is None:  # killed, but still connecting
            return
        worker.connection, worker.heard = connection, self._clock.now
        if worker.born > 0 or not worker.together:
            self._ask(worker)
        if self._generation:
            why = {"cause": self._cause, "reason": self._reason}
            self._pass_on(worker, {"kind": "abort", "generation": self._generation, **why})
        while True:
            said = (await connection.recv()).header
            worker.heard = self._clock.now
            if said["kind"] == "built":
                worker.built, worker.stays = True, said["stays"]
            elif said["kind"] in ("here", "met", "parted"):
                setattr(worker, said["kind"], said["generation"])
            elif said["kind"] == "alive":
                worker.section, worker.since, worker.waits = said["section"], said["since"], said["waits"]
                self._limits.learn(said["longest"])
                self._completed(said["iteration"])
            elif said["kind"] == "gives_back":
                worker.gives_back = said["memory"]  # reported with the worker's exit, when it takes effect
            elif said["kind"] == "broken":
                worker.broken = said["code"]
                self._kill(worker, said["why"])
            if said["kind"] not in ("alive", "gives_back", "broken"):
                self._link.tell(**said, worker=worker.name)

    def _pass_on(self, worker: _Process, order: dict) -> None:
        if worker.connection is not None:
            with contextlib.suppress(WireError):  # a disconnected worker's exit is reported separately
                worker.connection.post(Message(order))

    async def _watch(self) -> None:
        silence_s = self._flags.silence_s
        while True:
            await asyncio.sleep(min(WATCHES_S, max(0.05, self._lease.left)))
            self._clock.tick()
            self._watch_zygote()
            if self._workers and self._lease.left <= 0:  # other workers may have taken their rank blocks
                for worker in self._workers.values():
                    self._kill(worker, f"had been without a controller for {Times(silence_s).runs_s:g} s")
            for worker in list(self._workers.values()):
                silent = self._clock.now - worker.heard
                if worker.pid is not None and child_processes.is_dying(worker.pid):
                    self._wait_for_death(worker)
                # building an index may hold the GIL for minutes
                elif worker.built and silent > silence_s:
                    self._kill(worker, f"had said nothing for {silent:.0f} s")
                elif worker.section is not None:
                    self._judge(worker, worker.section, worker.since + silent)

    def _watch_zygote(self) -> None:
        """Raises LostError if the warm forkserver has not answered for ``silence_s``, or sends a health check."""
        if self._zygote_said is None:
            return
        silence_s = self._flags.silence_s
        if self._clock.now - self._zygote_said > silence_s:
            raise LostError(
                f"the process that workers are forked from has not answered for {silence_s:g} s. Fix: raise "
                "--silence-timeout, or look at the load of this machine",
                code="zygote-lost",
            )
        self._order({"ask": True})

    def _wait_for_death(self, worker: _Process) -> None:
        """Reports a dying worker as ended after :data:`DIES_S`, since a thread of it may hang in a file system."""
        if worker.dies_since is None:
            worker.dies_since = self._clock.now
        elif self._clock.now - worker.dies_since > DIES_S:
            _log.warning("worker %d was killed and hangs in the kernel: it is not waited for", worker.rank)
            self._has_ended(worker, -signal.SIGKILL)

    def _judge(self, worker: _Process, section: str, seconds: float) -> None:
        """Checks how long a worker has been in its section.

        Waiting workers cannot always be distinguished from a hung worker.  So the limit starts a generation without a
        loss: waiting workers wake and rejoin; the hung worker does not rejoin and is killed.
        """
        met = worker.here == self._generation
        if seconds <= self._limits.of(section, waits=worker.waits and met):
            return
        if met:
            how = f"has been in its {section} for {seconds:.0f} s"
            self._link.tell("hangs", worker=worker.name, generation=self._generation, how=how)
        elif worker.here < 0 or self._clock.now - self._news > self._flags.silence_s:
            self._kill(worker, f"had been in its {section} for {seconds:.0f} s")

    def _kill(self, worker: _Process, why: str) -> None:
        if not worker.why_killed:
            worker.why_killed = why
            _log.warning("worker %d %s: killed", worker.rank, why)
        self._signal(worker, signal.SIGKILL)

    async def _let_leave(self) -> int:
        """Waits a limited time for workers that are about to exit; returns the job's exit code."""
        end = self._ended.result()
        deadline = time.monotonic() + (self._flags.patience_s if end["leaving"] else 0.2)
        while self._workers and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return end["code"]

    def _signal(self, worker: _Process, number: int) -> None:
        if worker.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, number)


def _end_of(worker: _Process, code: int) -> dict:
    """Returns the message that reports a worker's exit."""
    told = {"why": worker.why_killed, "gives_back": worker.gives_back, "broken": worker.broken}
    return {"kind": "ended", "worker": worker.name, "code": code} | told
