"""Brings all workers to the newest recoverable state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

from moc.background import within
from moc.errors import warning
from moc.policy import recovers_exactly
from moc.recovery.expert_versions import ExpertVersions
from moc.recovery.inventory import is_planned_by, newest_full, retained_checkpoints, retained_experts, storage_suffices
from moc.recovery.plan import still_needed
from moc.recovery.sources import MEMORY, STORAGE
from moc.runtime.collectives import gather, run_on_all, run_on_rank0
from moc.session.components import Components
from moc.session.elsewhere import Elsewhere
from moc.session.engine import Engine, Listener
from moc.session.resume.loading import ResumeResult, SnapshotLoader
from moc.session.resume.point import NoRecoveryPoint, ResumePoint
from moc.session.resume.survivors import LocalRemains, Survivors, commit_saved_snapshots, survivors
from moc.session.tiers import LOOKING_S, Tiers
from moc.state.record import Position
from moc.store.errors import CheckpointError

BEGUN_AT = "begun_at"
"""Key in the state of a snapshot: iteration of ``--ckpt-step`` of the launch that took it."""


def resume(
    engine: Engine,
    parts: Components,
    remains: LocalRemains,
    elsewhere: Elsewhere,
    log: Listener,
    only: int | None,
    *,
    tidies: bool,
    deterministic: bool,
) -> ResumePoint:
    """Fills the state, and removes the snapshots that the run will take again; a collective call.

    Args:
        engine: engine whose state is filled.
        parts: components of this generation.
        remains: state that this worker kept from the previous generation.
        elsewhere: other checkpoints to start from if there is no snapshot.
        log: receives messages and events.
        only: iteration of the snapshot to start from; None for the newest.
        tidies: clean up storage now, instead of in the background.
        deterministic: a replay must have the digests of the original iterations.

    Raises:
        CheckpointError: on all workers: no complete snapshot was found, or the model differs.
        NoRecoveryPoint: there is no snapshot, and the model has been trained since it was built.
    """
    _discard_changed(engine, remains, log)
    mine, left = remains if remains.trained else None, survivors(remains, engine)
    if left.has_trained:
        only = None
    if only is not None:
        look = functools.partial(has_gone_back, parts.tiers, only)
        if run_on_rank0(look, "cannot look for snapshots"):
            log.message(f"an earlier launch went back to iteration {only}: the run continues from its newest snapshot")
            only = None
    loader = SnapshotLoader(engine, parts, remains, log, only, deterministic)
    publish = functools.partial(commit_saved_snapshots, left, parts.tiers, parts.committer.commit_reported, parts.world)
    if parts.tiers.memory is not None:  # in storage, the loader does it
        publish()
    if parts.peers is not None:
        parts.peers.restore(log)
    loader.adopted.adopt()
    _reduce_superseded(parts)
    held = loader.find(left)
    run = parts.tiers.storage.storage.run
    # storage that nothing was read from is not waited for
    dense = functools.cache(lambda: elsewhere.newest(None if loader.has_listed_storage else LOOKING_S, run))
    loaded = loader.load(held, newest_dense=dense, left=left, mine=mine)
    if left.has_trained and not loaded:  # workers that start over do not use old snapshots
        _tidy_up(parts, ResumePoint(Position(dense() or 0)))
    if mine is not None and not loaded:
        raise NoRecoveryPoint
    if loaded and loaded.plan.stages:  # replaying stages have saved lost snapshots again
        if parts.tiers.memory is not None:
            publish()
        loaded = dataclasses.replace(loaded, held=loader.find_again(left))
    if loaded and loader.adopted.foreign_iterations:  # later recoveries must not use other members' snapshots
        loaded = dataclasses.replace(loaded, held=[one for one in loaded.held if one.tier == STORAGE])
    start = _point(loaded, parts, left) if loaded else ResumePoint(elsewhere.load() or Position())
    if not left.has_trained:
        elsewhere.check(start.position.iteration, run)
    if parts.tokens is not None and not loaded:
        parts.tokens.start_at(start.position.iteration)
    if parts.peers is not None:
        older = parts.peers.continue_from(start.in_memory, log, start.experts, loaded.plan.path if loaded else None)
        start = dataclasses.replace(start, experts=older)
    leads, node = parts.tiers.leads_node, parts.tiers.node
    run_on_all(lambda: parts.saver.remove_leftovers(leads, node), "cannot tidy up old buffers")
    _tidy_up(parts, start, storage=tidies and loader.has_listed_storage)
    return dataclasses.replace(start, has_listed_storage=loader.has_listed_storage)


def _discard_changed(engine: Engine, remains: LocalRemains, log: Listener) -> None:
    """Discards the kept state of workers whose schedule, loss scale or counters have changed; a collective call."""
    live, changed = remains.live if remains.trained else None, []
    if live is not None:
        changed = remains.digests.changed_scalars(live.position.iteration, live.state, engine.state.steps())
    of_ranks = {rank: names for rank, names in enumerate(gather(changed)) if names}
    if not of_ranks:
        return
    if changed:
        remains.live = None
    names, workers = ", ".join(sorted(set().union(*of_ranks.values()))), ", ".join(map(str, of_ranks))
    log.message(
        warning(
            f"{names} of workers {workers} changed after the last iteration, so that they do not use the state that "
            "they have kept. Fix: test the memory of their nodes",
            code="state-digest-differs",
        )
    )


def has_gone_back(tiers: Tiers, iteration: int) -> bool:
    """Returns whether a launch that began at the snapshot of an iteration has taken the newest one.

    Then a restart of its command continues from the newest.  A storage that does not answer counts as empty.
    """

    def look() -> bool:
        stores = [store for store in (tiers.memory, tiers.storage) if store is not None]
        there = [(iterations[-1], store) for store in stores if (iterations := store.iterations())]
        newest, store = max(there, key=lambda one: one[0], default=(0, None))
        return store is not None and newest > iteration and store.read_manifest(newest).state.get(BEGUN_AT) == iteration

    with contextlib.suppress(CheckpointError, OSError):
        return bool(within(LOOKING_S, look))
    return False


def _reduce_superseded(parts: Components) -> None:
    """Reduces superseded snapshots, whose buffers are in use again, to the experts carried from them.

    Workers of a node reuse the buffers after an all-reduce.  If the leading worker was lost at that moment, it has not
    reduced the snapshots.  A node without a snapshot was lost with its memory.
    """
    tiers = parts.tiers
    if tiers.memory is None or recovers_exactly(parts.policy):
        return
    carrier = ExpertVersions(tiers.memory, ())
    told = gather(carrier.unreduced() if tiers.leads_node else None)
    there = [whole for whole in told if whole]
    newest = max(set.intersection(*there), default=0) if there else 0
    run_on_all(lambda: carrier.reduce(newest) if tiers.leads_node else None, "cannot give up old snapshots")


def _point(loaded: ResumeResult, parts: Components, left: Survivors) -> ResumePoint:
    """Returns the point where the run resumes; informs the policy whether its window continues."""
    policy, tier, at = parts.policy, MEMORY if parts.tiers.memory is not None else STORAGE, loaded.position.iteration
    stored = tuple(one for one in loaded.held if one.tier == STORAGE and one.iteration <= at)
    window = policy.schedule.current_window(at)
    there = retained_checkpoints(loaded.held, policy.operators, recovers_exactly(policy), tier, at, window)
    if not there.continues_window:
        policy.schedule.restart_window()
    begun = {iteration: one for iteration, one in left.begun.items() if iteration in there.in_memory}
    if recovers_exactly(policy):
        stays = retained_experts((), there.in_memory, at)
    else:
        way = loaded.plan.path
        assert way is not None  # only exact policies resume without a recovery path
        stays = retained_experts(still_needed(way, loaded.held, policy.operators), there.in_memory, at)
        in_order = not stays.newer and not stays.before and (tier == STORAGE or at in there.in_memory)
        policy.recovery.on_resume(in_order and is_planned_by(policy, way), storage_suffices(loaded.held, policy))
        policy.storage.on_inventory(newest_full(stored))
    kept = (there.newest, there.in_memory, *stays)
    return ResumePoint(
        loaded.position, loaded.record, *kept, repeated_plan=there.repeated_plan, stored=stored, started_snapshots=begun
    )


def _tidy_up(parts: Components, start: ResumePoint, storage: bool = True) -> None:
    run_on_all(lambda: tidy_memory(parts.tiers, start), "cannot tidy up old snapshots")
    if storage:
        tidy = lambda: parts.committer.in_background(lambda: tidy_storage(parts.tiers, start)).result()  # noqa: E731
        run_on_rank0(tidy, "cannot tidy up old snapshots")


def tidy_storage(tiers: Tiers, start: ResumePoint) -> None:
    """Sets aside newer snapshots, and removes uncommitted files of killed jobs; on rank 0."""
    for newer in tiers.storage.iterations():
        if newer > start.position.iteration:
            tiers.storage.hide(newer)
    tiers.storage.remove_unpublished()


def tidy_memory(tiers: Tiers, start: ResumePoint) -> None:
    """Moves newer snapshots aside in this node's memory, and removes useless ones; on the node's leading worker."""
    if tiers.memory is not None and tiers.leads_node:
        before = tiers.before
        assert before is not None  # set with a memory tier
        for other in before.iterations():
            if other not in start.before:
                before.remove(other)
        for other in tiers.memory.iterations():
            if other in start.newer:
                before.remove(other)
                tiers.memory.move(other, before)
            elif other not in (*start.in_memory, *start.experts):
                tiers.memory.remove(other)
        ExpertVersions(tiers.memory, ()).delete()
        tiers.memory.remove_unpublished()
