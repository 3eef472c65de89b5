"""A worker's side of a job that survives lost workers: receives notices of losses, and reconnects."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from moc import private_interfaces
from moc.errors import cause_of, code_of, with_code
from moc.faults import reach
from moc.output import print_lines, print_traceback
from moc.runtime import device as compute_device
from moc.runtime import environment
from moc.runtime.abort import AbortError
from moc.runtime.connections import Connection, connect, patiently
from moc.runtime.exit_codes import START_OVER
from moc.runtime.groups import Groups, Suspicion
from moc.runtime.job import Interruption, Job
from moc.runtime.job_token import token_from_environment
from moc.runtime.lease import Lease
from moc.runtime.meeting_client import MeetingClient
from moc.runtime.message import Message
from moc.runtime.progress import PROGRESS
from moc.runtime.wire import PeerGoneError, WireError

NEWS_S = 5.0
"""Seconds to wait after an error for a notice of a lost worker, before the error counts as this worker's own.

Messages are repeated at the same interval, because their receiver may have died.
"""

_ALIVE_S = 1.0
_REPORT_S = 0.02  # between reports of iterations; a loss soon after an iteration must not hide it


def _gather_alone(gathered: list, own, group=None) -> None:
    gathered[:] = [own] * len(gathered)


def _gather_tensors_alone(output_tensor: torch.Tensor, input_tensor: torch.Tensor, group=None, async_op=False) -> None:
    output_tensor.view(-1, input_tensor.numel())[:] = input_tensor.view(-1)


_ALONE = {
    "barrier": lambda *_, **__: None,
    "all_reduce": lambda *_, **__: None,
    "all_gather_object": _gather_alone,
    "all_gather_into_tensor": _gather_tensors_alone,
}
"""Local substitutes for collectives that compare workers' setup, for a replacement that initializes separately.

