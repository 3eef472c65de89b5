"""The worker's side of a job that outlives its workers: hears of losses, and meets the others again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from moc.faults import reach
from moc.runtime import environment
from moc.runtime.connections import Connection, connect
from moc.runtime.groups import Groups, Suspicion
from moc.runtime.job import Job, Loss
from moc.runtime.job_token import token_from_environment
from moc.runtime.membership import START_OVER
from moc.runtime.message import Message
from moc.runtime.progress import PROGRESS
from moc.runtime.wire import WireError

NEWS_S = 5.0
"""After an error, how long to wait for the news that another worker is lost, before it counts as this worker's own."""

_ALIVE_S = 1.0


def _gather_alone(gathered: list, own, group=None) -> None:
    gathered[:] = [own] * len(gathered)


_ALONE = {"barrier": lambda *_, **__: None, "all_reduce": lambda *_, **__: None, "all_gather_object": _gather_alone}
"""By what workers that build together wait for each other and compare what they have, where there is nobody to ask.

megatron-core's optimizer gathers the kinds of parameters, so that a kind which a rank has not is an empty group there.
"""


class Member(Job):
    """A job of our own launcher: when a worker is lost, the others live on, and another takes its place.

    Args:
        connection: to the agent of this node.
    """

    def __init__(self, connection: Connection):
        super().__init__()
        self._connection = connection
        self._together = os.environ[environment.TOGETHER] == "1"
        self._started_for = int(os.environ[environment.GENERATION])
        self._groups: Groups | None = None
        self._real: dict[str, Callable] = {}
        self._built = False
        self._news = threading.Condition()
        self._wanted, self._reason, self._heard_at = self._started_for, "", time.monotonic()
        self._store: tuple[int, str] = (-1, "")
        self._generation = -1  # of the groups
        PROGRESS.forget("setup")
        self._say("hello", worker=os.environ[environment.WORKER])
        for body in (self._listen, self._say_alive):
            threading.Thread(target=body, name=f"moc-{body.__name__}", daemon=True).start()

    @classmethod
    def join(cls) -> Member:
        """The job that the environment speaks of."""
        return cls(connect(os.environ[environment.AGENT], token_from_environment()))

    def connect(self, backend: str, timeout: timedelta, device: torch.device) -> None:
        """As :meth:`Job.connect`; groups keep what they are when others are lost."""
        self._timeout = timeout
        self._groups = Groups(self.rank, self.size, backend, timeout, device)
        self._groups.install()
        if self._together:
            self._meet()
        else:
            self._real = {name: getattr(dist, name) for name in _ALONE}
            vars(dist).update(_ALONE)

    def built(self) -> None:
        """As :meth:`Job.built`."""
        if not self._built:
            self._built = True
            PROGRESS.forget()
            self._say("built")
        if self._generation < 0:  # it has built alone
            vars(dist).update(self._real)
            self._meet()

    def go_on_after(self, error: Exception) -> Loss:
        """As :meth:`Job.go_on_after`."""
        PROGRESS.forget()
        if self._generation < 0:  # nobody else is concerned yet
            raise error
        if not self._hears_of_loss():
            if not isinstance(error, Suspicion):
                raise error
            self._say("suspects", generation=self._generation)
            if not self._hears_of_loss():
                raise error
        if not self._built:
            threading.Event().wait()  # nobody builds in step with a lost one: the agent is about to kill this worker
        begun, heard = time.monotonic(), self._heard_at
        error.__traceback__ = None  # it holds the activations of the iteration that was cut off
        self._meet()
        return Loss(self._generation, self._reason, begun - heard, time.monotonic() - begun)

    def start_over(self) -> NoReturn:
        """As :meth:`Job.start_over`."""
        os._exit(START_OVER)

    def leave(self) -> None:
        """As :meth:`Job.leave`."""
        self._groups.destroy()

    def _hears_of_loss(self) -> bool:
        with self._news:
            return self._news.wait_for(lambda: self._wanted > self._generation, NEWS_S)

    def _meet(self) -> None:
        """Returns when all workers are there and connected, in whichever generation that happens."""
        while not self._meets_in(self._wanted):
            pass

    def _meets_in(self, generation: int) -> bool:
        """Whether all have met in a generation; not so if somebody was lost meanwhile."""
        self._say("here", generation=generation)
        reach("meeting")
        with self._news:
            self._news.wait_for(lambda: self._store[0] >= generation or self._wanted > generation)
            if self._wanted > generation:
                return False
            host, _, port = self._store[1].rpartition(":")
            self._generation = generation
        try:
            store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=self._timeout)
            self._groups.begin(store, generation)
            return True
        except RuntimeError:  # and of what is lost before it begins, it hears at once
            if not self._hears_of_loss():
                raise
            return False

    def _say(self, kind: str, **what) -> None:
        self._connection.send(Message({"kind": kind} | what))

    def _say_alive(self) -> None:
        while True:
            time.sleep(_ALIVE_S)
            try:
                self._say("alive", **PROGRESS.report())
            except WireError:
                os._exit(1)  # the agent is gone, and this node with it

    def _listen(self) -> None:
        while True:
            try:
                said = self._connection.recv().header
            except WireError:
                os._exit(1)
            with self._news:
                if said["kind"] == "go":
                    self._store = said["generation"], said["store"]
                elif said["generation"] > self._wanted:
                    self._wanted, self._reason = said["generation"], said["reason"]
                    self._heard_at = time.monotonic()
                self._news.notify_all()
            if said["kind"] == "abort" and self._groups is not None:
                self._groups.abort(said["generation"] - 1)
