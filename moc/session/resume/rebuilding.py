"""Rebuilds the state of a plan's iteration from checkpoints and replay, on all pipeline stages or on some.

for each iteration, from the earliest start of a stage to the iteration of the surviving state:
    load the state of operators that do not learn yet from the snapshots of this iteration    # all workers verify it
    update operators by the gradients in later snapshots                                       # recovery of experts
    stages that have started:   replay the next iteration
    the others:                 serve their logs of it

Updates operators by saved gradients: MoEtion's recomputation of the optimizer (section 5.2, Algorithm 3).

    for each iteration whose gradients a checkpoint has, ascending:
        restore learning rate, weight decay, loss scale and update counts from the checkpoint before it
        update the operators with only these gradients, clipped by the recorded norm; nothing, if it was skipped

Updates are elementwise, and run through the optimizer of the engine.  In the same layout, with the same kernels, the
result is bit-identical to the original update.

Repairs the current window: during the replay, saves snapshots again that lost workers had not saved. Without repair,
each loss of a worker during a save would end the window.  Under repeated losses, no window would ever complete, and
recovery would use older and older snapshots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict

from moc.errors import warning, with_code
from moc.fault_points import reach
from moc.recovery.plan import RecoveryPlan, StagePlan
from moc.recovery.sources import LIVE, MASTER, MEMORY, AvailableCheckpoint, ReplayPoint
from moc.runtime.collectives import gather
from moc.runtime.job import World
from moc.session.digests import Digests
from moc.session.engine import Engine, Listener
from moc.session.resume.reading import Damage, Key, Problem, SnapshotReader
from moc.session.resume.replay import Replayer, ReplayState, check_freezing, record_of, unfreeze_on_exit
from moc.session.resume.survivors import give_to_other_stages
from moc.session.tiers import Tiers
from moc.snapshot.contents import Contents
from moc.snapshot.saver import Saver
from moc.state.operators import Detail, Fragment
from moc.state.record import Position, Records, StepRecord
from moc.store.errors import CheckpointError, MissingTensorError
from moc.store.manifest import Manifest


class Repair:
    """Saves this worker's missing parts of snapshots; they are committed together with the parts of other workers.

    Attributes:
        failure: error of a failed save; None if nothing failed.
    """

    def __init__(self, world: World, contents: Contents, tiers: Tiers, saver: Saver):
        self._world, self._contents, self._tiers, self._training = world, contents, tiers, saver
        self._incomplete: Mapping[int, Mapping[str, Detail]] = {}
        self._saver: Saver | None = None
        self.failure: str | None = None

    @contextlib.contextmanager
    def enabled_for(self, incomplete: Mapping[int, Mapping[str, Detail]]) -> Iterator[None]:
        """Context of a replay that may pass incomplete snapshots, given by iteration with their planned operators."""
        self._incomplete = incomplete
        self._saver = self._training.sibling()
        with contextlib.closing(self._saver):
            yield

    def on_reached(self, iteration: int) -> None:
        """Saves this worker's part of the snapshot of the iteration that the replay has reached, if it is missing.

        It waits for the save.  A failure is kept in :attr:`failure`: recovery continues, and another window starts.
        """
        if iteration not in self._incomplete or self._has_part(iteration):
            return
        try:
            self._save(iteration)
        except CheckpointError as error:
            self.failure = with_code(error)

    def _save(self, iteration: int) -> None:
        assert self._saver is not None  # set by of()
        operators = self._incomplete[iteration]
        slot = list(self._incomplete).index(iteration)  # one slot per snapshot: in memory, the buffer is the file
        snapshot = self._saver.take(slot, iteration, self._contents.share(operators), self._contents.entries(operators))
        snapshot.finalized.result()
        if self._tiers.memory is None:
            self._saver.persist(snapshot)
            assert snapshot.persisted is not None  # persist() has begun it
            snapshot.persisted.result()

    def _has_part(self, iteration: int) -> bool:
        store = self._tiers.storage if self._tiers.memory is None else self._tiers.memory
        return store.is_publishable(iteration, [self._world.rank])


class GradientApplier:
    """Applier of saved gradients to this worker's state; communicates with no other worker."""

    def __init__(self, engine: Engine, reader: SnapshotReader):
        self._engine, self._reader = engine, reader

    def apply(self, point: ReplayPoint, manifests: Mapping[Key, Manifest]) -> Problem | None:
        """Updates the loaded operators of a replay point by all of their gradients.

        Returns:
            A problem with a checkpoint, after which the state must be loaded again; or None.
        """
        local_operators = self._reader.operators_to_update(point)
        steps = {checkpoint.key: checkpoint for name in local_operators for checkpoint in point.gradients[name]}
        for number, key in enumerate(sorted(steps)):
            if number:
                reach("folding")
            before = {name: previous for name in local_operators if (previous := _before(point, name, key)) is not None}
            try:
                self._update(steps[key], before, manifests)
            except (CheckpointError, MissingTensorError, OSError) as error:
                return self._reader.problem(steps[key], manifests[key], with_code(error))
        return None

    def _update(
        self,
        checkpoint: AvailableCheckpoint,
        before: Mapping[str, AvailableCheckpoint],
        manifests: Mapping[Key, Manifest],
    ) -> None:
        """Repeats the update of operators by a checkpoint's gradients; ``before`` has their previous checkpoints."""
        record = record_of(manifests[checkpoint.key].state, self._reader.display_path(checkpoint))
        if record.skipped:
            return
        update_counts = {name: manifests[previous.key].operators[name].step for name, previous in before.items()}
        self._engine.state.set_steps({name: count for name, count in update_counts.items() if count is not None})
        first_before = next(iter(before.values()))  # all are of one iteration
        self._engine.load_scalars(manifests[first_before.key].state, self._reader.display_path(first_before))
        self._engine.apply(record, self._reader.values(checkpoint, manifests[checkpoint.key]), before.keys())