megatron-core's optimizer gathers the kinds of parameters, and creates an empty group for a kind that a rank lacks.
"""


class JobMember(Job):
    """A job of our launcher, connected to this node's agent: lost workers are replaced, and the others survive."""

    def __init__(self, connection: Connection, token: bytes):
        super().__init__()
        self._connection, self._token = connection, token
        self._together = os.environ[environment.TOGETHER] == "1"
        self._started_for = int(os.environ[environment.GENERATION])
        self._groups: Groups | None = None
        self._aborting = threading.Lock()
        self._device: torch.device | None = None
        self._real: dict[str, Callable] = {}
        self._built = False
        self._news = threading.Condition()
        self._wanted, self._cause, self._reason = self._started_for, "", ""
        self._heard_at = time.monotonic()
        self._store: tuple[int, str] = (-1, "")
        self.helpers = tuple(map(int, filter(None, os.environ.get(environment.HELPERS, "").split(","))))
        self._seat = self.rank, self.size, self.helpers  # in the generation of the store
        self._generation = -1  # generation of the groups; -1 before the first
        self._welcomes = -1  # newest generation with a scale-up notice
        self._epoch = 0
        self._lease = Lease.of_this_worker()
        PROGRESS.forget("setup")
        self._say("hello", worker=os.environ[environment.WORKER])
        for body in (self._listen, self._say_alive, self._watch_lease):
            threading.Thread(target=self._guard, args=(body,), name=f"moc-{body.__name__}", daemon=True).start()

    @classmethod
    def join(cls) -> JobMember:
        """Joins the job that the environment describes.

        A worker that its agent does not admit within :data:`~moc.runtime.connections.PATIENCE_S` kills itself, and is
        replaced as a lost one.  This is no error of the job, and ``--max-restarts`` limits how often it happens.
        """
        token = token_from_environment()
        try:
            return cls(patiently(lambda: connect(os.environ[environment.AGENT], token)), token)
        except PeerGoneError as error:
            who = f"worker {os.environ.get('RANK')}"
            why = f"cannot join its agent ({cause_of(error)}): it ends itself, to be replaced"
            print_lines(f"mocrun: {who} {why}", error=True, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
            raise

    def connect(self, backend: str, timeout: timedelta, device: torch.device) -> None:
        """As :meth:`Job.connect`; the groups survive lost workers."""
        self._timeout, self._device = timeout, device
        kinds = dict(collectives_only=self.collectives_only, unbatched=self.unbatched)
        self._groups = Groups(self.rank, self.size, backend, timeout, device, self._token, **kinds)
        self._groups.install()
        if self._together:
            self._meet()
        else:
            self._real = {name: getattr(dist, name) for name in _ALONE}
            dist.__dict__.update(_ALONE)

    @property
    def others_wait(self) -> bool:
        """As :attr:`Job.others_wait`."""
        return not self._together

    @property
    def has_begun_before(self) -> bool:
        """As :attr:`Job.has_begun_before`."""
        return self._started_for > 0

    def built(self) -> Interruption | None:
        """As :meth:`Job.built`."""
        if not self._built:
            self._built = True
            PROGRESS.forget()
            self._say("built", stays=self.regroup is not None)
        if self._generation >= 0:
            return None
        dist.__dict__.update(self._real)  # a replacement, initialized separately
        begun = time.monotonic()
        self._meet()
        return Interruption(self._generation, self._cause, self._reason, 0.0, time.monotonic() - begun)

    def go_on_after(self, error: Exception) -> Interruption:
        """As :meth:`Job.go_on_after`.  A worker with a broken device ends here, and counts as lost."""
        PROGRESS.forget()
        self._end_if_device_is_broken(error)
        if self._generation < 0:  # not yet connected to the others
            if not self._together and compute_device.denies(error):
                self._end("has replaced a lost worker, and gets no device", error)
            raise error
        if not self._hears_of_loss():
            if not isinstance(error, Suspicion):
                raise error
            self._suspect()
        if not self._built:
            threading.Event().wait()  # it was initializing in step with a lost worker: the agent is about to kill it
        begun, heard = time.monotonic(), self._heard_at
        error.__traceback__ = None  # the traceback keeps the interrupted iteration's activations alive
        self._settle()
        self._meet()
        return Interruption(self._generation, self._cause, self._reason, begun - heard, time.monotonic() - begun)

    @property
    def guests_wait(self) -> bool:
        """As :attr:`Job.guests_wait`."""
        return 0 <= self._generation == self._welcomes

    def meet_guests(self) -> Interruption:
        """As :meth:`Job.meet_guests`.  A loss meanwhile begins a generation, too."""
        PROGRESS.forget()
        begun = time.monotonic()
        self._say("parted", generation=self._generation)
        while not self._hears_of_loss():
            self._say("parted", generation=self._generation)
        self._settle()
        self._meet()
        return Interruption(self._generation, self._cause, self._reason, 0.0, time.monotonic() - begun)

    def start_over(self) -> NoReturn:
        """As :meth:`Job.start_over`."""
        os._exit(START_OVER)

    def gives_back(self, memory: Path) -> None:
        """As :meth:`Job.gives_back`; includes nodes that have become spares."""
        self._say("gives_back", memory=str(memory))

    def leave(self) -> None:
        """As :meth:`Job.leave`.  Groups that cannot be aborted end with this process, since its work is done."""
        assert self._groups is not None  # it is connected
        with contextlib.suppress(WireError):  # the agent is gone, so the node is lost
            self._say("alive", **PROGRESS.report())  # with the last iteration
        try:
            self._groups.destroy()
        except AbortError as error:
            print_lines(f"mocrun: worker {self.rank} has done its work, and leaves ({error})", error=True, flush=True)

    def _settle(self) -> None:
        """Waits until the last generation is aborted and the device is idle, or ends this worker."""
        assert self._groups is not None and self._device is not None  # it is connected
        self._abort(self._groups, self._wanted - 1)  # waits if the listening thread is aborting
        try:
            compute_device.check_patiently(self._device)
        except compute_device.BrokenDeviceError as error:
            self._end(str(error), error, code="device-broken")

    def _abort(self, groups: Groups, generation: int) -> None:
        """Aborts generations up to this one, or ends this worker; other threads wait until it is done."""
        with self._aborting:
            try:
                groups.abort(generation)
            except RuntimeError as error:
                self._end(f"cannot go on ({cause_of(error)})", error)

    def _end_if_device_is_broken(self, error: BaseException) -> None:
        if self._device is not None:
            try:
                compute_device.check(self._device)
            except compute_device.BrokenDeviceError as broken:
                self._end(str(broken), error, code="device-broken")

    def _end(self, why: str, error: BaseException, code: str | None = None) -> NoReturn:
        """Ends this process as a lost worker, to be replaced.

        Args:
            why: predicate of a sentence about the worker.
            error: error whose traceback is printed.
            code: code of the error; None for its own.
        """
        print_traceback(error)
        print_lines(f"mocrun: worker {self.rank} {why}: it ends itself, to be replaced", error=True, flush=True)
        with contextlib.suppress(WireError):
            self._say("broken", why=why, code=code or code_of(error))
        time.sleep(NEWS_S)  # the agent kills this process meanwhile, and so knows the reason
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")

    def _guard(self, body: Callable[[], None]) -> None:
        """Runs the body of an essential thread, and ends this worker if it fails."""
        try:
            body()
        except Exception as error:
            self._end(f"cannot go on ({cause_of(error)})", error)

    def _suspect(self) -> None:
        """Reports lost connections until the next generation; without a controller, the agent ends this worker."""
        while not self._hears_of_loss():
            self._say("suspects", generation=self._generation)

    def _hears_of_loss(self) -> bool:
        with self._news:
            return self._news.wait_for(lambda: self._wanted > self._generation, NEWS_S)

    def _meet(self) -> None:
        """Waits until all workers are connected, in this or a later generation."""
        while not self._meets_in(self._wanted):
            pass

    def _meets_in(self, generation: int) -> bool:
        """Returns whether all workers connected in this generation; False if one was lost meanwhile."""
        reached = False
        with self._news:
            while self._store[0] < generation and self._wanted <= generation:
                self._say("here", generation=generation, parts=self.parts, iteration=PROGRESS.iteration)
                if not reached:
                    reached = True
                    reach("meeting")
                self._news.wait(NEWS_S)
            if self._wanted > generation:
                return False
            address, self._generation, self.term = self._store[1], generation, (self._epoch, generation)
            seat = self._seat
        assert self._groups is not None  # it is connected
        if seat != (self.rank, self.size, self.helpers):
            self._move(*seat)
        try:
            self._groups.begin(
                lambda: MeetingClient(address, self._token, generation, self._timeout), generation, self.id
            )
            self._say("met", generation=generation)
            return True
        except RuntimeError as error:  # a worker was lost while connecting, or the store with its controller
            self._end_if_device_is_broken(error)
            if not self._hears_of_loss():
                self._suspect()
            return False

    def _move(self, rank: int, size: int, helpers: tuple[int, ...]) -> None:
        """Continues as another rank, in a world of another size or with other partial-model nodes."""
        assert self._groups is not None and self.regroup is not None  # only such workers get another rank
        self.rank, self.size, self.helpers = rank, size, helpers
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
        self._groups.move(rank, size)
        self.regroup()

    def _say(self, kind: str, **what) -> None:
        self._connection.send(Message({"kind": kind} | what))

    def _say_alive(self) -> None:
        while True:
            PROGRESS.wait_for_report(_ALIVE_S)
            try:
                self._say("alive", **PROGRESS.report())
            except WireError:
                os._exit(1)  # the agent is gone, so the node is lost
            time.sleep(_REPORT_S)

    def _watch_lease(self) -> None:
        """Ends this process when the lease expires, even if the agent is stopped."""
        while self._lease is not None:
            self._lease.enforce()
            left = self._lease.left
            time.sleep(_ALIVE_S if math.isinf(left) else max(0.001, min(_ALIVE_S, left)))

    def _listen(self) -> None:
        while True:
            try:
                said = self._connection.recv().header
            except WireError:
                os._exit(1)
            with self._news:
                if said["kind"] == "go":
                    self._store = said["generation"], said["store"]
                    self._epoch, self.id = said["epoch"], said["job"]
                    self._seat = said["rank"], said["size"], tuple(said["helpers"])
                elif said["kind"] == "welcome":
                    self._welcomes = said["generation"]
                elif said["generation"] >= self._wanted:  # a new worker also gets the reason of its current generation
                    self._wanted, self._cause, self._reason = said["generation"], said["cause"], said["reason"]
                    self._heard_at = time.monotonic()
                self._news.notify_all()
            if said["kind"] == "abort" and self._groups is not None:
                self._abort(self._groups, said["generation"] - 1)


def join_job() -> Job:
    """Returns the job of this process.  Exits with an error message if torch lacks a private interface."""
    if environment.AGENT in os.environ:  # the launcher has checked torch
        return JobMember.join()
    try:
        private_interfaces.require("snapshots")
    except private_interfaces.UnknownReleaseError as error:
        sys.exit(f"error: {with_code(error)}")
    return Job()
