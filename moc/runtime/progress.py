"""Liveness of workers: the progress that they report, the lease of their node, and clocks that exclude pauses.

``progress("step")`` enters this section, and completes the previous one.  The worker reports its section, the time in
it, and whether it waits for other workers.  The agent compares the time with the limit of the section.

The lease is the time until which the workers may run, in memory shared with their agent.  The agent renews it whenever
the controller answers.  If the agent is stopped or disconnected, the lease expires.  Others may then take over the
workers' ranks, so these workers must commit nothing from then on.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from moc import stream
from moc.cli_output import print_lines
from moc.errors import UserError
from moc.runtime import environment
from moc.runtime.connections import Connection
from moc.runtime.protocol import Message, WireError
from moc.stream import StreamSpans

if TYPE_CHECKING:
    import torch

HANG_CAPS = {"setup": 3600.0, "step": 1800.0, "evaluation": 1800.0, "save": 3600.0}
"""Upper limits of the time in a section, in seconds, by section."""

LEARNED_SECTIONS = ("step", "evaluation")
"""Sections of steady duration; the duration of others depends on the amount to build or write."""

HANG_FACTOR, HANG_FLOOR_S = 10.0, 60.0
"""A section hangs when it takes FACTOR times its longest measured duration, and at least FLOOR_S seconds."""

_LEASE_BYTES = 8
_HEARTBEAT_S = 1.0
_REPORT_S = 0.02  # between reports of iterations; a loss soon after an iteration must not hide it


class Progress:
    """Progress of the compute thread, which writes it; another thread reads it."""

    def __init__(self):
        self._section_since: tuple[str | None, float] = None, time.monotonic()
        self._longest: dict[str, float] = {}
        self._is_waiting, self._waited_s = False, 0.0
        self._iteration: int | None = None
        self._unreported = threading.Event()
        self._stream_spans: StreamSpans | None = None
        self._lock = threading.Lock()

    @property
    def iteration(self) -> int | None:
        """The newest iteration that this process has completed or resumed from."""
        return self._iteration

    def completed(self, iteration: int) -> None:
        """Records an iteration that this process has completed or resumed from, and has it reported."""
        self._iteration = iteration
        self._unreported.set()

    def send_reports(self, connection: Connection) -> NoReturn:
        """Sends a report to the agent after each iteration, and as a heartbeat; ends this process if the agent ends."""
        while True:
            self._unreported.wait(_HEARTBEAT_S)
            try:
                connection.send(Message({"kind": "alive"} | self.report()))
            except WireError:
                os._exit(1)  # the agent is gone, so the node is lost
            time.sleep(_REPORT_S)

    def use_stream_of(self, device: torch.device) -> None:
        """Also counts waits of this device's stream."""
        mark = stream.marker_of(device)
        self._stream_spans = None if mark is None else StreamSpans(mark)

    def enter(self, section: str) -> None:
        """Enters a section, possibly the same one; completes the previous one and records its duration."""
        before, since = self._section_since
        self._begin(section)
        if before is not None:
            self._longest[before] = max(self._longest.get(before, 0.0), self._section_since[1] - since)

    def discard(self, section: str | None = None) -> None:
        """Discards an interrupted section's duration, and enters the given section, if any."""
        if self._stream_spans is not None:
            self._stream_spans.clear()
        self._begin(section)

    def _begin(self, section: str | None) -> None:
        with self._lock:
            self._take_stream_waits()
            self._section_since, self._waited_s = (section, time.monotonic()), 0.0

    @contextlib.contextmanager
    def waiting(self, on_stream: bool = False) -> Iterator[None]:
        """Marks the thread as waiting for other workers within the block.

        Args:
            on_stream: the block enqueues an operation that makes the device's stream wait.
        """
        start = time.monotonic()
        self._is_waiting = True
        try:
            with (
                self._stream_spans.span() if on_stream and self._stream_spans is not None else contextlib.nullcontext()
            ):
                yield
        finally:
            self._is_waiting = False
            with self._lock:
                self._waited_s += time.monotonic() - start

    def report(self) -> dict:
        """Returns the state of the thread.

        Returns:
            ``section`` (None for none); ``since``, seconds in it without completed waits; ``waits``, whether it or the
            device's stream waits for other workers; ``longest``, seconds by section; and ``iteration``.
        """
        self._unreported.clear()
        with self._lock:
            waits = self._is_waiting or (self._stream_spans is not None and self._stream_spans.under_way)
            self._waited_s += self._take_stream_waits()
            section, since = self._section_since
            seconds = max(0.0, time.monotonic() - since - self._waited_s)
        longest = dict(self._longest)
        return dict(section=section, since=seconds, waits=waits, longest=longest, iteration=self.iteration)

    def _take_stream_waits(self) -> float:
        return 0.0 if self._stream_spans is None else self._stream_spans.take()


