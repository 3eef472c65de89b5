"""Tracks failures and delays of storage, the only or an additional tier, and decides when snapshots go there.

Decisions follow from commit all-reduces, so they are identical on all workers.  Clocks differ, so the all-reduces
include all states that depend on a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass

from moc.errors import warning, with_code
from moc.session.components import Components
from moc.session.engine import Listener
from moc.session.resume.point import ResumePoint
from moc.session.resume.resuming import tidy_storage
from moc.session.settings import Settings
from moc.store.errors import CheckpointError, TakenError
from moc.trouble import Trouble

_LATE_AFTER = 100
"""Iterations that a snapshot may take to reach storage, if no ``--persist-interval`` is given."""

VOTES = 3
"""Iterations whose commit all-reduces a snapshot takes: copied, written, committed."""

_LISTEN_S = 0.5
_LONG_S = 30.0


@dataclass(frozen=True)
class Lag:
    """Lag of storage behind training, in iterations.

    Attributes:
        age: iterations that would be repeated if all memory were lost.
        overdue: number of operators whose newest state in storage is older than the policy promises.
        operators: number of operators of the model.
        oldest: age of the oldest overdue operator; 0 if none is overdue.
    """

    age: int
    overdue: int
    operators: int
    oldest: int


def tolerable(future: Future) -> BaseException | None:
    """Returns the error that kept a snapshot from storage, unless it is a bug or another job owns the storage.

    Training may continue after such an error.
    """
    error = future.exception() if future.done() and not future.cancelled() else None
    is_storage = isinstance(error, (CheckpointError, OSError)) and not isinstance(error, TakenError)
    return error if is_storage else None


class StorageHealth:
    """Failures and delays of storage.

    Args:
        every: iterations between snapshots that go to storage in addition to a memory tier; None without such a tier,
            or for none.
        late_after: minimum iterations that a snapshot may be on its way before the next one counts as skipped.
        publishes_in: returns the iterations until a snapshot is committed if the write takes no time: all-reduces, and
            later snapshots of its window.
        newest: iteration of the newest snapshot in storage; None if there is none.
        prepare: starts to prepare storage in the background, on one worker; nothing is written there before.
    """

    def __init__(
        self,
        name: str,
        every: int | None,
        late_after: int,
        newest: int | None,
        log: Listener,
        prepare: Callable[[], Future] | None = None,
        publishes_in: Callable[[], int] = lambda: 0,
    ):
        self._publishes_in = publishes_in
        self._name, self.every, self._log = name, every, log
        self.newest, self._stored_at = newest, None
        self._due = every or 0
        self._late_after = every and max(every, late_after)
        self._missed: tuple[int | None, int] = None, 0
        self.failures = self.skipped = 0
        self._failing, self._late, self._waits, self._lags = Trouble(), Trouble(), Trouble(), Trouble()
        self._lag: Lag | None = None
        self._prepare, self._ready = prepare, None if prepare is None else prepare()
        self.rests = False
        """Storage has failed, and is not used for a while."""
        self.closed = True
        """Storage is not ready yet, as of the last all-reduce."""

    @property
    def late(self) -> bool:
        """Whether the pending write has taken so long that another snapshot was due."""
        return bool(self._late)

    def ballot(self) -> dict[str, float]:
        """Returns whether storage rests or is closed for this worker."""
        return {"storage_rests": float(self._failing.rests), "storage_closed": float(not self._is_ready())}

    def on_vote(self, tally: Mapping[str, float]) -> None:
        """Receives whether storage rests or is closed for any worker."""
        self.rests, self.closed = tally["storage_rests"] > 0, tally["storage_closed"] > 0

    def is_due(self, iteration: int) -> bool:
        """Whether a snapshot of this iteration should go to storage."""
        return self.every is not None and iteration >= self._due

    def problem(self) -> str | None:
        """Returns the reason to end the job, or None."""
        if self._ready is None or not self._ready.done() or tolerable(self._ready):
            return None
        error = self._ready.exception()
        return with_code(error) if error else None

    def begins(self, iteration: int) -> None:
        """Records that a snapshot starts on its way to storage."""
        if self.every is not None:
            self._due = (iteration // self.every + 1) * self.every

    def wait(self) -> None:
        """Waits for storage to be prepared, on the worker that prepares it, or for a moment."""
        if self._ready is not None:
            wait([self._ready], timeout=_LISTEN_S)

    def is_waited_for(self, seconds: float) -> None:
        """Records that the run waits for all pending snapshots; warns if that takes long."""
        if seconds > _LONG_S and self._waits.failed():
            what = f"the run has waited for {self._name} for {seconds:.0f} s"
            self._log.message(warning(f"{what}; {self._newest_there()}. Fix: repair it", code="storage-slow"))

    def passes(self, iteration: int, under_way: int | None) -> None:
        """Records a completed iteration; warns if a snapshot was due for storage while another is on its way there."""
        if under_way is None or self._late_after is None:
            return
        missed = max(0, iteration - under_way - self._publishes_in()) // self._late_after
        before = self._missed[1] if self._missed[0] == under_way else 0
        if missed <= before:
            return
        self._missed = under_way, missed
        self.skipped += 1
        age_s = self._age_s()
        self._log.events.write(
            "save_skipped", iteration=iteration, under_way=under_way, newest=self.newest, age_s=age_s, where=self._name
        )
        if self._late.failed():
            self._log.message(
                warning(
                    f"{self._name} is slow: the snapshot of iteration {under_way} is still being written there, and "
                    f"later ones are only in memory; {self._newest_there()}. Fix: repair it, or raise "
                    "--persist-interval",
                    code="storage-slow",
                )
            )

    def lags(self, lag: Lag | None) -> None:
        """Records the lag after an iteration; warns if storage lacks state that the policy promises to be there."""
        self._lag = lag
        if lag is None:
            return
        if lag.overdue and self._lags.failed():
            self._log.message(
                warning(
                    f"{self._name} lags behind: the newest state there of {lag.overdue} of {lag.operators} operators "
                    f"is older than the policy promises, and the oldest is {lag.oldest} iterations old. If all memory "
                    "were lost, the run would lose or repeat the updates since then; "
                    f"{self._newest_there()}. Fix: use faster storage, or save fewer bytes",
                    code="storage-lags",
                )
            )
        elif not lag.overdue and self._lags:
            warned, seconds = self._lags.warned, self._lags.over()
            if warned:
                self._log.message(f"{self._name} has all state that the policy promises again, after {seconds:.0f} s")

    def failed(self, iteration: int, problem: str) -> None:
        """Records that a snapshot could not be saved to storage."""
        self.failures += 1
        if self.every is not None:
            self._due = iteration + 1  # as soon as a retry is allowed
        self._late.over()
        warns = self._failing.failed()
        self.rests = True
        self._log.events.write(
            "save_failed",
            what="snapshot",
            iteration=iteration,
            reason=problem,
            failures=self.failures,
            lasted_s=round(self._failing.seconds, 3),
            newest=self.newest,
            age_s=self._age_s(),
        )
        if warns:
            lasted = f", for {self._failing.seconds:.0f} s now" if self._failing.seconds > 1 else ""
            self._log.message(
                f"WARNING: snapshots cannot be saved{lasted}, and training continues and tries again; "
                f"{self._newest_there()}: {problem}"
            )

    def on_stored(self, newest: int | None) -> None:
        """Records a snapshot in storage, and the iteration that a run could resume from there; None if none."""
        for trouble, told in (
            (self._failing, "snapshots can be saved again, after {:.0f} s; " + f"{self.failures} could not be"),
            (self._late, f"{self._name} was slow for {{:.0f}} s; {self.skipped} snapshots were not written there"),
        ):
            warned, seconds = trouble.warned, trouble.over()
            if warned:
                self._log.message(told.format(seconds))
        if newest != self.newest:
            self.newest, self._stored_at = newest, time.monotonic()
        self.rests = False

    @property
    def gauges(self) -> dict[str, float]:
        """Counts of failed and skipped saves, if above 0; the lag of storage, if snapshots go there during the run."""
        counted = {"saves_failed": self.failures, "saves_skipped": self.skipped}
        found = {name: float(count) for name, count in counted.items() if count}
        if self._lag is not None:
            found |= {"storage_age": float(self._lag.age), "storage_overdue": float(self._lag.overdue)}
        return found

    def _is_ready(self) -> bool:
        if self._ready is None or self._prepare is None:
            return True
        if not self._ready.done():
            return False
        error = tolerable(self._ready)
        if error is None:
            if self._ready.exception() is None:
                self._ready = None
            return self._ready is None
        if not self._failing.rests:
            if self._failing.failed():
                self._log.message(f"WARNING: {self._name} cannot be used, and training continues: {with_code(error)}")
            self._ready = self._prepare()
        return False

    def _age_s(self) -> float | None:
        return None if self._stored_at is None else round(time.monotonic() - self._stored_at, 3)

    def _newest_there(self) -> str:
        if self.newest is None:
            return "none was saved there since this start"
        age = f"{self._age_s():.0f} s old" if self._stored_at is not None else "from before this start"
        return f"the newest one there is of iteration {self.newest}, {age}"


def storage_of(settings: Settings, parts: Components, start: ResumePoint, log: Listener, beside: bool) -> StorageHealth:
    """Builds the tracker; with ``beside``, storage is taken and cleaned up in the background."""

    def make_ready() -> None:
        parts.tiers.storage.take()
        tidy_storage(parts.tiers, start)

    return StorageHealth(
        name=parts.tiers.storage.storage.name,
        every=parts.tiers.persist_interval if parts.tiers.memory is not None else None,
        late_after=settings.persist_interval or _LATE_AFTER,
        newest=None if start.newest in start.in_memory else start.newest,
        log=log,
        publishes_in=lambda: parts.policy.schedule.window_length - 1 + VOTES,
        prepare=(lambda: parts.publisher.beside(make_ready)) if beside and parts.world.rank == 0 else None,
    )
