"""Copies the state to host memory in the background, and finalizes the copy.

Background threads stay off the training core and hold the GIL only briefly.  A woken thread that copies or hashes often
runs on the training core, where it ran before. Training then waits for milliseconds although another core is idle. On
another core, the thread still competes for the GIL. It takes the GIL for each call and passes it to the first waiting
thread, which may not run yet. Training then sleeps until its switch interval ends. Applied separately, the two measures
save little, since one wait turns into the other; together they save most (``docs/results/selective-overhead.md``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import override

from moc.errors import with_code
from moc.fault_points import reach
from moc.policy import SnapshotPlan
from moc.session.components import Components
from moc.session.saving.replicating import MemoryTier, Replicating
from moc.session.saving.reservation import Reservation
from moc.session.saving.stage import Failure, SnapshotInProgress, Stage
from moc.session.saving.writing import Writing
from moc.store.errors import CheckpointError


class Copying(Stage):
    """First stage: copies this worker's part of a snapshot to host memory.

    Args:
        parts: components of the generation.
        reservation: buffers, and the memory that they take.
        memory: snapshots in memory.
        failure: receives the errors of this worker.
        describe: returns the non-tensor state.
        replicating: next stage.
        writing: stage of snapshots that also go to storage.
    """

    entry = "snapshot_copied"

    def __init__(
        self,
        parts: Components,
        *,
        reservation: Reservation,
        memory: MemoryTier,
        failure: Failure,
        describe: Callable[[], dict],
        replicating: Replicating,
        writing: Writing,
    ):
        super().__init__(parts.world.size)
        self._parts, self._reservation, self._memory, self._failure = parts, reservation, memory, failure
        self._describe, self._replicating, self._writing = describe, replicating, writing
        self._aside = Aside(len(parts.tiers.node))
        share_interpreter()

    def begin(self, plan: SnapshotPlan, storage: SnapshotPlan | None, in_memory: bool = True) -> None:
        """Starts to copy into a free buffer, and to write the part that goes to storage once it is finalized.

        Args:
            plan: plan of the snapshot.
            storage: the part of it that goes to storage; None if nothing does.
            in_memory: it goes to the memory tier, if there is one; otherwise only to storage.
        """
        parts, rotation = self._parts, self._reservation.rotation
        free, others = rotation.free(), rotation.all_free()
        slot = -1 if free is None else free  # -1: a buffer outside the rotation, only for storage
        if in_memory:
            self._reservation.rotation = rotation.begin(plan.iteration, storage is not None, plan.supersedes)
        carrying = self._memory.carrying
        try:
            share = parts.contents.with_gradients(plan.operators, plan.compared)
            entries = parts.contents.entries(plan.operators, share)
            carried = carrying.begin(plan) if in_memory else None
            self._aside.move(carrying.processes + parts.hasher.processes)
            state = self._describe()  # before a thread copies: both need the GIL
            nbytes = None if plan.complete else self._reservation.window.snapshot
            digests = parts.digests.of_snapshot(plan.iteration)
            part = parts.saver.take(slot, plan.iteration, share, entries, others, in_memory, carried, nbytes, digests)
        except CheckpointError as error:
            self._failure.reason = with_code(error)  # the next all-reduce reports it to the others
            return
        snapshot = SnapshotInProgress(plan, storage, state, part)
        self.queue.append(snapshot)
        self._memory.remember(snapshot)
        if storage is not None:  # needs no all-reduce
            self._writing.begin(snapshot)

    def wait_for_gradients(self) -> None:
        """Waits for the copies of gradients that the next iteration clears; none if all are in the second buffer."""
        for part in (snapshot.snapshot for snapshot in self.queue):
            if part.gradients is not None:
                begun = time.perf_counter()
                part.gradients.wait()
                part.gradients_s += time.perf_counter() - begun
                reach("gradient_staged")

    def wait_for_copies(self) -> None:
        """Waits for the copies of state that the update changes."""
        for snapshot in self.queue:
            snapshot.snapshot.state.wait()

    @override
    def work(self, snapshot: SnapshotInProgress) -> Future:
        return snapshot.snapshot.sealed

    @override
    def tolerates(self, snapshot: SnapshotInProgress) -> bool:
        return snapshot.out_of_memory is not None

    @override
    def entries(self, snapshot: SnapshotInProgress | None) -> dict[str, float]:
        mine = None if snapshot is None else snapshot.snapshot
        capture = None if mine is None or mine.sealed.exception() else mine.capture
        return {
            "snapshot_copied": float(mine is not None),
            "snapshot_no_room": float(snapshot is not None and snapshot.out_of_memory is not None),
            "snapshot_bytes": float(mine.layout.nbytes if mine else 0),
            "snapshot_copy_s": 0.0 if capture is None else capture.seconds,
            "snapshot_bubble_bytes": float(0 if capture is None else capture.bubble_bytes),
            "snapshot_gradients_s": 0.0 if mine is None or capture is None else mine.gradients_s + mine.delay(),
            "snapshot_seal_s": mine.seal_s if mine else 0.0,
        }

    @override
    def complete(self, snapshot: SnapshotInProgress, totals: Mapping[str, float]) -> None:
        if totals["snapshot_no_room"] or snapshot.iteration in self._memory.dependent:
            self._memory.abandon(snapshot, later=[*self._replicating.queue, *self.queue])
            return
        self._parts.meter.copied(totals)
        self._parts.report.snapshot(snapshot.iteration, totals, self._parts.world.size)
        if snapshot.snapshot.in_memory:  # otherwise it is durable once written
            self._replicating.begin(snapshot)


SWITCH_S = 1e-4
"""Python's switch interval during snapshots; its default of 5 ms is the duration of a complete copy."""

_BESIDE, _WITH = "snapshot-", "event-log"
"""Name prefixes of background threads, and of threads that training waits for."""

_LIBC = ctypes.CDLL(None)


def share_interpreter() -> None:
    """Lets waiting threads of this process request the GIL sooner."""
    sys.setswitchinterval(SWITCH_S)


class Aside:
    """Keeps background threads and processes off the training core if another core is left.

    Args:
        workers: number of workers on this node, each with its own training core.
    """

    def __init__(self, workers: int):
        self._workers, self._moved = workers, None

    def move(self, processes: Iterable[int] = ()) -> None:
        """Moves this process's background threads, and other processes, off the current core.

        The training thread calls it. Background threads and processes may use the other cores that it may use. The
        current core is left to training and the threads that it waits for. Processes run only when no thread needs
        their core; otherwise training could wait for them through such a thread.
        """
        allowed = os.sched_getaffinity(0)
        if len(allowed) <= self._workers:
            return
        here, threads = _processor(), threading.enumerate()
        beside, waited = (
            {one.native_id for one in threads if one.native_id is not None and one.name.startswith(name)}
            for name in (_BESIDE, _WITH)
        )
        now = here, allowed, beside | {*processes}, waited
        if now == self._moved:
            return
        self._moved = now
        for ones, there in ((now[2], allowed - {here}), (waited, {here})):
            for one in ones:
                with contextlib.suppress(OSError):  # it has ended, or the machine forbids it
                    os.sched_setaffinity(one, there)
        for process in processes:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))


def _processor() -> int:
    """Returns the core that the calling thread runs on."""
    return _LIBC.sched_getcpu()
