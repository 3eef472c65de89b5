"""Loads the state of a resumed run, in any layout: from surviving workers, or from snapshots in memory or storage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from moc.errors import cause_of, warning, with_code
from moc.files import decode
from moc.policy import Capability, recovers_exactly
from moc.recovery.inventory import in_memory, list_checkpoints
from moc.recovery.plan import JobInventory, RecoveryPlan, exact_resume_error, explain_no_plan, live_states, plans
from moc.recovery.sources import BEFORE, LIVE, MEMORY, STORAGE, AvailableCheckpoint, RecoveryPath, recovery_paths
from moc.runtime.collectives import gather, synchronize_all
from moc.session.components import Components
from moc.session.digests import Verification, name_operators
from moc.session.engine import Engine, Listener
from moc.session.resume.reading import AdoptedParts, Damage, Key, SnapshotReader, StorageListing, check_state
from moc.session.resume.rebuilding import Rebuilder, Repair, position_of, steps_of
from moc.session.resume.replay import Replayer, ReplayState
from moc.session.resume.survivors import LiveState, LocalRemains, Survivors, exchange
from moc.session.tokens import TokenTracker
from moc.state.operators import Detail
from moc.state.record import Position, StepRecord
from moc.store.errors import CheckpointError
from moc.store.manifest import Manifest, StateDigests
from moc.store.store import checkpoint_name


@dataclass(frozen=True)
class ResumeResult:
    """State that a run resumes from.

    Attributes:
        plan: recovery plan of all workers.
        position: iterations and samples completed.
        record: step record of the last iteration, if known.
        held: checkpoints that are still usable.
    """

    plan: RecoveryPlan
    position: Position
    record: StepRecord | None
    held: Sequence[AvailableCheckpoint]


class SnapshotLoader:
    """Loader of this worker's model and optimizer; all workers call each method, and an error is raised on all.

    Args:
        only: iteration of the snapshot to start from; None for the newest.
        deterministic: a replay must have the digests of the original iterations.
    """

    def __init__(
        self,
        engine: Engine,
        parts: Components,
        remains: LocalRemains,
        log: Listener,
        only: int | None,
        deterministic: bool,
    ):
        self._engine, self._world, self._state, self._log = engine, engine.world, engine.state, log
        self._only, self._remains = only, remains
        self._policy, self._tokens, self._tiers = parts.policy, parts.tokens, parts.tiers
        self._digests, self._deterministic = parts.digests, deterministic
        self._storage, self._memory = parts.tiers.storage, parts.tiers.memory
        self._leads_node, self._stage = parts.tiers.leads_node, engine.world.pipeline_rank
        self._repair = Repair(engine.world, parts.contents, parts.tiers, parts.saver)
        self._replayer = Replayer(engine, remains.progress)
        self.adopted = AdoptedParts(engine, parts.tiers, parts.policy, parts.peers, log)
        self._reader = SnapshotReader(engine, parts.tiers, recovers_exactly(parts.policy), self.adopted)
        self._rebuilder = Rebuilder(
            engine, self._reader, self._replayer, remains.records, self._repair, parts.digests, log
        )
        self._damage: str | None = None
        self._noted: set[str] = set()
        self._listing = StorageListing(parts.tiers, parts.committer.commit_reported, engine.world, self._check, log)

    @property
    def has_listed_storage(self) -> bool:
        """Whether storage has been taken and listed; otherwise nothing has waited for it."""
        return self._listing.is_done

    def find(self, left: Survivors) -> list[AvailableCheckpoint]:
        """Finds the available checkpoints; reports invalid ones.

        Storage is listed when the job starts.  Survivors know the checkpoints that the run has listed and committed, so
        :meth:`load` lists storage again only if a plan reads it.  Without a memory tier, a job of constant members
        always lists it: lost workers may have saved a snapshot that is not committed.
        """
        kept = self._in_memory()
        knows = left.has_trained and (self._memory is not None or self._world.job.may_change_members)
        return (list(left.stored) if knows else self._in_storage(left)) + kept

    def find_again(self, left: Survivors) -> list[AvailableCheckpoint]:
        """Finds the available checkpoints after the repair of snapshots that lost workers had not saved."""
        lists = self._memory is None or self.has_listed_storage
        return (self._in_storage(left) if lists else list(left.stored)) + self._in_memory()

    def _in_memory(self) -> list[AvailableCheckpoint]:
        there, check = [], self._check
        for tier, store in ((MEMORY, self._memory), (BEFORE, self._tiers.before)):
            here, problems = list_checkpoints(store, check) if store is not None and self._leads_node else ([], [])
            if tier == MEMORY and self._leads_node:
                more = self.adopted.list_parts(check)
                here, problems = here + more[0], problems + more[1]
            told = gather((here, problems))
            self._note_all(problem for _, of_node in told for problem in of_node)
            there += in_memory([of_node for of_node, _ in told], self._policy.operators, tier)
        return there

    def _check(self, manifest: Manifest, where: str) -> None:
        check_state(manifest, where, self._engine, self._policy)

    def _in_storage(self, left: Survivors) -> list[AvailableCheckpoint]:
        found, problems = self._listing.find(left)
        self._note_all(problems)
        return found

    def load(
        self,
        held: list[AvailableCheckpoint],
        newest_dense: Callable[[], int | None],
        left: Survivors,
        mine: LocalRemains | None,
    ) -> ResumeResult | None:
        """Fills model, optimizer and schedule by the newest plan that succeeds; returns None if there is no plan.

        Args:
            held: available checkpoints.
            newest_dense: returns the iteration of a dense checkpoint, which is preferred to older snapshots; None if
                there is none.  Not called if workers still have the state of the plan's iteration.
            left: state that workers still have.
            mine: state that this worker has, and loses if it loads.

        Raises:
            CheckpointError: there are checkpoints, but none is complete, nor is there a dense one; they belong to
                another model; or iterations must be replayed, and operators cannot be frozen.
        """
        found = bool(held)
        if left.has_trained:
            self._rebuilder.report_replay(interrupted=True)
        while True:
            plan = next(self._plans(held, left), None)
            if not self.has_listed_storage and (plan is None or plan.reads_storage):
                held = self._in_storage(left) + [one for one in held if one.tier != STORAGE]
                found = found or bool(held)
                continue
            if plan is None or (plan.iteration not in left.live.values() and plan.iteration < (newest_dense() or 0)):
                break
            self._check_change(held, plan.iteration)
            if plan.stages and (damaged := self._damaged_logs(plan)):
                left = left.without_logs(damaged)
                continue
            self._leave(plan, mine)
            with self._repair.enabled_for(self._torn(plan, held, left)):
                saved, bad, changed = self._follow(plan, left)
            if saved is not None:
                synchronize_all(self._world)
                if mine is not None:  # in case of another loss before training resumes
                    mine.live, mine.lacking = LiveState(position_of(saved), saved), frozenset()
                    mine.digests.scalars = None  # those of the session that was interrupted
                return ResumeResult(plan, position_of(saved), _record(saved), held)
            self._rebuilder.report_replay(interrupted=True)
            for damage in bad.values():
                self._note(damage.text)
            held = list(filter(None, (one.without(bad[one.key].operators) if one.key in bad else one for one in held)))
            left = left.only(plan.keep - changed)
        if newest_dense() is None and (found or self._damage):
            self._check_change(held)
            if not self._nothing_stored_yet(held, left):
                self._refuse(held)
            place = self._storage.storage.name
            self._log.message(
                warning(
                    f"the run begins again: lost nodes had parts of all snapshots in memory, and {place} has "
                    "no complete one yet. Fix: save to storage earlier (--persist-interval), or keep copies on other "
                    "nodes (--ckpt-tier peers)",
                    code="nothing-stored-yet",
                )
            )
        if self._damage:
            self._forget_moments()
        return None

    def _leave(self, plan: RecoveryPlan, mine: LocalRemains | None) -> None:
        """Gives up this worker's state before it is overwritten, unless the plan keeps or continues it."""
        course, progress = plan.stage_plan(self._stage), self._replayer.progress
        if course is None or not course.is_resumed:
            progress.move_to(None)
        elif mine is not None and mine.live is not None:
            progress.move_to(ReplayState(mine.live.position))
        if mine is not None and self._world.rank not in plan.keep:
            mine.live = None

    def _check_change(self, held: list[AvailableCheckpoint], iteration: int = -1) -> None:
        if self._only is None and (refused := exact_resume_error(held, self._policy, iteration)):
            raise refused

    def _nothing_stored_yet(self, held: list[AvailableCheckpoint], left: Survivors) -> bool:
        """Whether this job lost memory before storage had a complete snapshot: its first iterations are no loss."""
        stored = [one for one in held if one.tier == STORAGE]
        whole = next(recovery_paths(stored, self._policy.operators, recovers_exactly(self._policy)), None)
        return left.has_trained and not self._damage and whole is None

    def _refuse(self, held: list[AvailableCheckpoint]) -> NoReturn:
        nothing, only = explain_no_plan(JobInventory(held), self._policy.operators), self._only
        if only is not None:
            path, there = (
                self._storage.storage.display_path(checkpoint_name(only)),
                any(one.iteration == only for one in held),
            )
            nothing = f"{path} {'neither holds all of the model nor ends a window' if there else 'is not there'}"
        raise CheckpointError(
            f"no snapshot is complete ({cause_of(self._damage or nothing)}). Fix: restore one, or start in another "
            "directory with --ckpt-dir",
            code="no-complete-snapshot",
        )

    def _plans(self, held: list[AvailableCheckpoint], left: Survivors) -> Iterator[RecoveryPlan]:
        policy, only = self._policy, None if left.has_trained else self._only
        # results of a job with changing members depend on the lost workers anyway
        keeps_experts = Capability.LIVE_EXPERTS in policy.requires or self._world.job.may_change_members
        if keeps_experts and not recovers_exactly(policy):
            held = held + live_states(left.live, left.chunk_ids, policy.name, left.lacking)
        inventory = JobInventory(held, left.live, left.chunk_ids, left.logs, left.reduced, left.lacking)
        return plans(inventory, policy.operators, recovers_exactly(policy), only)

    def _damaged_logs(self, plan: RecoveryPlan) -> dict[int, list[int]]:
        """Returns, by rank, the iterations whose logs exist, but cannot be served; warns about them."""
        course = plan.stage_plan(self._stage)
        until = plan.iteration if course is None else course.begin
        served = {iteration: plan.computing(iteration) for iteration in plan.replayed_iterations if iteration <= until}
        damaged = self._engine.tap.damaged(served)
        told = {rank: iterations for rank, iterations in enumerate(gather(damaged)) if iterations}
        if told:
            workers = ", ".join(map(str, told))
            self._log.message(
                warning(
                    f"upstream logs of workers {workers} are damaged: more stages load a snapshot. Fix: test the "
                    "memory of their nodes",
                    code="log-damaged",
                )
            )
        return told

    def _torn(
        self, plan: RecoveryPlan, held: list[AvailableCheckpoint], left: Survivors
    ) -> dict[int, Mapping[str, Detail]]:
        """Returns, by iteration, the planned operators of incomplete snapshots that a replay by stages passes."""
        tier = STORAGE if self._memory is None else MEMORY
        return {
            iteration: begun.operators
            for iteration, begun in left.begun.items()
            if plan.stages
            and min(course.complete_at for course in plan.stage_plans.values()) < iteration < plan.iteration
            and not any(one.has(iteration, tier, begun.operators) for one in held)
        }

    def _follow(self, plan: RecoveryPlan, left: Survivors) -> tuple[Mapping | None, dict[Key, Damage], frozenset[int]]:
        """Executes a plan.

        Returns:
            The non-tensor state, None if the plan has failed; then the damage by checkpoint, and the ranks whose kept
            state is not that of the iteration.
        """
        begun, amount, manifests = time.perf_counter(), 0, {}
        if plan.path is not None or plan.stages:
            manifests, bad = self._rebuilder.rebuild(plan)
            if bad:
                return None, bad, frozenset()
            self._rebuilder.report_replay()
            for failure in filter(None, gather(self._repair.failure)):
                self._log.message(f"WARNING: a window is given up, since a snapshot cannot be saved again: {failure}")
            amount = sum(manifest.nbytes for manifest in manifests.values())
        if self._world.rank in plan.complete:
            self._complete(left.states[plan.iteration])
        amount += sum(gather(exchange(plan.copies, self._state, self._world.rank)))
        if plan.path is None or plan.stages:
            saved = self._join(plan, left)
        else:
            saved = self._restore_from(plan.path, manifests, left)
        is_live = plan.keep or plan.copies or (plan.path is not None and plan.path.base.tier == LIVE)
        self._digests.stale = plan.path.stale if plan.path else ()
        result = self._verify(plan, manifests, left.resized and bool(is_live))
        if (
            result is not None
            and result.wrong
            and (not plan.replayed_iterations or self._repeats_bits(plan, manifests))
        ):
            return None, *self._blame(plan, result)
        self._report(plan, amount, begun, result)
        return saved, {}, frozenset()

    def _verify(self, plan: RecoveryPlan, manifests: Mapping[Key, Manifest], resized: bool) -> Verification | None:
        """Compares the restored state with the digests of its iteration; None without digests.

        With ``resized``, survivors of another number of workers move their state afterwards.
        """
        result = self._digests.verify(
            plan.iteration,
            self._world.rank in plan.keep,
            *self._saved_digests(plan, manifests),
            plan.path.stale if plan.path else (),
            resized=resized,
        )
        return self._digests.verify_replay(result) if result is not None and plan.stages else result

    def _repeats_bits(self, plan: RecoveryPlan, manifests: Mapping[Key, Manifest]) -> bool:
        """Whether a replay has the bits of the original iterations; in another layout, it adds in another order."""
        layout, size = dict(self._engine.layout), self._world.size
        mine = [manifests[one.key] for one in plan.path.checkpoints() if one.key in manifests] if plan.path else []
        differs = any((one.layout, one.writers) != (layout, size) for one in mine)
        return self._deterministic and not any(gather(differs))

    def _saved_digests(
        self, plan: RecoveryPlan, manifests: Mapping[Key, Manifest]
    ) -> tuple[Mapping[str, StateDigests], int]:
        """Returns the digests of the plan's iteration that this worker contributes from a snapshot, and its writers.

        One worker contributes those of a snapshot in storage, and one of each node those in its memory.
        """
        held = None if plan.path is None else plan.path.checkpoint_at(plan.path.iteration)
        manifest = None if held is None or held.iteration != plan.iteration else manifests.get(held.key)
        if held is None or manifest is None:
            return {}, 0
        contributes = self._world.rank == 0 if held.tier == STORAGE else self._leads_node
        return manifest.digests if contributes else {}, manifest.writers

    def _blame(self, plan: RecoveryPlan, result: Verification) -> tuple[dict[Key, Damage], frozenset[int]]:
        """Reports wrong state; returns the damage of the snapshot that it is from, and the ranks that changed it."""
        what = f"the state of iteration {result.iteration} has other digests than the run computed: "
        what += name_operators(result.wrong)
        kept = result.ranks & plan.keep
        if not kept and (plan.path is None or plan.path.base.tier == LIVE):
            kept = plan.keep | plan.complete
        if kept:
            workers = ", ".join(map(str, sorted(kept)))
            self._log.message(
                warning(
                    f"{what}. Workers {workers} do not use the state that they have kept. Fix: test the memory of "
                    "their nodes",
                    code="state-digest-differs",
                )
            )
            return {}, kept
        assert plan.path is not None  # otherwise some worker has kept its state
        held = plan.path.checkpoint_at(plan.path.iteration)
        error = CheckpointError(
            f"{what}, after loading {self._reader.display_path(held)}. Fix: load another snapshot (--ckpt-step)",
            code="state-digest-differs",
        )
        operators = None if recovers_exactly(self._policy) else frozenset(result.wrong)
        return {held.key: Damage(with_code(error), operators)}, frozenset()

    def _complete(self, saved: Mapping) -> None:
        """Completes the iteration that others have completed, from this worker's reduced gradients."""
        record = _record(saved)
        assert record is not None  # others have completed the iteration
        self._replayer.complete(record)
        self._remains.live = LiveState(position_of(saved), saved)  # in case workers are lost while they copy from it

    def _join(self, plan: RecoveryPlan, left: Survivors) -> Mapping:
        """Brings all workers to the state that survivors keep; returns its non-tensor state."""
        saved = left.states[plan.iteration]
        self._restore(saved, left.steps[plan.iteration], saved["policy"], "the workers that are left")
        if self._tokens is not None:
            self._tokens.continue_from(saved["ledger"])
        return saved

    def _forget_moments(self) -> None:
        """Clears moments that a damaged snapshot may have filled; a dense checkpoint may have no optimizer state."""
        for fragment in self._state.fragments(self._state.operators(), Detail.MOMENTS):
            fragment.view.zero_()

    def _note_all(self, problems: Iterable[str]) -> None:
        for problem in problems:
            if problem not in self._noted:
                self._noted.add(problem)
                self._note(problem)

    def _note(self, problem: str) -> None:
        self._damage = self._damage or problem
        self._log.message(f"WARNING: an older snapshot is tried: {problem}")

    def _restore_from(self, way: RecoveryPath, manifests: dict[Key, Manifest], left: Survivors) -> Mapping:
        """Restores the non-tensor state from the base of a recovery path; returns it."""
        ledgers = {key: manifest.state["ledger"] for key, manifest in manifests.items() if manifest.state.get("ledger")}
        if way.base.tier == LIVE:
            saved = left.states[way.iteration]
            self._restore(saved, left.steps[way.iteration], saved["policy"], "the workers that are left")
            ledgers |= {way.base.key: saved["ledger"]} if saved.get("ledger") else {}
        else:
            base = manifests[way.base.key]
            saved = base.state
            self._restore(saved, steps_of(base), base.policy, self._reader.display_path(way.base))
        if self._tokens is not None:
            self._count_lost_tokens(self._tokens, way, ledgers)
        return saved

    def _restore(self, saved: Mapping, steps: Mapping[str, int], policy: str, where: str) -> None:
        """Restores the non-tensor state."""
        self._rebuilder.restore_non_tensor_state(
            saved, steps, [operator.name for operator in self._policy.operators], where
        )
        self._engine.compare_samples(saved, self._log.message)
        if policy == self._policy.name:  # another policy has another state
            if saved.get("interval"):
                self._policy.interval.load_state_dict(saved["interval"])
            if saved.get("policy_state"):
                self._policy.loading(saved["policy_state"])()

    def _count_lost_tokens(self, tokens: TokenTracker, way: RecoveryPath, mine: dict[Key, Mapping]) -> None:
        has = gather(sorted(mine))  # other nodes' memory may hold further ledgers
        first = {tuple(key): rank for rank, keys in reversed(list(enumerate(has))) for key in keys}
        told = gather({key: ledger for key, ledger in mine.items() if first[key] == self._world.rank})
        states = {key: ledger for ledgers in told for key, ledger in ledgers.items()}
        raised = tokens.recovered(way, states)
        self._policy.recovery.on_recovery(raised.of_training)
        by_layer = {str(layer): plt for layer, plt in tokens.plt_by_layer.items()}
        self._log.events.write(
            "lost",
            iteration=way.iteration,
            plt=tokens.plt,
            raised_by=raised.so_far,
            of_training=raised.of_training,
            by_layer=by_layer,
        )
        self._log.message(
            f"experts have lost {tokens.plt:.3%} of their tokens so far, {raised.so_far:.3%} by this recovery"
        )

    def _report(self, plan: RecoveryPlan, amount: int, begun: float, result: Verification | None) -> None:
        seconds, tier = time.perf_counter() - begun, plan.path.base.tier if plan.path else LIVE
        folds = plan.path.gradients if plan.path else {}
        self._log.events.write(
            "resume",
            iteration=plan.iteration,
            tier=tier,
            bytes=amount,
            seconds=seconds,
            sources=[list(one.key) for one in plan.path.checkpoints()] if plan.path else [],
            kept=len(plan.keep) + len(plan.complete),
            stages=sorted(plan.stages),
            went_on={stage: course.begin for stage, course in plan.stage_plans.items() if course.is_resumed},
            folded=len(folds),
            stale=len(plan.path.stale) if plan.path else 0,
            verified=0 if result is None else result.verified,
            unverified=[] if result is None else list(result.unverified),
            replayed=[] if result is None else list(result.replayed),
            wrong=[] if result is None else list(result.wrong),
        )
        keeping = len(plan.keep)
        keep = "1 worker keeps its" if keeping == 1 else f"{keeping} workers keep their"
        kept = f"{keep} state of iteration {plan.iteration}; " if keeping else ""
        source = f"from {tier}" if plan.path else "from one another"
        for stage, course in sorted(plan.stage_plans.items()):
            continued = f"continued from iteration {course.begin} and " if course.is_resumed else ""
            what = f"iterations {course.begin + 1} to {plan.iteration}" if course.begin < plan.iteration else "nothing"
            kept += f"stage {stage} {continued}replayed {what} without the others; "
        folded = f", and brought {len(folds)} operators up to date by their gradients" if folds else ""
        checked = "" if result is None else f"; {result}"
        self._log.message(f"{kept}loaded {amount / 1e9:.3g} GB {source}{folded} in {seconds:.2f} s{checked}")


def _record(saved: Mapping) -> StepRecord | None:
    return decode.convert(saved["record"], StepRecord) if saved.get("record") else None
