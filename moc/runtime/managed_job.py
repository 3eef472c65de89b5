"""A worker's job under our launcher: it receives notices of lost workers, and reconnects by a rendezvous store."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # public, but not in __all__

from moc import private_interfaces
from moc.cli_output import print_lines, print_traceback
from moc.errors import cause_of, code_of, with_code
from moc.fault_points import reach
from moc.runtime import device as compute_device
from moc.runtime import environment
from moc.runtime.abort import AbortError
from moc.runtime.connections import HANDSHAKE_TIMEOUT_S, Connection, connect, retry_connect
from moc.runtime.groups import Groups, PeerFailure
from moc.runtime.job import Interruption, Job
from moc.runtime.progress import PROGRESS, Lease
from moc.runtime.protocol import (
    Message,
    PeerGoneError,
    WireError,
    pack_values,
    token_from_environment,
    unpack_values,
)
from moc.runtime.termination import START_OVER

_GRACE_S = 30.0
"""Seconds that the store may take to answer, in addition to a requested wait."""

NOTICE_TIMEOUT_S = 5.0
"""Seconds to wait after an error for a notice of a lost worker, before the error counts as this worker's own.

Messages are repeated at the same interval, because their receiver may have died.
"""


class ValueTimeoutError(RuntimeError):
    """A value was not set in time."""


class RendezvousClient(Store):
    """The rendezvous store of one generation.

    torch calls the methods from any thread; the creator must keep this object while torch uses it.  After an error
    other than :class:`ValueTimeoutError` the connection is closed, and every method raises.

    Args:
        address: address of the controller.
        token: the job's secret.
        generation: number of the generation.
        timeout: default timeout of a wait.

    Raises:
        WireError: the controller cannot be reached.
    """

    def __init__(self, address: str, token: bytes, generation: int, timeout: timedelta):
        super().__init__()
        self.set_timeout(timeout)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._values_received: dict[str, bytes] = {}  # set or awaited here, and not read yet: most waits precede a get
        self._connection = _connect(address, token)
        self._connection.send(Message({"kind": "meets", "generation": generation}))

    def set(self, key: str, value: str | bytes) -> None:
        """Stores a value."""
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        """Returns a value once it is set."""
        return self._values([key], self._timeout, keep=False)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns several values once all are set."""
        return self._values(keys, self._timeout, keep=False)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Stores several values."""
        data = {k: v.encode() if isinstance(v, str) else bytes(v) for k, v in zip(keys, values, strict=True)}
        with self._lock:
            self._values_received |= data
            self._connection.send(pack_values("set", data))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch: two overloads
        """Waits until all keys are set."""
        self._values(keys, self._timeout if timeout is None else timeout, keep=True)

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys are set."""
        return self._request(Message({"kind": "check", "keys": list(keys)})).header["all"]

    def add(self, key: str, amount: int) -> int:
        """Adds to the number at a key; returns the sum."""
        return self._request(Message({"kind": "add", "key": key, "amount": amount})).header["sum"]

    def delete_key(self, key: str) -> bool:
        """Removes a key; returns whether it was set."""
        self._values_received.pop(key, None)
        return self._request(Message({"kind": "delete", "key": key})).header["was"]

    def has_extended_api(self) -> bool:
        """Returns whether one call can read several values."""
        return True

    def clone(self) -> Store:
        """Returns itself, since a connection serves all threads."""
        return self

    def close(self) -> None:
        """Closes the connection; waiting threads get a :class:`PeerGoneError`."""
        self._connection.close()

    def _values(self, keys: Sequence[str], timeout: timedelta, keep: bool) -> list[bytes]:
        missing = [key for key in keys if key not in self._values_received]
        if missing:
            seconds = timeout.total_seconds()
            reply = self._request(Message({"kind": "get", "keys": missing, "within": seconds}), seconds + _GRACE_S)
            if reply.kind == "late":
                raise ValueTimeoutError(f"{', '.join(reply.header['keys'])} did not arrive within {seconds:g} s")
            self._values_received |= unpack_values(reply.header, reply.body)
        return [self._values_received[key] if keep else self._values_received.pop(key) for key in keys]

    def _request(self, message: Message, seconds: float = _GRACE_S) -> Message:
        with self._lock:
            self._connection.send(message)
            try:
                return self._connection.recv(seconds)
            except TimeoutError:
                self._connection.close()  # a late answer would be taken for the answer to the next request
                raise PeerGoneError(f"the store has not answered within {seconds:g} s") from None