def _before(point: ReplayPoint, operator: str, key: Key) -> AvailableCheckpoint | None:
    """Returns the checkpoint that precedes checkpoint ``key`` in an operator's chain, if any."""
    chain = [point.sources[operator, MASTER], *point.gradients[operator]]
    return next((before for before, after in zip(chain, chain[1:], strict=False) if after.key == key), None)


class Rebuilder:
    """Rebuilding of this worker's state at the iteration of a plan; every method is collective."""

    def __init__(
        self,
        engine: Engine,
        reader: SnapshotReader,
        replayer: Replayer,
        records: Records,
        repair: Repair,
        digests: Digests,
        log: Listener,
    ):
        self._engine, self._world, self._state = engine, engine.world, engine.state
        self._reader, self._replayer, self._records, self._repair = reader, replayer, records, repair
        self._applier, self._digests, self._log = GradientApplier(engine, reader), digests, log

    def rebuild(self, plan: RecoveryPlan) -> tuple[dict[Key, Manifest], dict[Key, Damage]]:
        """Loads and replays by a plan, which is identical on all workers.

        Returns:
            The manifests that this worker has read; and the damage by checkpoint, if any.
        """
        if any(stage_plan.complete_at > stage_plan.begin for stage_plan in self._stage_plans(plan)):
            check_freezing(self._state)
        keeps_state, stage_plan = (
            self._world.rank in plan.keep | plan.complete,
            plan.stage_plan(self._world.pipeline_rank),
        )
        stage_plan = None if keeps_state else stage_plan
        manifests, fragments, damage = self._read(plan, stage_plan)
        if damage:
            return manifests, damage
        if plan.path is not None and plan.path.base.tier != LIVE:
            base = plan.path.base
            self._reader.check(base, manifests[base.key], window=len(plan.path.points) > 1 or bool(plan.path.gradients))
            if plan.path.gradients:  # checked now: later, unsuitable state would count as damage
                self._engine.load_scalars(manifests[base.key].state, self._reader.display_path(base))
            self._log.message(f"loading snapshot {self._reader.display_path(base)}")
        self._exchange_records(plan)
        return manifests, self._follow(plan, stage_plan, manifests, fragments)

    def report_replay(self, interrupted: bool = False) -> None:
        """Reports replayed iterations; ``interrupted`` if another loss or a damaged snapshot ended the replay early."""
        for step in self._replayer.unreported_steps():
            self._log.events.write(
                "replay",
                iteration=step.iteration,
                seconds=step.seconds,
                frozen=step.frozen,
                workers=step.workers,
                stages=step.stages,
                loss=step.loss,
                exact=step.exact,
                cut_off=interrupted,
            )
            if step.exact is False:
                self._log.message(
                    warning(
                        f"replayed iteration {step.iteration} has {step.difference}, so this run is not bit-identical "
                        "to the original one. Fix: resume with the layout, the data and the flags of the original run",
                        code="replay-differs",
                    )
                )

    def restore_non_tensor_state(
        self, saved: Mapping, steps: Mapping[str, int], operators: Iterable[str], where: str
    ) -> None:
        """Restores the non-tensor state that belongs to operators, after these are loaded.

        ``saved`` is the state in the snapshot that ``where`` names.  ``steps`` has, by operator, the updates that its
        moments have seen.
        """
        self._state.gather_weights()
        # as in the published systems, stale experts count the run's updates, not their own
        latest = max(steps.values(), default=None)
        if latest is not None:
            self._state.set_steps({name: steps.get(name, latest) for name in operators})
        self._engine.load_scalars(saved, where)

    def _stage_plans(self, plan: RecoveryPlan) -> list[StagePlan]:
        """Returns the distinct stage plans."""
        shared_plan = plan.stage_plan(self._world.pipeline_rank)  # shared by all stages without their own stage plan
        return list(plan.stage_plans.values()) or ([] if shared_plan is None else [shared_plan])

    def _read(
        self, plan: RecoveryPlan, stage_plan: StagePlan | None
    ) -> tuple[dict[Key, Manifest], dict[Key, list[Fragment]], dict[Key, Damage]]:
        """Returns manifests, this worker's tensor chunks by checkpoint, and the damage by checkpoint.

        A stage that continues its replay reads only the state that it lacks.  The other stages' checkpoint need not be
        in its node's memory.
        """
        fragments = (
            self._reader.fragments(stage_plan.path) if stage_plan is not None and stage_plan.path is not None else {}
        )
        self._reader.adopted.fetch(_in_memory(fragments))
        manifests, problem = {}, None
        paths = [plan.path] if stage_plan is None or stage_plan.path is plan.path else [plan.path, stage_plan.path]
        for path in filter(None, paths):
            path_manifests, path_problem = self._reader.manifests(path, fragments)
            manifests, problem = manifests | path_manifests, problem or path_problem
        return manifests, fragments, self._agree(problem)

    def _agree(self, problem: Problem | None) -> dict[Key, Damage]:
        """Returns, by checkpoint, the damage that any worker has found."""
        damage: dict[Key, Damage] = {}
        for key, text, operators in filter(None, gather(problem)):
            earlier = damage.get(tuple(key), Damage(text, frozenset()))
            damaged = None if operators is None or earlier.operators is None else earlier.operators | set(operators)
            damage[tuple(key)] = Damage(earlier.text, damaged)
        return damage

    def _exchange_records(self, plan: RecoveryPlan) -> None:
        """Collects the step records of the replayed iterations from the workers that know them."""
        needed = set(range(plan.begin, plan.iteration + 1))
        local = needed.intersection(self._records.iterations())
        for record in (record for records in gather(self._records.of(sorted(local))) for record in records):
            self._records.add(record)

    def _follow(
        self,
        plan: RecoveryPlan,
        stage_plan: StagePlan | None,
        manifests: dict[Key, Manifest],
        fragments: dict[Key, list[Fragment]],
    ) -> dict[Key, Damage]:
        with unfreeze_on_exit(self._state):
            if stage_plan is not None and self._world.rank in stage_plan.behind:
                self._complete(stage_plan)
            for iteration in range(plan.begin, plan.iteration + 1):
                if damage := self._load(plan, stage_plan, iteration, manifests, fragments):
                    return damage
                if iteration < plan.iteration:
                    self._replay_next(plan, stage_plan, iteration, manifests)
        return {}

    def _complete(self, stage_plan: StagePlan) -> None:
        """Completes the iteration that others of this stage have completed: all must start from the same state."""
        progress, frozen = self._replayer.progress, _frozen_at_start(stage_plan)
        (record,) = self._records.of([stage_plan.begin])
        assert progress.state is not None  # the state before the iteration is valid
        position = progress.state.position.after(record)
        self._state.freeze(frozen)
        progress.move_to(None)
        self._replayer.complete(record)
        progress.move_to(ReplayState(position, frozenset(frozen)))

    def _load(
        self,
        plan: RecoveryPlan,
        stage_plan: StagePlan | None,
        iteration: int,
        manifests: dict[Key, Manifest],
        fragments: dict[Key, list[Fragment]],
    ) -> dict[Key, Damage]:
        """Loads the state that any stage needs at an iteration; returns, by checkpoint, the damage on any worker."""
        if all(other_plan.point(iteration) is None for other_plan in self._stage_plans(plan)):
            return {}
        local_point = None if stage_plan is None else stage_plan.point(iteration)
        point = local_point or (plan.path and plan.path.point(iteration))  # all workers verify the snapshot
        damage = self._agree(point and self._reader.fill(point, manifests, fragments))
        if not damage and point is not None and point.gradients:
            damage = self._agree(local_point and self._applier.apply(local_point, manifests))
        if not damage:
            loaded = () if point is None else self._reader.fragments_at(point)
            give_to_other_stages(self._state, loaded, local_point is not None, self._world.device)
        if local_point is not None:
            self._state.freeze(local_point.frozen)
            self._state.activate(local_point.full)
        return damage

    def _replay_next(
        self, plan: RecoveryPlan, stage_plan: StagePlan | None, iteration: int, manifests: dict[Key, Manifest]
    ) -> None:
        """Replays or serves the iteration after this one."""
        stages = plan.computing(iteration + 1)
        if stage_plan is None or iteration < stage_plan.begin:
            self._replayer.serve(iteration + 1, stages)
            return
        point = stage_plan.point(iteration)
        if point is not None:
            assert stage_plan.path is not None  # the stage plan loads state
            checkpoint = stage_plan.path.checkpoint_at(iteration)
            manifest = manifests[checkpoint.key]
            self.restore_non_tensor_state(
                manifest.state, steps_of(manifest), point.full, self._reader.display_path(checkpoint)
            )
            position = position_of(manifest.state)
        else:
            state = self._replayer.progress.state
            assert state is not None  # the previous state is valid
            position = state.position
            if iteration == stage_plan.begin:
                self._state.gather_weights()
        if iteration >= stage_plan.complete_at:
            self._repair.on_reached(iteration)
        record = self._record(stage_plan, iteration + 1, manifests)
        self._replayer.compute(position, record, self._state.frozen, stages)
        if stages and iteration + 1 == self._digests.checks_before(plan.iteration):
            self._digests.replayed(iteration + 1, self._state.frozen)

    def _record(self, stage_plan: StagePlan, iteration: int, manifests: dict[Key, Manifest]) -> StepRecord:
        """Returns the step record of an iteration; while snapshots are loaded, the next snapshot has it."""
        if iteration > stage_plan.complete_at:
            return self._records.of([iteration])[0]
        assert stage_plan.path is not None  # the stage plan loads up to this iteration
        checkpoint = stage_plan.path.checkpoint_at(iteration)
        return record_of(manifests[checkpoint.key].state, self._reader.display_path(checkpoint))


def _in_memory(fragments: Mapping[Key, Iterable[Fragment]]) -> dict[int, set[str]]:
    """Returns the operators of tensor chunks, by iteration of a snapshot in memory."""
    return {
        iteration: {fragment.operator for fragment in loaded}
        for (iteration, tier), loaded in fragments.items()
        if tier == MEMORY
    }


def _frozen_at_start(stage_plan: StagePlan) -> set[str]:
    """Returns the operators that do not learn yet at the start of a stage plan."""
    return set() if stage_plan.path is None else {name for point in stage_plan.path.points for name in point.full}


def position_of(saved: Mapping) -> Position:
    """Returns the position in a snapshot's non-tensor state."""
    return Position(**{name: saved[name] for name in asdict(Position())})


def steps_of(manifest: Manifest) -> dict[str, int]:
    """Returns, by operator, the updates that its moments have seen."""
    return {name: entry.step for name, entry in manifest.operators.items() if entry.step is not None}
