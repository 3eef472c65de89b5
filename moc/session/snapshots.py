"""Takes snapshots in the background, to memory and from there to storage (MoC-System, section 5.2).

    take            if the policy plans a snapshot: wait for a free buffer, and start to copy into it
                    gradients: wait until they are copied, since the next iteration clears them
    all-reduce      copied by all: commit it in memory, where it is durable (with peers: once all nodes have copies);
                    superseded snapshots are released one all-reduce later
                    written by all: commit it in storage
    before apply    wait for copies of the state that the update changes, and for snapshots that lag too far behind
    given up        a snapshot that cannot be saved to storage: remove its files
    abandoned       a worker lacks memory for a snapshot: the previous one stays
    flush           take a snapshot of unsaved state, and write it to storage

Waits count as stalls.  The commit all-reduce of each iteration carries the progress of every worker, so no collective
is added.  Buffers rotate identically on all workers (:mod:`moc.snapshot.rotation`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from moc.errors import code_of, with_code
from moc.faults import reach
from moc.policy import Capability, SnapshotPlan, check_plan, full_plan, recovers_exactly
from moc.runtime.collectives import first_reported, gather, run_on_rank0, sum_over_workers
from moc.session.carrying import Carrying
from moc.session.components import Components
from moc.session.queues import PER_VOTE, Queues, Taken, may_begin, no_room, started, told_of, window_may_begin
from moc.session.reservation import Reservation
from moc.session.resume.point import ResumePoint
from moc.session.resume.survivors import StartedSnapshot
from moc.session.settings import Settings
from moc.session.storage_health import StorageHealth, tolerable
from moc.session.stored import Stored
from moc.session.to_storage import copy_to_storage
from moc.snapshot.aside import Aside, share_interpreter
from moc.snapshot.rotation import Rotation
from moc.state.detail import Detail
from moc.state.host_memory import spare_buffers
from moc.state.record import Position, StepRecord
from moc.store.errors import CheckpointError, TakenError

RETRIES_S = (0.5, 2.0)
"""Pauses, in seconds, before repeated writes of a snapshot that others of its window depend on."""

LAST_TRIES_S = (1.0, 2.0, 4.0)
"""Pauses, in seconds, between attempts to save the last state to storage."""

Describer = Callable[[Position, StepRecord | None], dict]
"""Returns the non-tensor state at a position, given the record of the iteration that led to it."""


class Snapshots:
    """Saving pipeline of one worker; every worker calls every method except :meth:`close`.

    Every method may raise CheckpointError on all workers: a snapshot could not be saved.
    """

    def __init__(
        self, parts: Components, settings: Settings, storage: StorageHealth, start: ResumePoint, describe: Describer
    ):
        self._world, self._policy, self._tiers = parts.world, parts.policy, parts.tiers
        self._contents, self._saver, self._publisher = parts.contents, parts.saver, parts.publisher
        self._peers, self._memory = parts.peers, parts.tiers.memory
        self._tokens, self._tap, self._meter, self._report = parts.tokens, parts.tap, parts.meter, parts.report
        self._digests = parts.digests
        self._settings, self._storage, self._start, self._describe = settings, storage, start, describe
        self._folds, self._hasher, self._aside = parts.folds, parts.hasher, Aside(len(parts.tiers.node))
        share_interpreter()
        self._carrying, self._queues = Carrying(parts.tiers, parts.policy, parts.carriers, parts.folds), Queues()
        spare = spare_buffers("peers" if parts.peers is not None else settings.tier)
        keeps, stores = self._memory is not None, parts.tiers.persist_interval is not None
        self._rotation = Rotation.of(spare, keep=keeps, recovered=start.in_memory, stores=stores)
        self._reservation = Reservation(parts, settings)
        # otherwise the next snapshot replaces one whose write has failed
        self._pauses_s = RETRIES_S if Capability.WINDOWS in parts.policy.requires and not settings.stops else ()
        self._stored = Stored(parts.policy, storage, start, beside=self._memory is not None)
        self.begun = dict(start.begun)
        """Recent snapshots by iteration, kept in case the committing worker or a writer dies."""
        self._failure: str | None = None
        self._dependent: set[int] = set()  # iterations of snapshots that need an abandoned one
        self._in_memory: Taken | None = None  # the newest snapshot that is durable in memory
        self._superseded: int | None = None  # memory supersedes snapshots before this iteration
        self._position, self._record = start.position, start.record  # of the last completed iteration

    def reserve(self, first: bool) -> None:
        """Allocates memory, and raises errors, as :meth:`Reservation.make` does."""
        self._saver.adopt(slot.iteration for slot in self._rotation.slots if slot.iteration is not None)
        state = len(json.dumps(self._describe(self._position, self._record)))
        self._reservation.make(self._rotation, self._position.iteration, state, first)

    def take_again(self) -> None:
        """Takes the snapshot of the resumed position if it is lost, or was due and had not begun."""
        plan, start = self._start.again, self._start
        if plan is not None:  # the policy counts it as taken
            storage = self._stored.part_of(plan, self._window_may_begin)
            self._stored.begins(plan, storage)
            if storage is not None:
                self._policy.storage.on_write_begun(storage)
            self._copy(plan, storage)
            if self._settings.blocking:
                self._wait_until_safe()
        elif start.record is not None and start.position.iteration > (start.newest or 0):
            self.take(start.position, start.record)

    def take(self, position: Position, record: StepRecord | None) -> None:
        """Starts a snapshot of the completed iteration if the policy plans one; weights must be gathered."""
        self._position, self._record = position, record
        self._stored.ask_for_base(position.iteration)
        load = self._tokens and self._tokens.load
        plan, storage = self._stored.plan(position.iteration, load, self._window_may_begin)
        if plan is not None and self._reservation.limits(plan, load, self._rotation):
            plan, storage = self._stored.plan(position.iteration, load, self._window_may_begin)
        if plan is not None:
            self._check(plan)
            with self._meter.stalling():
                self._begin(plan, storage)
                self._wait_for_gradients()
                if self._settings.blocking:
                    self._wait_until_safe()
        else:
            self._stored.passes(position.iteration, load)
        under_way = next((taken.plan.iteration for taken in self._queues.to_storage), None)
        self._storage.passes(position.iteration, under_way)
        self._storage.lags(self._stored.lag(position.iteration))
        # a hanging write does not disturb training, and must not prevent measurement of the interval
        busy = self._queues.not_safe(safe_in_memory=True) or (self._queues.to_storage and not self._storage.late)
        self._meter.ended(started=plan is not None, busy=bool(busy))

    def ballot(self) -> dict[str, Any]:
        """Returns this worker's progress; see :class:`VoteParticipant`."""
        queues = self._queues.ballot()  # before the failures, so that no failed future counts as done
        failed = {"snapshot_failed": float(self._find_failure() is not None)}
        folded = {} if self._folds is None else self._folds.ballot()
        others = self._tap.ballot() | self._storage.ballot() | self._meter.ballot() | self._digests.ballot()
        return others | queues | failed | folded

    def on_vote(self, tally: dict[str, float]) -> None:
        """Acts on the progress of all workers."""
        self._meter.on_vote()
        # a commit in memory counts as a stall; otherwise nothing may count, since --snapshot-interval auto
        # measures undisturbed iterations
        with self._meter.stalling() if self._all_have("copied", told_of(tally, 0)) else contextlib.nullcontext():
            self._hear(tally)
        seconds = self._meter.trained(tally)
        if seconds is not None:
            self._report.trained(seconds, tally["snapshot_bubble_s"] / self._world.size)

    def wait_for_copies(self) -> None:
        """Waits for copies of the state that the update changes, and for snapshots that lag too far behind."""
        if self._behind:
            with self._meter.stalling():
                while self._behind:
                    self._wait_and_vote(for_storage=self._memory is None)
        if self._queues.copying:
            with self._meter.stalling():
                for taken in self._queues.copying:
                    taken.snapshot.capture.wait()

    def finish(self) -> None:
        """Waits until every snapshot is committed in each of its tiers."""
        begun = time.monotonic()
        while self._queues or self._storage.closed:
            self._storage.wait()
            self._wait_and_vote(for_storage=True)
            self._storage.is_waited_for(time.monotonic() - begun)
        self._wait_and_vote()

    def flush(self) -> None:
        """Ends the run in good order: saves its state to storage, with retries, and releases the node's memory."""
        self._bring_everything()
        for pause in LAST_TRIES_S:
            if self._stored.has(self._position.iteration):
                break
            time.sleep(pause)
            self._bring_everything()
        if not self._stored.has(self._position.iteration):
            raise CheckpointError(self._not_stored(), code="storage-unwritable")
        if self._folds is not None:
            self._folds.close()
        if self._peers is not None:
            self._peers.quiesce()
        if self._memory is not None and self.memory_is_free and self._tiers.leads_node:
            self._memory.remove_all()
        self._tap.delete()
        self._report.end(self._tokens)

    @property
    def gauges(self) -> dict[str, float]:
        """Gauges of storage, and of copies in bubbles."""
        found = self._storage.gauges | self._report.gauges
        if "storage_age" in found and self._tokens is not None and not recovers_exactly(self._policy):
            found["mlt_storage"] = self._tokens.storage_lacks(self._stored.persisted.iteration)
        return found

    @property
    def memory_is_free(self) -> bool:
        """Whether a memory tier exists and holds nothing that storage lacks; identical on all workers."""
        return self._memory is not None and self._stored.begun == self._stored.newest

    @property
    def storage_fails(self) -> bool:
        """Whether the last snapshot meant for storage failed to get there; identical on all workers."""
        return bool(self._stored.problem)

    def close(self) -> None:
        """Stops carrying experts."""
        self._carrying.close()

    def _check(self, plan: SnapshotPlan) -> None:
        try:
            check_plan(self._policy, plan)
        except ValueError as error:
            raise CheckpointError(str(error), code=code_of(error)) from None

    @property
    def _behind(self) -> bool:
        """Whether the current iteration may not complete until a snapshot is durable."""
        most = self._settings.most_behind
        not_safe = self._queues.not_safe(safe_in_memory=self._memory is not None)
        return most is not None and any(self._position.iteration - one.plan.iteration >= most for one in not_safe)

    def _begin(self, plan: SnapshotPlan, storage: SnapshotPlan | None) -> None:
        """Starts a snapshot after waiting for a buffer and, without a memory tier, for storage."""
        self._stored.begins(plan, storage)
        self._tell_policy(plan, storage)  # now, so that it is taken again if a worker is lost before it starts
        while not self._has_room:
            self._wait_and_vote(for_storage=self._memory is None)
        self._reservation.look_ahead(plan.iteration)
        most = self._reservation.buffers(self._rotation)
        self._rotation = self._rotation.trimmed(most)
        self._saver.trim(max(len(self._rotation.slots), most))
        self._copy(plan, storage)

    @property
    def _has_room(self) -> bool:
        """Whether a snapshot may begin now; with a memory tier, storage does not matter."""
        lags = self._memory is None and not may_begin(len(self._queues.outstanding), self._rotation.spare)
        return self._rotation.free() is not None and not lags

    def _copy(self, plan: SnapshotPlan, storage: SnapshotPlan | None, in_memory: bool = True) -> None:
        free, others = self._rotation.free(), self._rotation.all_free()
        slot = -1 if free is None else free  # -1: a buffer outside the rotation, only for storage
        if in_memory:
            self._rotation = self._rotation.begin(plan.iteration, storage is not None, plan.supersedes)
        try:
            share = self._contents.with_gradients(plan.operators, plan.compared)
            entries = self._contents.entries(plan.operators, share)
            carried = self._carrying.begin(plan) if in_memory else None
            self._aside.move(self._carrying.processes + self._hasher.processes)
            state = self._describe(self._position, self._record)  # before a thread copies: both need the GIL
            nbytes = None if plan.complete else self._reservation.window.snapshot
            digests = self._digests.of_snapshot(plan.iteration)
            snapshot = self._saver.take(
                slot, plan.iteration, share, entries, others, in_memory, carried, nbytes, digests
            )
        except CheckpointError as error:
            self._failure = with_code(error)  # the next all-reduce reports it to the others
            return
        taken = Taken(plan, storage, state, snapshot)
        self._queues.copying.append(taken)
        self._remember(taken)
        if storage is not None:  # written once finalized; needs no all-reduce
            self._persist(taken)

    def _remember(self, taken: Taken) -> None:
        self.begun[taken.plan.iteration] = StartedSnapshot(dict(taken.plan.operators), taken.state_in_memory)
        # two windows, and those still being copied
        most = 2 * self._policy.schedule.window_length + self._rotation.spare
        for older in sorted(self.begun)[:-most]:
            del self.begun[older]

    @property
    def _window_may_begin(self) -> bool:
        """Whether storage may receive another snapshot or window, if there is a memory tier.

        Storage receives one at a time, which keeps its buffers until it is written.
        """
        writing, outstanding = len(self._queues.writing), len(self._queues.outstanding)
        return window_may_begin(writing > 0, outstanding - writing)

    def _tell_policy(self, plan: SnapshotPlan, storage: SnapshotPlan | None) -> None:
        self._policy.on_snapshot(plan, self._tokens and self._tokens.load)
        if storage is not None:
            self._policy.storage.on_write_begun(storage)
        if self._tokens is not None:
            self._tokens.begun(plan, storage)
            self._report.at_risk(plan.iteration, self._policy, self._tokens, self._settings.train_iters)

    def _persist(self, taken: Taken) -> None:
        assert taken.storage is not None  # the caller writes to storage
        whole = taken.storage.operators == taken.plan.operators and not taken.plan.compared
        self._saver.persist(taken.snapshot, None if whole else taken.storage.operators, self._pauses_s)
        self._queues.writing.append(taken)

    def _wait_for_gradients(self) -> None:
        """Waits for the copies of gradients, which the next iteration clears."""
        for taken in self._queues.copying:
            if taken.snapshot.gradients is not None:
                taken.snapshot.gradients.wait()
                reach("gradient_staged")

    def _wait_until_safe(self) -> None:
        in_memory = self._memory is not None
        while self._queues.not_safe(safe_in_memory=in_memory):
            self._wait_and_vote(for_storage=not in_memory)
        self._wait_and_vote()

    def _wait_and_vote(self, for_storage: bool = False) -> None:
        self._queues.wait(for_storage)
        self._hear(sum_over_workers(self.ballot(), self._world))

    def _hear(self, tally: dict[str, float]) -> None:
        """Acts on the totals of an all-reduce, of an iteration or extra."""
        self._rotation = self._rotation.voted()
        self._report.stalled(self._stored.begun, self._meter.hear(tally))
        if tally["snapshot_failed"]:
            raise CheckpointError(first_reported(self._find_failure()))
        self._tap.on_vote(tally)
        self._storage.on_vote(tally)
        self._digests.on_vote(tally)
        if self._folds is not None and (folded := self._folds.on_vote(tally)):
            self._report.folded(self._position.iteration, folded)
        self._give_up_older()
        for told in (told_of(tally, place) for place in range(PER_VOTE)):
            if self._all_have("copied", told):
                self._all_copied(self._queues.copying.popleft(), told)
            if self._all_have("replicated", told):
                self._all_replicated(self._queues.replicating.popleft(), told)
            if self._all_have("written", told):
                self._all_written(self._queues.writing.popleft(), told)
            if self._all_have("published", told):
                self._all_published(self._queues.publishing.popleft(), told)
            if self._all_have("removed", told):
                self._queues.removing.popleft()

    def _give_up_older(self) -> None:
        """Releases superseded snapshots; an all-reduce has passed since the newest commit, so all nodes have it."""
        if self._superseded is not None and self._tiers.leads_node:
            with self._remembering_failure():
                self._carrying.give_up_before(self._superseded)
                if self._peers is not None:
                    self._peers.give_up_older(self._superseded)
            with contextlib.suppress(OSError):  # another process has the memory: a later call tries again
                self._reservation.fill_spare()
        self._superseded = None

    def _all_have(self, done: str, told: dict[str, float]) -> bool:
        return told[f"snapshot_{done}"] == self._world.size

    def _all_copied(self, taken: Taken, told: dict[str, float]) -> None:
        iteration = taken.plan.iteration
        if told["snapshot_no_room"] or iteration in self._dependent:
            self._abandon(taken)
            return
        self._meter.copied(told)
        self._report.snapshot(iteration, told, self._world.size)
        if not taken.snapshot.in_memory:
            return  # it is durable once written
        if self._memory is not None and self._tiers.leads_node:
            # now: until the next all-reduce, no worker may overwrite the previous snapshot
            with self._remembering_failure():
                self._publisher.in_memory(taken.plan, taken.state_in_memory, taken.snapshot.sealed.result())
            self._carrying.published(iteration)
        reach("snapshot_published")
        if self._peers is None:
            self._is_safe(taken)
        else:
            copies = self._peers.replicate(iteration, taken.plan.remote)
            self._queues.replicating.append(dataclasses.replace(taken, copied=copies))
            reach("replicating")

    def _abandon(self, taken: Taken) -> None:
        """Abandons a snapshot because a worker lacks memory; earlier durable snapshots stay.

        If a state is spread over several snapshots, the others of its window are abandoned, too.  So are those begun
        since then, which may need it.
        """
        iteration, before = taken.plan.iteration, self._rotation
        if error := first_reported(str(no_room(taken) or "") or None):
            self._report.abandoned(iteration, error)
        self._stored.abandoned(taken.plan)
        if iteration in self._dependent:
            self._dependent.remove(iteration)
        else:
            self._policy.schedule.restart_window()
            if Capability.WINDOWS in self._policy.requires:
                ended, waiting = before.newest_end(iteration), (*self._queues.replicating, *self._queues.copying)
                self._dependent = {one.plan.iteration for one in waiting if one.plan.iteration > ended}
        self.begun.pop(iteration, None)
        if not taken.snapshot.in_memory:
            return
        self._rotation = before.abandon(iteration)
        if self._memory is not None and self._tiers.leads_node:
            with self._remembering_failure():
                for one in before.held() - self._rotation.held():
                    self._memory.remove(one)
                    if self._peers is not None:
                        self._peers.remove(one)
                self._carrying.abandoned(iteration)

    def _all_replicated(self, taken: Taken, told: dict[str, float]) -> None:
        nodes = len(set(self._tiers.nodes))
        amount, seconds = int(told["snapshot_replicated_bytes"]), told["snapshot_replicate_s"] / nodes
        alike = int(told["snapshot_alike_bytes"])
        self._report.replicated(taken.plan.iteration, amount, alike, seconds)
        self._meter.replicated(amount + alike, seconds, nodes)  # budgets count all copied bytes, sent or not
        if told["snapshot_copies_missing"]:
            missing = [reason for reasons in gather(list(started(taken.copied).result().missing)) for reason in reasons]
            self._report.copies_missing(taken.plan.iteration, missing)
        if told["snapshot_not_alike"]:
            mine = started(taken.copied).result().trouble
            self._report.not_alike(taken.plan.iteration, [one for told in gather(mine) for one in told])
        if taken.plan.iteration in self._dependent:
            self._abandon(taken)
        else:
            self._is_safe(taken)

    def _is_safe(self, taken: Taken) -> None:
        """Records that the snapshot is durable on all workers, so that older ones are no longer needed."""
        self._rotation = self._rotation.complete(taken.plan.iteration)
        if self._tokens is not None:
            self._tokens.snapshotted(taken.plan.iteration)
        if self._memory is not None:
            if taken.plan.supersedes is not None:
                self._superseded = taken.plan.supersedes
            self._in_memory = taken
            self._tap.on_stored(taken.plan)

    def _all_written(self, taken: Taken, told: dict[str, float]) -> None:
        """Records that every rank has written its part; if one failed, all give up the snapshot."""
        self._rotation = self._rotation.persisted(taken.plan.iteration)
        if told["snapshot_unwritten"]:
            self._give_up(taken, started(taken.snapshot.persisted))
            return
        self._meter.written(told)
        if told["snapshot_retries"]:
            self._report.retried(taken.plan.iteration, int(told["snapshot_retries"]))
        amount, seconds = int(told["snapshot_written_bytes"]), told["snapshot_write_s"] / self._world.size
        storage = taken.storage
        assert storage is not None  # it was written
        pauses_s = self._pauses_s
        published = self._on_rank0(lambda: self._publisher.in_storage(storage, taken.state, amount, seconds, pauses_s))
        self._queues.publishing.append(dataclasses.replace(taken, published=published))

    def _all_published(self, taken: Taken, told: dict[str, float]) -> None:
        if told["snapshot_unpublished"]:
            self._give_up(taken, started(taken.published))
            return
        self._stored.published(taken)
        if self._memory is None and not self._stored.is_broken(taken.plan):
            self._tap.on_stored(taken.plan)
        if self._tokens is not None:
            self._tokens.persisted(taken.plan.iteration)

    def _give_up(self, taken: Taken, done: Future) -> None:
        """Gives up a snapshot that could not be saved to storage; all workers do so after the same all-reduce."""
        error = tolerable(done)
        self._stored.problem = first_reported(None if error is None else with_code(error)) or ""
        if self._settings.stops:
            raise CheckpointError(self._stored.problem)
        self._stored.failed(taken)
        removed = self._on_rank0(lambda: self._publisher.gives_up(taken.plan.iteration))
        self._queues.removing.append(dataclasses.replace(taken, published=removed))

    def _on_rank0(self, start: Callable[[], Future]) -> Future:
        """Starts an operation on rank 0; other ranks return a finished future."""
        if self._world.rank == 0:
            return start()
        done: Future = Future()
        done.set_result(None)
        return done

    def _bring_everything(self) -> None:
        stored, iteration = self._stored, self._position.iteration
        self.finish()
        if iteration != 0 and (iteration != stored.begun or not stored.complete):
            self._begin_everything()
            self.finish()
        safe = self._in_memory
        if safe is not None and safe.plan.iteration != stored.newest and self._rotation.holds(safe.plan.iteration):
            self._bring_to_storage(safe)
            self.finish()
        elif self._in_memory is None and stored.begun != stored.newest and self._memory is not None:
            # nothing was computed since the recovery
            way = [iteration for iteration in self._start.in_memory if iteration <= (stored.begun or 0)]
            with self._trying():
                copy_to_storage(way, self._tiers, self._policy)
                stored.newest = stored.begun

    def _begin_everything(self) -> None:
        """Takes a full snapshot at the end of a run; no other is pending or follows."""
        iteration = self._position.iteration
        everything = full_plan(self._policy, iteration)
        with self._trying():
            run_on_rank0(lambda: self._tiers.storage.remove(iteration), "cannot replace a partial snapshot")
        if not self._rotation.holds(iteration):
            self._begin(everything, everything)
            return
        # memory needs the partial snapshot of this iteration, so the full one goes only to storage
        self._stored.begins(everything, everything)
        self._tell_policy(everything, everything)
        self._copy(everything, everything, in_memory=False)

    def _bring_to_storage(self, taken: Taken) -> None:
        """Writes a snapshot of this iteration from memory to storage, without gradients, which need other snapshots."""
        plan = taken.plan.without(Detail.GRAD)
        self._rotation = self._rotation.persist(plan.iteration)
        self._policy.storage.on_write_begun(plan)
        if self._tokens is not None:
            self._tokens.brought_to_storage(plan)
        self._persist(dataclasses.replace(taken, storage=plan))

    def _not_stored(self) -> str:
        stored, iteration = self._stored, self._position.iteration
        newest = "none is there" if stored.newest is None else f"the newest one there is of iteration {stored.newest}"
        kept = "" if self._in_memory is None else f", and of iteration {self._in_memory.plan.iteration} in memory"
        return f"the last state, of iteration {iteration}, is not saved ({newest}{kept}): {stored.problem}"

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        """Context for a storage operation that fails on all workers or on none, and may be retried."""
        try:
            yield
        except CheckpointError as error:
            if self._settings.stops or isinstance(error, TakenError):
                raise
            self._stored.problem = with_code(error)

    @contextlib.contextmanager
    def _remembering_failure(self):
        try:
            yield
        except (CheckpointError, OSError) as error:
            self._failure = with_code(error)  # the next all-reduce reports it to the others

    def _find_failure(self) -> str | None:
        self._failure = self._failure or self._storage.problem() or self._queues.failure()
        return self._failure