def _connect(address: str, token: bytes) -> Connection:
    """Connects, with retries: in a large job, the server drops connections if too many are in the handshake."""
    return retry_connect(lambda: connect(address, token), HANDSHAKE_TIMEOUT_S, except_cause=ConnectionRefusedError)


def _gather_locally(gathered: list, local, group=None) -> None:
    gathered[:] = [local] * len(gathered)


def _gather_tensor_locally(output_tensor: torch.Tensor, input_tensor: torch.Tensor, group=None, async_op=False) -> None:
    output_tensor.view(-1, input_tensor.numel())[:] = input_tensor.view(-1)


_LOCAL_COLLECTIVES = {
    "barrier": lambda *_, **__: None,
    "all_reduce": lambda *_, **__: None,
    "all_gather_object": _gather_locally,
    "all_gather_into_tensor": _gather_tensor_locally,
    **({"all_gather_single": _gather_tensor_locally} if hasattr(dist, "all_gather_single") else {}),  # from torch 2.13
}
"""Local substitutes for collectives that compare workers' setup, for a replacement that initializes separately.

megatron-core's optimizer gathers the kinds of parameters, and creates an empty group for a kind that a rank lacks.
"""


class ManagedJob(Job):
    """A job of our launcher, connected to this node's agent: lost workers are replaced, and the others survive."""

    def __init__(self, connection: Connection, token: bytes):
        super().__init__()
        self._connection, self._token = connection, token
        self._starts_together = os.environ[environment.STARTS_TOGETHER] == "1"
        self._first_generation = int(os.environ[environment.GENERATION])
        self._groups: Groups | None = None
        self._abort_lock = threading.Lock()
        self._device: torch.device | None = None
        self._replaced_collectives: dict[str, Callable] = {}
        self._is_ready, self._start_s = False, 0.0
        self._notice = threading.Condition()
        self._newest_generation, self._newest_reason = (
            self._first_generation,
            ("", "", {}),
        )  # cause, reason, what was lost
        self._reason = self._newest_reason  # of the generation in which this worker is connected
        self._notice_at = time.monotonic()
        self._store: tuple[int, str] = (-1, "")
        self.partial_model_parts = tuple(
            map(int, filter(None, os.environ.get(environment.PARTIAL_MODEL_PARTS, "").split(",")))
        )
        self._rank_assignment = self.rank, self.size, self.partial_model_parts  # in the generation of the store
        self._generation = -1  # generation of the groups; -1 before the first
        self._change_notice: tuple[int, tuple[int, ...]] = (-1, ())  # newest generation with one, and departing blocks
        self._epoch = 0
        PROGRESS.discard("setup")
        self._send("hello", worker=os.environ[environment.WORKER])
        bodies: list[tuple[str, Callable[[], None]]] = [
            ("moc-listen", self._listen),
            ("moc-heartbeats", functools.partial(PROGRESS.send_reports, connection)),
        ]
        if (lease := Lease.from_environment()) is not None:
            bodies.append(("moc-lease", lease.watch))
        for name, body in bodies:
            threading.Thread(target=self._guard, args=(body,), name=name, daemon=True).start()

    @classmethod
    def join(cls) -> ManagedJob:
        """Joins the job that the environment describes.

        A worker that its agent does not admit within :data:`~moc.runtime.connections.CONNECT_TIMEOUT_S` kills itself,
        and is replaced as a lost one.  This is no error of the job, and ``--max-restarts`` limits how often it happens.
        """
        token = token_from_environment()
        try:
            return cls(retry_connect(lambda: connect(os.environ[environment.AGENT], token)), token)
        except PeerGoneError as error:
            worker = f"worker {os.environ.get('RANK')}"
            reason = f"cannot join its agent ({cause_of(error)}): it ends itself, to be replaced"
            print_lines(f"mocrun: {worker} {reason}", error=True, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
            raise

    def connect(self, backend: str, timeout: timedelta, device: torch.device) -> None:
        """As :meth:`Job.connect`; the groups survive lost workers."""
        self._timeout, self._device = timeout, device
        options = dict(collectives_only=self.collectives_only, unbatched=self.unbatched)
        self._groups = Groups(self.rank, self.size, backend, timeout, device, self._token, **options)
        self._groups.install()
        if self._starts_together:
            start = time.monotonic()
            self._reconnect()
            self._start_s = time.monotonic() - start
        else:
            self._replaced_collectives = {name: getattr(dist, name) for name in _LOCAL_COLLECTIVES}
            dist.__dict__.update(_LOCAL_COLLECTIVES)

    @property
    def joins_running_job(self) -> bool:
        return not self._starts_together

    @property
    def is_restart(self) -> bool:
        return self._first_generation > 0

    def report_ready(self) -> Interruption | None:
        if not self._is_ready:
            self._is_ready = True
            PROGRESS.discard()
            self._send("built", stays=self.recreate_groups is not None)
            if self._starts_together and self._generation > 0:  # no worker has survived the losses
                return Interruption(self._generation, *self._reason, 0.0, self._start_s)
        if self._generation >= 0:
            return None
        dist.__dict__.update(self._replaced_collectives)  # a replacement, initialized separately
        start = time.monotonic()
        self._reconnect()
        return Interruption(self._generation, *self._reason, 0.0, time.monotonic() - start)

    def rejoin_after(self, error: Exception) -> Interruption:
        """As :meth:`Job.rejoin_after`.  A worker with a broken device ends here, and counts as lost."""
        PROGRESS.discard()
        self._end_if_device_is_broken(error)
        if self._generation < 0:  # not yet connected to the others
            if not self._starts_together and compute_device.is_device_error(error):
                self._end_as_lost("has replaced a lost worker, and gets no device", error)
            raise error
        if not self._wait_for_notice():
            if not isinstance(error, PeerFailure):
                raise error
            # an operation that the backend does not support fails like this, too
            print_lines(f"mocrun: worker {self.rank} has lost connections ({cause_of(error)})", error=True, flush=True)
            self._report_peer_failure()
        if not self._is_ready:
            threading.Event().wait()  # it was initializing in step with a lost worker: the agent is about to kill it
        start, notice_at = time.monotonic(), self._notice_at
        error.__traceback__ = None  # the traceback keeps the interrupted iteration's activations alive
        self._finish_abort()
        self._reconnect()
        return Interruption(self._generation, *self._reason, start - notice_at, time.monotonic() - start)

    @property
    def has_change_notice(self) -> bool:
        return 0 <= self._generation == self._change_notice[0]

    @property
    def departing(self) -> tuple[int, ...]:
        return self._change_notice[1] if self.has_change_notice else ()

    def change_members(self, has_handed_over: bool = False) -> Interruption:
        """As :meth:`Job.change_members`.  A loss meanwhile begins a generation, too."""
        PROGRESS.discard()
        start = time.monotonic()
        self._send("parted", generation=self._generation, handed_over=has_handed_over)
        while not self._wait_for_notice():
            self._send("parted", generation=self._generation, handed_over=has_handed_over)
        self._finish_abort()
        self._reconnect()
        return Interruption(self._generation, *self._reason, 0.0, time.monotonic() - start)

    def start_over(self) -> NoReturn:
        os._exit(START_OVER)

    def allow_memory_release(self, memory: Path) -> None:
        """As :meth:`Job.allow_memory_release`; includes nodes that have become spares."""
        self._send("gives_back", memory=str(memory))

    def leave(self) -> None:
        """As :meth:`Job.leave`.  Groups that cannot be aborted end with this process, since its work is done."""
        assert self._groups is not None  # it is connected
        with contextlib.suppress(WireError):  # the agent is gone, so the node is lost
            self._send("alive", **PROGRESS.report())  # with the last iteration
        try:
            self._groups.destroy()
        except AbortError as error:
            print_lines(f"mocrun: worker {self.rank} has done its work, and leaves ({error})", error=True, flush=True)

    def _finish_abort(self) -> None:
        """Waits until the last generation is aborted and the device is idle, or ends this worker."""
        assert self._groups is not None and self._device is not None  # it is connected
        self._abort(self._groups, self._newest_generation - 1)  # waits if the listening thread is aborting
        try:
            compute_device.check_with_timeout(self._device)
        except compute_device.BrokenDeviceError as error:
            self._end_as_lost(str(error), error, code="device-broken")

    def _abort(self, groups: Groups, generation: int) -> None:
        """Aborts generations up to this one, or ends this worker; other threads wait until it is done."""
        with self._abort_lock:
            try:
                groups.abort(generation)
            except RuntimeError as error:
                self._end_as_lost(f"cannot continue ({cause_of(error)})", error)

    def _end_if_device_is_broken(self, error: BaseException) -> None:
        if self._device is not None:
            try:
                compute_device.check_device(self._device)
            except compute_device.BrokenDeviceError as broken:
                self._end_as_lost(str(broken), error, code="device-broken")

    def _end_as_lost(self, reason: str, error: BaseException, code: str | None = None) -> NoReturn:
        """Ends this process as a lost worker, to be replaced.

        Args:
            reason: predicate of a sentence about the worker.
            error: error whose traceback is printed.
            code: code of the error; None for its own.
        """
        print_traceback(error)
        print_lines(f"mocrun: worker {self.rank} {reason}: it ends itself, to be replaced", error=True, flush=True)
        with contextlib.suppress(WireError):
            self._send("broken", why=reason, code=code or code_of(error))
        time.sleep(NOTICE_TIMEOUT_S)  # the agent kills this process meanwhile, and so knows the reason
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")

    def _guard(self, body: Callable[[], None]) -> None:
        """Runs the body of an essential thread, and ends this worker if it fails."""
        try:
            body()
        except Exception as error:
            self._end_as_lost(f"cannot continue ({cause_of(error)})", error)

    def _report_peer_failure(self) -> None:
        """Reports lost connections until the next generation; without a controller, the agent ends this worker."""
        while not self._wait_for_notice():
            self._send("suspects", generation=self._generation)

    def _wait_for_notice(self) -> bool:
        with self._notice:
            return self._notice.wait_for(lambda: self._newest_generation > self._generation, NOTICE_TIMEOUT_S)

    def _reconnect(self) -> None:
        """Waits until all workers are connected, in this or a later generation."""
        while not self._connect_in(self._newest_generation):
            pass

    def _connect_in(self, generation: int) -> bool:
        """Returns whether all workers connected in this generation; False if one was lost meanwhile."""
        fault_point_reached = False
        with self._notice:
            while self._store[0] < generation and self._newest_generation <= generation:
                self._send("here", generation=generation, parts=self.nodes_per_model, iteration=PROGRESS.iteration)
                if not fault_point_reached:
                    fault_point_reached = True
                    reach("ready")
                self._notice.wait(NOTICE_TIMEOUT_S)
            if self._newest_generation > generation:
                return False
            address, self._generation, self.term = self._store[1], generation, (self._epoch, generation)
            self._reason = self._newest_reason
            assignment = self._rank_assignment
        assert self._groups is not None  # it is connected
        if assignment != (self.rank, self.size, self.partial_model_parts):
            self._change_rank(*assignment)
        try:
            self._groups.begin(
                lambda: RendezvousClient(address, self._token, generation, self._timeout), generation, self.id
            )
            self._send("met", generation=generation)
            return True
        except RuntimeError as error:  # a worker was lost while connecting, or the store with its controller
            self._end_if_device_is_broken(error)
            if not self._wait_for_notice():
                self._report_peer_failure()
            return False

    def _change_rank(self, rank: int, size: int, partial_model_parts: tuple[int, ...]) -> None:
        """Continues as another rank, in a world of another size or with other partial-model nodes."""
        assert self._groups is not None and self.recreate_groups is not None  # only such workers get another rank
        self.rank, self.size, self.partial_model_parts = rank, size, partial_model_parts
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
        self._groups.change_rank(rank, size)
        self.recreate_groups()

    def _send(self, kind: str, **fields) -> None:
        self._connection.send(Message({"kind": kind} | fields))

    def _listen(self) -> None:
        while True:
            try:
                message = self._connection.recv().header
            except WireError:
                os._exit(1)
            with self._notice:
                if message["kind"] == "go":
                    self._store = message["generation"], message["store"]
                    self._epoch, self.id = message["epoch"], message["job"]
                    self._rank_assignment = message["rank"], message["size"], tuple(message["helpers"])
                elif message["kind"] == "welcome":
                    self._change_notice = message["generation"], tuple(message["departing"])
                elif (
                    message["generation"] >= self._newest_generation
                ):  # a new worker also gets the reason of its current generation
                    self._newest_generation = message["generation"]
                    self._newest_reason = message["cause"], message["reason"], message["lost"]
                    self._notice_at = time.monotonic()
                self._notice.notify_all()
            if message["kind"] == "abort" and self._groups is not None:
                self._abort(self._groups, message["generation"] - 1)


def join_job() -> Job:
    """Returns the job of this process.  Exits with an error message if torch lacks a private interface."""
    if environment.AGENT in os.environ:  # the launcher has checked torch
        return ManagedJob.join()
    try:
        private_interfaces.require("snapshots")
    except private_interfaces.UnknownReleaseError as error:
        sys.exit(f"error: {with_code(error)}")
    return Job()
