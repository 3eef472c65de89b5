"""Runs the agent of a node, which starts and monitors its workers and represents them at the controller."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from moc.errors import UserError, code_of, with_code
from moc.files.decode import parse
from moc.runtime import async_connections, child_processes, environment
from moc.runtime.connections import interface_name
from moc.runtime.controller_link import (
    ControllerLink,
    Departure,
    DepartureError,
    DependencyLostError,
    NoControllerError,
    NodeRemovedError,
)
from moc.runtime.election import MIN_JOIN_TIMEOUT_S, SilenceLimits
from moc.runtime.flags import LauncherFlags
from moc.runtime.orders import WorkerRecord
from moc.runtime.progress import HangLimits, Lease, RunningClock
from moc.runtime.protocol import Message, WireError
from moc.runtime.replica_server import run_replica_server
from moc.runtime.socket_directory import memory_directory_of, socket_directory
from moc.runtime.termination import DEPARTED, RESUME_REMEDY, SAVED
from moc.store.errors import CheckpointError
from moc.store.host_memory import give_back

WATCH_INTERVAL_S = 1.0
"""Seconds between two checks of the workers."""

KILL_TIMEOUT_S = 10.0
"""Seconds until a killed worker that still exists counts as hung in the kernel; the agent then stops waiting."""

_log = logging.getLogger("moc")


@dataclass
class _WorkerProcess(WorkerRecord):
    """Worker of this node, with the state that only its agent has."""

    pid: int | None = None
    connection: async_connections.AsyncConnection | None = None
    last_message_at: float = 0.0
    section: str | None = None
    section_s: float = 0.0
    is_waiting: bool = False
    released_memory: str | None = None
    kill_reason: str = ""
    error_code: str = ""  # error code of its end, such as device-broken
    iteration: int | None = None  # newest one that it has reported
    dying_since: float | None = None


class ProgramRefusedError(UserError, RuntimeError):
    """Refusal by the program to run.

    Attributes:
        lines: message of the program.
        exit_code: job's exit code.
    """

    def __init__(self, lines: str, exit_code: int):
        super().__init__(lines)
        self.lines, self.exit_code = lines.split("\n"), exit_code


class Agent:
    """Agent of one node: starts, monitors and kills its workers as the controller orders, and reports their exits.

    Args:
        flags: launcher's flags.
        controllers: actual addresses of the controller candidates, as ``host:port``.
        token: the job's secret, 32 bytes.

    Attributes:
        iteration: newest completed iteration reported by this node's workers.
    """

    def __init__(self, flags: LauncherFlags, controllers: list[str], token: bytes):
        self._flags, self._controllers, self._token = flags, controllers, token
        self._workers: dict[str, _WorkerProcess] = {}
        self.iteration: int | None = None
        self._clock = RunningClock(max_step_s=3 * WATCH_INTERVAL_S)
        self._generation, self._notified_at = 0, 0.0
        self._reason: dict = {"cause": "", "reason": "", "lost": {}}  # of the generation
        self._limits = HangLimits(flags.hang_caps)
        self._unacknowledged: dict[
            str, tuple[_WorkerProcess, int]
        ] = {}  # workers whose exit the controller has not acknowledged
        self._runs_first_worker = False
        self._first_generation = math.inf  # generation of the first worker started here
        self._has_connected = False  # a worker of this node has connected
        self._end: asyncio.Future[dict] = asyncio.get_running_loop().create_future()
        self._address = self._replica_server = ""  # set by run()
        self._lease = Lease.create()
        drain_s = flags.drain_s if flags.min_nodes < flags.nnodes else 0.0
        self._departure = Departure(drain_s, self._request_departure, self._end_departing)
        self._forkserver_answered_at: float | None = None  # None until the forkserver is warm
        self._link = ControllerLink(
            controllers,
            token,
            SilenceLimits(flags.silence_timeout_s),
            patience_s=flags.patience_s,
            join_timeout_s=max(flags.max_wait_s, MIN_JOIN_TIMEOUT_S),
            lease=self._lease if flags.has_other_nodes else None,
            make_hello=self._make_hello,
            execute=self._execute,
        )

    def _record_iteration(self, iteration: int | None) -> None:
        self.iteration = iteration if self.iteration is None else max(self.iteration, iteration or 0)

    async def run(self) -> tuple[int, int]:
        """Runs until the job ends; returns its exit code and the number of the last leading controller candidate.

        Raises:
            NoControllerError: no controller has led for longer than the patience.
            DependencyLostError: the forkserver has died or hangs, or the controller refused this node.
            NodeRemovedError: one of this node's devices does not work.
            DepartureError: the node departed before its state was moved to the others.
            ProgramRefusedError: the forkserver refuses the program.
            StoppedError: the node was asked to stop before it had joined a controller.
            OSError: no directory can be created for this node's sockets.
        """
        with socket_directory(memory_directory_of(self._flags.command)) as directory:
            self._address, self._replica_server = f"unix:{directory}/agent", f"unix:{directory}/replicas"
            return await self._run()

    async def _run(self) -> tuple[int, int]:
        async with await async_connections.serve(self._address, self._token, self._serve_worker):
            self._forkserver = await self._start_forkserver()
            interface = self._flags.network_interface
            replica_server = run_replica_server(
                self._controllers, self._replica_server, self._token, interface=interface
            )
            coroutines = self._handle_forkserver_events(), self._link.run(), self._watch_workers(), replica_server
            tasks, job_continues = [asyncio.create_task(job) for job in coroutines], True
            try:
                await asyncio.wait([self._end, *tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
                code = await self._wait_for_exits()
            except NoControllerError as error:
                code = self._exit_code_without_controller(error)
            except ProgramRefusedError:
                job_continues = self._flags.has_other_nodes
                raise
            finally:
                self._departure.close()
                with contextlib.suppress(ProcessLookupError):
                    self._forkserver.kill()  # remaining workers die with the forkserver
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._forkserver.wait(), 5.0)
                if job_continues:  # otherwise the job ends with this process, and its controller reports no lost node
                    self._link.send("lost")  # the node is lost now, unless the job is over; this process may run longer
                    self._link.close()
                    for task in tasks:
                        task.cancel()
                    await asyncio.wait(tasks, timeout=5.0)
        await self._release_memory()
        return code, self._link.leader

    def describe(self) -> dict:
        """Returns the state of this node for the monitor; JSON-serializable.

        Returns:
            ``node``; ``per_node``, workers of a node; ``control``, the state that the controller sent, or None;
            ``leader``, the number of the leading candidate; ``lease_s``, or None if the lease does not end; and
            ``workers``, a list with the rank, process, section, seconds in it, and newest iteration of each worker,
            and whether it waits for others.
        """
        remaining_s = self._lease.remaining_s
        workers = [
            {"rank": worker.rank, "pid": worker.pid, "section": worker.section, "seconds": round(worker.section_s, 3)}
            | {"waits": worker.is_waiting, "ready": worker.is_ready, "joins": worker.is_joining}
            | {"iteration": worker.iteration}
            for worker in self._workers.values()
        ]
        lease_s = None if math.isinf(remaining_s) else round(remaining_s, 3)
        node = {"node": self._flags.node_rank, "per_node": self._flags.nproc_per_node, "workers": workers}
        return node | {"control": self._link.state, "leader": self._link.leader, "lease_s": lease_s}

    @property
    def loss_at_end(self) -> dict | None:
        """The end of the job by a loss, if this node ran the first worker; None in good order, or while it runs."""
        if not (self._runs_first_worker and self._end.done()):
            return None
        end = self._end.result()
        is_loss = end["code"] and end["code"] != DEPARTED and end["asked"] is None
        return end | {"job": self._link.state["job"] if self._link.state else ""} if is_loss else None

    @property
    def stopped_by(self) -> int | None:
        """Number of the signal that ended the job as requested; None if the job runs or ended for another reason."""
        return self._end.result()["asked"] if self._end.done() else None

    async def _release_memory(self) -> None:
        """Removes the run's snapshots from this node's memory; a spare may hold some from an earlier rank block."""
        memory = self._end.result()["gives_back"] if self._end.done() else None
        if memory is None:
            return
        try:
            await asyncio.to_thread(give_back, Path(memory), str(self._flags.node_rank))
        except (CheckpointError, OSError) as error:
            _log.warning("the files of the run stay in this node's memory: %s", error)

    def _exit_code_without_controller(self, error: NoControllerError) -> int:
        """Returns the exit code if no controller can report how the job ended."""
        if not self._link.is_admitted:
            raise error
        codes = [code for _, code in self._unacknowledged.values()]
        if len(codes) == self._flags.nproc_per_node and not any(codes) and not self._workers:
            _log.warning("%s: all workers of this node have ended well", error)
            return 0
        cause = str(error).partition(". Fix: ")[0]
        _log.error("%s", with_code(NoControllerError(f"{cause}. Fix: {RESUME_REMEDY}", code=code_of(error))))
        return SAVED

    def signal(self, signal_number: int) -> None:
        """Handles the launcher's signal: SIGTERM asks to leave a job of MIN to MAX nodes, others stop the job."""
        if signal_number == signal.SIGTERM and self._link.is_admitted and self._link.stop_signal is None:
            if self._departure.handle_signal():
                return
        self._stop(signal_number)

    def _request_departure(self) -> None:
        _log.warning("SIGTERM: this node leaves the job when the others have its state; another SIGTERM ends it")
        self._link.send("departs")

    def _end_departing(self, reason: str) -> None:
        """Ends this node: as departed if the others have its state (no worker is left), otherwise as lost."""
        if self._end.done():
            return
        if not self._workers:
            self._execute({"kind": "depart"})
            return
        self._end.set_exception(
            DepartureError(
                f"this node {reason}, and the others lack its state: it counts as lost. Fix: raise --drain-seconds, "
                "or send one SIGTERM",
                code="departure-incomplete",
            )
        )

    def _stop(self, signal_number: int) -> None:
        """Forwards a signal to the workers, which save and exit once all of them are running."""
        self._link.stop_signal = signal_number
        self._link.send("stopping", signal=signal_number)
        for worker in [*self._workers.values()]:
            self._forward_stop_signal(worker)

    def _forward_stop_signal(self, worker: _WorkerProcess) -> None:
        """Forwards the stop signal to a worker, if this node has received one.

        Once the job has begun, a worker receives the signal only when it has connected.  Earlier, the signal would kill
        it, while others with state to save may wait for it.  If no worker has connected until a later generation, the
        program never connects, and so has no such state.  A worker whose program is still imported ends without a
        process.
        """
        never_connects = not self._has_connected and self._first_generation < worker.rank_generation
        begins = worker.starts_together and (worker.rank_generation == 0 or never_connects)
        receives = begins or worker.connection is not None
        if self._link.stop_signal is not None and receives:
            if begins and self._forkserver_answered_at is None:
                self._report_exit(worker, -self._link.stop_signal)
            else:
                self._signal(worker, self._link.stop_signal)

    def _size_variables(self) -> dict[str, str]:
        """Returns variables with the number of workers, which the forkserver needs to check a script's flags."""
        flags = self._flags
        return {
            environment.JOB_SIZE: str(flags.max_workers),
            environment.MAX_NODES: str(flags.nnodes),
            environment.MIN_NODES: str(flags.min_nodes),
            "LOCAL_WORLD_SIZE": str(flags.nproc_per_node),
        }

    async def _start_forkserver(self) -> asyncio.subprocess.Process:
        return await child_processes.start_reporting(
            "moc.runtime.forkserver",
            *self._flags.command,
            stdin=subprocess.PIPE,
            env=environment.DEFAULT_VARIABLES | os.environ | environment.FIXED_VARIABLES | self._size_variables(),
            pass_fds=(self._lease.descriptor,),
        )

    async def _handle_forkserver_events(self) -> None:
        events = self._forkserver.stdout
        assert events is not None  # a pipe
        while line := await events.readline():
            event = parse(line)
            self._forkserver_answered_at = self._clock.now
            if "refuses" in event:
                raise ProgramRefusedError(event["refuses"], event["exit"])
            if "started" in event:
                worker = self._workers.get(event["started"])
                if worker is None:  # killed before its process existed
                    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                        os.kill(event["pid"], signal.SIGKILL)
                    continue
                worker.pid = event["pid"]
                _log.info("worker %d is process %d", worker.rank, worker.pid)
                self._forward_stop_signal(worker)
            elif "ended" in event and event["ended"] in self._workers:
                self._report_exit(self._workers[event["ended"]], event["code"])
        raise DependencyLostError(
            "the process that workers are forked from has died. Fix: look at what it wrote above",
            code="zygote-lost",
        )

    def _report_exit(self, worker: _WorkerProcess, code: int) -> None:
        del self._workers[worker.name]
        self._unacknowledged[worker.name] = worker, code
        self._link.send(**_exit_message(worker, code))

    def _make_hello(self) -> tuple[dict, list[dict]]:
        """Returns this node's state for a controller, and messages that an earlier controller may have missed."""
        live_ranks = {
            worker.rank for worker in self._workers.values() if not worker.is_joining
        }  # exits of replaced workers are known
        exited = [(worker, code) for worker, code in self._unacknowledged.values() if worker.rank not in live_ranks]
        workers = [worker.to_message() for worker in [*self._workers.values(), *(w for w, _ in exited)]]
        hello = dict(
            node=self._flags.node_rank, workers=workers, generation=self._generation, asked=self._link.stop_signal
        )
        hello["departs"] = self._departure.is_requested
        return hello, [_exit_message(worker, code) for worker, code in exited]

    def _execute(self, order: dict) -> None:
        kind = order["kind"]
        if kind == "start":
            self._start(order)
        elif kind == "kill" and (worker := self._workers.pop(order["worker"], None)):
            self._signal(worker, signal.SIGKILL)
        elif kind == "seat" and (worker := self._workers.get(order["worker"])):
            worker.rank, worker.rank_generation, worker.size = order["rank"], order["generation"], order["size"]
            worker.is_joining, worker.partial_model_parts = False, order["helpers"]
        elif kind == "leave":
            for worker in self._workers.values():
                self._signal(worker, signal.SIGTERM)
        elif kind == "welcome":
            for worker in self._workers.values():
                self._forward(worker, order)
        elif kind == "noted":
            self._unacknowledged.pop(order["worker"], None)
        elif kind in ("abort", "go") and order["generation"] >= self._generation:
            self._generation = order["generation"]
            self._reason = {name: order.get(name, value) for name, value in self._reason.items()}
            self._notified_at = self._clock.now
            for worker in self._workers.values():
                worker.released_memory = None if kind == "abort" else worker.released_memory  # needed to resume
                if kind == "abort" or not worker.is_joining:
                    assignment = {"rank": worker.rank, "size": worker.size, "helpers": worker.partial_model_parts}
                    self._forward(worker, order | {"store": self._controllers[self._link.leader]} | assignment)
        elif kind == "stop":
            self._departure.refuse()
            self._stop(signal.SIGTERM)
        elif kind == "depart" and not self._end.done():
            self._end.set_result({"code": DEPARTED, "leaving": False, "gives_back": None, "asked": signal.SIGTERM})
        elif kind == "give_up" and not self._end.done():
            self._end.set_exception(NodeRemovedError(order["why"]))
        elif kind == "end":
            self._link.send("heard")
            self._link.is_closed = True
            if not self._end.done():
                self._end.set_result(order)

    def _start(self, order: dict) -> None:
        generation = order["generation"]
        worker = _WorkerProcess(
            order["worker"], self._flags.node_rank, order["rank"], order["together"], rank_generation=generation
        )
        worker.is_joining, worker.size, worker.partial_model_parts = order["guest"], order["size"], order["helpers"]
        self._workers[worker.name] = worker
        self._first_generation = min(self._first_generation, generation)
        self._runs_first_worker |= worker.rank == 0
        self._generation = max(self._generation, generation)
        values = {
            "RANK": worker.rank,
            "LOCAL_RANK": worker.rank % self._flags.nproc_per_node,
            "WORLD_SIZE": order["size"],
            "LOCAL_WORLD_SIZE": self._flags.nproc_per_node,
            "GROUP_RANK": order["place"],
            environment.NODE: self._flags.node_rank,
            environment.MAX_NODES: self._flags.nnodes,
            environment.MIN_NODES: self._flags.min_nodes,
            environment.AGENT: self._address,
            environment.LEASE: self._lease.descriptor,
            environment.WORKER: worker.name,
            environment.GENERATION: generation,
            environment.STARTS_TOGETHER: int(worker.starts_together),
            environment.PARTIAL_MODEL_PARTS: ",".join(map(str, worker.partial_model_parts)),
            environment.REPLICA_SERVER: self._replica_server,
            environment.SILENCE_TIMEOUT: self._flags.silence_timeout_s,
        } | self._interface_variables()
        logs = self._flags.log_dir
        values |= {} if logs is None else {environment.OUTPUT_DIRECTORY: logs}
        output = None if logs is None else str(logs / f"rank_{worker.rank:05d}.log")
        self._send_to_forkserver(
            {"start": worker.name, "output": output, "environment": {k: str(v) for k, v in values.items()}}
        )
        self._forward_stop_signal(worker)

    def _interface_variables(self) -> dict[str, str]:
        """Returns variables that make gloo and NCCL use the job's interface, not the address of the host's name."""
        name = self._flags.network_interface
        if name is None and self._link.liveness_address is not None:
            name = interface_name(self._link.liveness_address.rpartition(":")[0])
        preset = () if self._flags.network_interface is not None else os.environ
        return {variable: name for variable in environment.INTERFACES if name is not None and variable not in preset}

    def _send_to_forkserver(self, request: dict) -> None:
        assert self._forkserver.stdin is not None  # a pipe
        self._forkserver.stdin.write(json.dumps(request).encode() + b"\n")

    async def _serve_worker(self, connection: async_connections.AsyncConnection) -> None:
        worker = self._workers.get((await connection.recv()).header["worker"])
        if worker is None:  # killed, but still connecting
            return
        worker.connection, worker.last_message_at, self._has_connected = connection, self._clock.now, True
        if worker.rank_generation > 0 or not worker.starts_together:
            self._forward_stop_signal(worker)
        if self._generation:
            self._forward(worker, {"kind": "abort", "generation": self._generation, **self._reason})
        while True:
            message = (await connection.recv()).header
            worker.last_message_at = self._clock.now
            if message["kind"] == "built":
                worker.is_ready, worker.survives_resize = True, message["stays"]
            elif message["kind"] == "here":
                worker.reported_generation = message["generation"]
            elif message["kind"] == "met":
                worker.connected_generation = message["generation"]
            elif message["kind"] == "parted":
                worker.drained_generation, worker.has_handed_over = message["generation"], message["handed_over"]
            elif message["kind"] == "alive":
                worker.section, worker.section_s, worker.is_waiting = (
                    message["section"],
                    message["since"],
                    message["waits"],
                )
                self._limits.learn(message["longest"])
                worker.iteration = message["iteration"]
                self._record_iteration(message["iteration"])
            elif message["kind"] == "gives_back":
                worker.released_memory = message["memory"]  # reported with the worker's exit, when it takes effect
            elif message["kind"] == "broken":
                worker.error_code = message["code"]
                self._kill(worker, message["why"])
            if message["kind"] not in ("alive", "gives_back", "broken"):
                self._link.send(**message, worker=worker.name)

    def _forward(self, worker: _WorkerProcess, order: dict) -> None:
        if worker.connection is not None:
            with contextlib.suppress(WireError):  # a disconnected worker's exit is reported separately
                worker.connection.post(Message(order))

    async def _watch_workers(self) -> None:
        silence_s = self._flags.silence_timeout_s
        while True:
            await asyncio.sleep(min(WATCH_INTERVAL_S, max(0.05, self._lease.remaining_s)))
            self._clock.tick()
            self._check_forkserver()
            if self._workers and self._lease.remaining_s <= 0:  # other workers may have taken their rank blocks
                for worker in self._workers.values():
                    self._kill(worker, f"had no controller for {SilenceLimits(silence_s).worker_limit_s:g} s")
            for worker in list(self._workers.values()):
                silent_s = self._clock.now - worker.last_message_at
                if worker.pid is not None and child_processes.is_dying(worker.pid):
                    self._wait_for_death(worker)
                # building an index may hold the GIL for minutes
                elif worker.is_ready and silent_s > silence_s:
                    self._kill(worker, f"sent no heartbeat for {silent_s:.0f} s")
                elif worker.section is not None:
                    self._check_section(worker, worker.section, worker.section_s + silent_s)

    def _check_forkserver(self) -> None:
        """Raises DependencyLostError if the forkserver was silent for too long, otherwise sends a health check."""
        imports = self._forkserver_answered_at is None
        flag = "--hang-timeout setup" if imports else "--silence-timeout"
        silence_s = self._flags.hang_caps["setup"] if imports else self._flags.silence_timeout_s
        if self._clock.now - (self._forkserver_answered_at or 0.0) > silence_s:
            raise DependencyLostError(
                f"the process that workers are forked from has not answered for {silence_s:g} s. Fix: raise "
                f"{flag}, or look at the load of this machine",
                code="zygote-lost",
            )
        if not imports:
            self._send_to_forkserver({"ask": True})

    def _wait_for_death(self, worker: _WorkerProcess) -> None:
        """Reports a worker as ended if it outlives :data:`KILL_TIMEOUT_S`: a file system may block its thread."""
        if worker.dying_since is None:
            worker.dying_since = self._clock.now
        elif self._clock.now - worker.dying_since > KILL_TIMEOUT_S:
            _log.warning("worker %d was killed and hangs in the kernel: it is not waited for", worker.rank)
            self._report_exit(worker, -signal.SIGKILL)

    def _check_section(self, worker: _WorkerProcess, section: str, seconds: float) -> None:
        """Checks how long a worker has been in its section.

        Waiting workers cannot always be distinguished from a hung worker.  So the limit starts a generation without a
        loss: waiting workers wake and rejoin; the hung worker does not rejoin and is killed.
        """
        has_reported = worker.reported_generation == self._generation
        if seconds <= self._limits.limit(section, waits=worker.is_waiting and has_reported):
            return
        if has_reported:
            description = f"has been in its {section} for {seconds:.0f} s"
            self._link.send("hangs", worker=worker.name, generation=self._generation, how=description)
        elif worker.reported_generation < 0 or self._clock.now - self._notified_at > self._flags.silence_timeout_s:
            self._kill(worker, f"was in its {section} for {seconds:.0f} s")

    def _kill(self, worker: _WorkerProcess, reason: str) -> None:
        if not worker.kill_reason:
            worker.kill_reason = reason
            _log.warning("worker %d %s: killed", worker.rank, reason)
        self._signal(worker, signal.SIGKILL)

    async def _wait_for_exits(self) -> int:
        """Waits a limited time for workers that are about to exit; returns the job's exit code."""
        end = self._end.result()
        deadline = time.monotonic() + (self._flags.patience_s if end["leaving"] else 0.2)
        while self._workers and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return end["code"]

    def _signal(self, worker: _WorkerProcess, signal_number: int) -> None:
        if worker.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal_number)


def _exit_message(worker: _WorkerProcess, code: int) -> dict:
    """Returns the message that reports a worker's exit."""
    details = {"why": worker.kill_reason, "gives_back": worker.released_memory, "broken": worker.error_code}
    details["iteration"] = worker.iteration
    return {"kind": "ended", "worker": worker.name, "code": code} | details
