"""Fault tolerance of a training loop, as one worker sees it.

    session = Session(engine, settings, log, remains)
    position = session.resume()                        # from survivors, memory, storage, or nothing
    while position.iteration < iterations:
        ...                                            # forward, backward, reduce
        vote = sum_over_workers(mine | session.ballot(), engine.world)
        session.on_vote(vote)                          # what the update is about to change has been copied
        ...                                            # update
        position = session.completed(record, begun)    # the commit: from here on a lost worker undoes nothing
        session.take()                                 # a snapshot begins, where the policy wants one
    session.flush()
    session.close()

When another worker is lost, ``session.interrupt()`` keeps in ``remains`` what this one still has, and the session of
the next generation resumes with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping

from moc.policy import Policy, interval_named, policy_named
from moc.runtime.agreement import gather
from moc.session.claims import claimed, take_places
from moc.session.components import Components, build, close, may_replay
from moc.session.elsewhere import NOWHERE, Chooser, Elsewhere
from moc.session.engine import Engine, Listener
from moc.session.participant import VoteParticipant
from moc.session.resume.point import NoRecoveryPoint
from moc.session.resume.resuming import resume
from moc.session.resume.survivors import LiveState, LocalRemains
from moc.session.settings import Settings, SettingsError
from moc.session.snapshots import Describer, Snapshots
from moc.session.storage_health import storage_of
from moc.session.tiers import tiers_of
from moc.state.record import Position, StepRecord

_ENDING_S = 10.0
"""Without a memory tier, how long a write may take to end well when a worker is lost: the run resumes from it."""


class Session(VoteParticipant):
    """One generation; all methods but :meth:`close` and :meth:`interrupt` are for all workers alike.

    Args:
        engine: computes iterations.
        settings: what is saved when, where snapshots go, and how.
        log: where to report.
        remains: what this worker has left of the generation before; kept up to date.
        elsewhere: what to begin from where there is no snapshot.
        chooser: chooses policy and settings in place of those given.

    Attributes:
        position: iterations and samples completed.
        record: of the iteration that was completed last, if it is known.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        log: Listener,
        remains: LocalRemains | None = None,
        elsewhere: Elsewhere = NOWHERE,
        chooser: Chooser | None = None,
    ):
        self._engine, self._settings, self._log = engine, settings, log
        self._elsewhere, self._chooser = elsewhere, chooser
        self.remains = LocalRemains() if remains is None else remains
        self.position, self.record = Position(), None
        self._running: tuple[Components, Snapshots] | None = None  # None without a policy, and before resume()
        self._whole = True  # False while the update changes the state

    def resume(self) -> Position:
        """Brings all workers to the newest state that there is; a collective call.

        Returns:
            Where the run resumes.

        Raises:
            CheckpointError: on all workers: nothing whole to load although there is something, another model, another
                job in the same directory, no memory for snapshots.
            NoRecoveryPoint: there is no snapshot, and the model is not as it was built any more.
            SettingsError: settings do not fit the model or the job.
        """
        if self._settings.policy is not None or self._chooser is not None:
            with contextlib.ExitStack() as undo:  # a worker may be lost meanwhile, and then all resume again
                self._resume(undo)
                undo.pop_all()
        elif self.remains.trained:
            raise NoRecoveryPoint
        else:
            self.position = self._elsewhere.load() or Position()
        self.remains.trained = True
        self.remains.progress.move_to(None)
        return self.position

    def _resume(self, undo: contextlib.ExitStack) -> None:
        engine, settings, chooser, log = self._engine, self._settings, self._chooser, self._log
        mine = self.remains if self.remains.trained else None
        claim = claimed(settings, engine.world, mine, log)
        tiers = tiers_of(settings, engine.world, claim)
        beside = take_places(settings, tiers, engine.world, mine is not None, log)
        if chooser is not None:
            settings = chooser.in_force(engine, tiers, mine)
            tiers = dataclasses.replace(tiers_of(settings, engine.world, claim), storage=tiers.storage)
        policy = make_policy(settings, engine)
        counts = policy.counts_tokens or chooser is not None and chooser.counts_tokens
        parts = build(engine, settings, policy, tiers, log, counts=counts, again=mine is not None)
        undo.callback(close, parts, _patience_s(parts))
        start = resume(engine, parts, self.remains, self._elsewhere, log, settings.begin_at, tidies=not beside)
        storage = storage_of(settings, parts, start, log, beside)
        policy.on_sizes(busiest := lambda operators: max(gather(parts.contents.busiest(operators))))
        if chooser is not None:
            chooser.on_sizes(busiest, engine, lambda: may_replay(engine, parts, settings.tier))
        elif mine is None:
            parts.report.expected(policy, settings)
        self.position, self.record = start.position, start.record
        snapshots = Snapshots(parts, settings, storage, start, self._describer(parts))
        undo.callback(snapshots.close)
        snapshots.reserve()
        snapshots.take_again()
        self._running = parts, snapshots

    def ballot(self) -> dict[str, float]:
        """How far this worker's snapshots have come; see :class:`VoteParticipant`."""
        if self._running is None:
            return {}
        parts, snapshots = self._running
        mine = snapshots.ballot()
        return mine if parts.tokens is None else parts.tokens.ballot() | mine

    def on_vote(self, tally: dict[str, float]) -> None:
        """Publishes what all have copied, and waits for copies of what the update is about to change.

        Raises:
            CheckpointError: on all workers; something could not be saved.
        """
        if self._running is not None:
            parts, snapshots = self._running
            snapshots.on_vote(tally)
            if parts.tokens is not None:
                parts.tokens.on_vote(tally)
            snapshots.wait_for_copies()
        self._whole = False

    def completed(self, record: StepRecord, begun: float) -> Position:
        """The update is done: from here on the state is that of the next position, whoever is lost.

        Args:
            record: of the iteration that is complete.
            begun: when it began, by ``time.perf_counter``.

        Returns:
            How far the run has come.
        """
        self.position, self.record, self._whole = self.position.after(record), record, True
        self.remains.records.add(record)
        if self._running is None:
            return self.position
        parts, _ = self._running
        if (seen := parts.meter.completed(begun)) is not None:
            parts.policy.interval.observe(seen)
            if self._chooser is not None:
                self._chooser.observe(seen)
            parts.report.chosen(self.position.iteration, parts.policy)
        if parts.tokens is not None:
            parts.tokens.completed(skipped=record.skipped)
            if parts.policy.counts_probabilities and not record.skipped:
                parts.policy.on_routing(parts.tokens.probabilities)
        return self.position

    def take(self) -> None:
        """Begins a snapshot of the completed iteration where the policy wants one; weights must be gathered.

        Raises:
            CheckpointError: on all workers; something could not be saved.
        """
        if self._running is not None:
            self._running[1].take(self.position, self.record)

    def finish(self) -> None:
        """Waits until every snapshot is where it is to go, and published there."""
        if self._running is not None:
            self._running[1].finish()

    def flush(self) -> None:
        """The run ends here in good order: its state goes to storage, and the node gets its memory back.

        Raises:
            CheckpointError: on all workers; something could not be saved, though it was tried again.
        """
        if self._running is not None:
            self._running[1].flush()

    def interrupt(self) -> None:
        """Another worker was lost: ends this generation here, and keeps what this worker has for the next one."""
        if self._running is not None:
            parts, snapshots = self._running
            state = self._describer(parts)(self.position, self.record) if self._whole else None
            self.remains.live = None if state is None else LiveState(self.position, state)
            self.remains.begun = snapshots.begun
        self.close()

    def close(self) -> None:
        """Gives up what is not published yet, as if this worker had been killed; asks nothing of the others.

        With a memory tier nothing is waited for that storage may hold up: the run does not resume from there.
        """
        if self._running is not None:
            parts, snapshots = self._running
            snapshots.close()
            close(parts, _patience_s(parts))
        self._running = None

    @property
    def run(self) -> str | None:
        """What the run is called whose snapshots these are."""
        return None if self._running is None else self._running[0].tiers.storage.place.run

    @property
    def gauges(self) -> Mapping[str, float]:
        """What there is to see of every iteration."""
        if self._running is None:
            return {}
        parts, snapshots = self._running
        plt = {} if parts.tokens is None else {"plt": parts.tokens.plt}
        return plt | parts.policy.gauges() | dict(parts.tap.gauges) | snapshots.gauges

    @property
    def memory_is_free(self) -> bool:
        """Whether there is memory, and nothing in it that is not in storage; the same on all workers."""
        return self._running is not None and self._running[1].memory_is_free

    @property
    def storage_fails(self) -> bool:
        """Whether the last snapshot that was to go to storage could not; the same on all workers."""
        return self._running is not None and self._running[1].storage_fails

    def _describer(self, parts: Components) -> Describer:
        """What of the state is not a tensor, at a position."""
        policy, tokens, chooser = parts.policy, parts.tokens, self._chooser
        return lambda at, record: {
            **self._engine.scalars(at),
            "record": None if record is None else dataclasses.asdict(record),
            "policy": policy.name,
            "interval": policy.interval.state_dict(),
            "policy_state": policy.state_dict(),
            "ledger": tokens.state_dict() if tokens is not None else None,
            "auto": chooser.state_dict() if chooser is not None else None,
        }


def _patience_s(parts: Components) -> float:
    """How long a write may take to end well: with a memory tier nothing waits for storage."""
    return _ENDING_S if parts.tiers.memory is None else 0.0


def make_policy(settings: Settings, engine: Engine) -> Policy:
    """The policy that settings name.

    Raises:
        SettingsError: there is none of that name, or it cannot be made for this model.
    """
    assert settings.policy is not None  # or there are no snapshots
    try:
        interval = interval_named(settings.interval, settings.overhead_budget)
        return policy_named(settings.policy)(engine.operators, interval, **settings.options)
    except ValueError as error:
        raise SettingsError(f"--ckpt-policy {settings.policy}: {error}.") from None