PROGRESS = Progress()
"""Progress of this process, which has one compute thread."""

progress = PROGRESS.enter


class HangCapError(UserError, ValueError):
    """The longest times of sections are invalid."""


def parse_hang_caps(text: str) -> dict[str, float]:
    """Returns the default caps, updated from text such as ``step=600,save=1800``.

    Raises:
        ValueError: a section is unknown, or a value is not a positive number of seconds.
    """
    caps = dict(HANG_CAPS)
    for entry in filter(None, text.split(",")):
        section, _, seconds = entry.partition("=")
        if section not in HANG_CAPS:
            sections = f"{', '.join(HANG_CAPS)}, as in step=600,save=1800"
            raise HangCapError(
                f"there is no section {section!r}. Fix: name some of {sections}",
                code="hang-timeout-malformed",
            )
        try:
            caps[section] = float(seconds)
        except ValueError:
            raise HangCapError(
                f"{entry!r} has no number of seconds. Fix: write {section}=600",
                code="hang-timeout-malformed",
            ) from None
        if not caps[section] > 0:
            raise HangCapError(
                f"{entry!r} leaves no time. Fix: give a positive number of seconds",
                code="hang-timeout-malformed",
            )
    return caps


@dataclass
class HangLimits:
    """Time limits in seconds, by section, learned from workers' reports."""

    caps: dict[str, float]
    longest: dict[str, float] = field(default_factory=dict)  # measured by any worker of this node

    def learn(self, longest: dict[str, float]) -> None:
        """Merges a worker's measured durations."""
        for section in LEARNED_SECTIONS:
            if section in longest:
                self.longest[section] = max(self.longest.get(section, 0.0), longest[section])

    def limit(self, section: str, waits: bool) -> float:
        """Returns the seconds that a worker may stay in a section; a waiting worker gets the largest cap."""
        if waits or section not in self.caps:
            return max(self.caps.values())
        cap, longest = self.caps[section], self.longest.get(section)
        return cap if longest is None else min(cap, max(HANG_FLOOR_S, HANG_FACTOR * longest))


class Lease:
    """Expiry time, in seconds of the machine's monotonic clock; infinite if no other worker can take over the ranks.

    The descriptor of the shared memory stays open.
    """

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self._end = ctypes.c_double.from_buffer(mmap.mmap(descriptor, _LEASE_BYTES))

    @classmethod
    def create(cls) -> Lease:
        """Creates a lease without an end, for an agent."""
        descriptor = os.memfd_create("moc-lease")
        os.truncate(descriptor, _LEASE_BYTES)
        lease = cls(descriptor)
        lease.end = math.inf
        return lease

    @classmethod
    def from_environment(cls) -> Lease | None:
        """Returns the lease of this process; None outside a job of our launcher."""
        text = os.environ.get(environment.LEASE)
        return None if text is None else cls(int(text))

    @property
    def end(self) -> float:
        """Expiry time."""
        return self._end.value

    @end.setter
    def end(self, expiry: float) -> None:
        self._end.value = expiry

    @property
    def remaining_s(self) -> float:
        """Seconds until expiry; negative afterwards."""
        return self.end - time.monotonic()

    def kill_if_expired(self) -> None:
        """Kills this process if the lease has expired, since another worker may have its rank."""
        if self.remaining_s <= 0:
            worker = f"worker {os.environ.get('RANK')}"
            reason = "has lost the controller for too long, and ends itself: another worker may have its rank"
            print_lines(f"mocrun: {worker} {reason}", error=True, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)  # as its agent would: the worker counts as lost, not as failed

    def watch(self) -> NoReturn:
        """Ends this process when the lease expires, even if the agent is stopped."""
        while True:
            self.kill_if_expired()
            left = self.remaining_s
            time.sleep(_HEARTBEAT_S if math.isinf(left) else max(0.001, min(_HEARTBEAT_S, left)))


class RunningClock:
    """Counts the seconds that this process ran, so that peers are not blamed for messages missed during its pauses.

    Args:
        max_step_s: maximum seconds between two ticks; any excess counts as a pause.

    Attributes:
        now: seconds that the process ran since construction.
    """

    def __init__(self, max_step_s: float):
        self.now, self._ticked_at, self._max_step_s = 0.0, time.monotonic(), max_step_s

    def tick(self) -> None:
        """Advances the clock by the time since the last call, without pauses; call it often."""
        current = time.monotonic()
        self.now += min(current - self._ticked_at, self._max_step_s)
        self._ticked_at = current
