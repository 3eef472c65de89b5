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
from moc.recovery.plan import Course, RecoveryPlan
from moc.recovery.sources import LIVE, MASTER, MEMORY, AvailableCheckpoint, ReplayPoint
from moc.runtime.collectives import gather
from moc.runtime.job import World
from moc.session.digests import Digests
from moc.session.engine import Engine, Listener
from moc.session.resume.reading import Damage, Key, Problem, SnapshotReader
from moc.session.resume.replay import Reached, Replayer, check_freezing, nothing_frozen_after, record_of
from moc.session.resume.survivors import give_to_other_stages
from moc.session.tiers import Tiers
from moc.snapshot.contents import Contents
from moc.snapshot.saver import Saver
from moc.state.operators import Detail, Fragment
from moc.state.record import Position, Records, StepRecord
from moc.store.errors import CheckpointError, MissingTensorError
from moc.store.manifest import Manifest


class Repair:
    """Saving of this worker's missing parts; the publisher finds them together with the parts of the other workers.

    Attributes:
        failure: error of a failed save; None if nothing failed.
    """

    def __init__(self, world: World, contents: Contents, tiers: Tiers, saver: Saver):
        self._world, self._contents, self._tiers, self._training = world, contents, tiers, saver
        self._torn: Mapping[int, Mapping[str, Detail]] = {}
        self._saver: Saver | None = None
        self.failure: str | None = None

    @contextlib.contextmanager
    def of(self, torn: Mapping[int, Mapping[str, Detail]]) -> Iterator[None]:
        """Context of a replay that may pass incomplete snapshots, given by iteration with their planned operators."""
        self._torn = torn
        self._saver = self._training.sibling()
        with contextlib.closing(self._saver):
            yield

    def comes_by(self, iteration: int) -> None:
        """Saves this worker's part of the snapshot of the iteration that the replay has reached, if it is missing.

        It waits for the save.  A failure is kept in :attr:`failure`: recovery continues, and another window starts.
        """
        if iteration not in self._torn or self._has_part(iteration):
            return
        try:
            self._save(iteration)
        except CheckpointError as error:
            self.failure = with_code(error)

    def _save(self, iteration: int) -> None:
        assert self._saver is not None  # set by of()
        operators = self._torn[iteration]
        slot = list(self._torn).index(iteration)  # one slot per snapshot: in memory, the buffer is the file
        snapshot = self._saver.take(slot, iteration, self._contents.share(operators), self._contents.entries(operators))
        snapshot.finalized.result()
        if self._tiers.memory is None:
            self._saver.persist(snapshot)
            assert snapshot.persisted is not None  # persist() has begun it
            snapshot.persisted.result()

    def _has_part(self, iteration: int) -> bool:
        store = self._tiers.storage if self._tiers.memory is None else self._tiers.memory
        return store.is_publishable(iteration, [self._world.rank])


class Folder:
    """Applier of saved gradients to this worker's state; communicates with no other worker."""

    def __init__(self, engine: Engine, reader: SnapshotReader):
        self._engine, self._reader = engine, reader

    def fold(self, moment: ReplayPoint, manifests: Mapping[Key, Manifest]) -> Problem | None:
        """Updates the loaded operators of a replay point by all of their gradients.

        Returns:
            A problem with a checkpoint, after which the state must be loaded again; or None.
        """
        mine = self._reader.folded_at(moment)
        steps = {one.key: one for name in mine for one in moment.folds[name]}
        for number, key in enumerate(sorted(steps)):
            if number:
                reach("folding")
            before = {name: held for name in mine if (held := _before(moment, name, key)) is not None}
            try:
                self._update(steps[key], before, manifests)
            except (CheckpointError, MissingTensorError, OSError) as error:
                return self._reader.problem(steps[key], manifests[key], with_code(error))
        return None

    def _update(
        self, held: AvailableCheckpoint, before: Mapping[str, AvailableCheckpoint], manifests: Mapping[Key, Manifest]
    ) -> None:
        """Repeats the update of operators by a checkpoint's gradients; ``before`` has their previous checkpoints."""
        record = record_of(manifests[held.key].state, self._reader.where(held))
        if record.skipped:
            return
        counts = {name: manifests[one.key].operators[name].step for name, one in before.items()}
        self._engine.state.set_steps({name: count for name, count in counts.items() if count is not None})
        first = next(iter(before.values()))  # all are of one iteration
        self._engine.load_scalars(manifests[first.key].state, self._reader.where(first))
        self._engine.apply(record, self._reader.values(held, manifests[held.key]), before.keys())


def _before(moment: ReplayPoint, operator: str, key: Key) -> AvailableCheckpoint | None:
    """Returns the checkpoint that precedes checkpoint ``key`` in an operator's chain, if any."""
    chain = [moment.sources[operator, MASTER], *moment.folds[operator]]
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
        self._folder, self._digests, self._log = Folder(engine, reader), digests, log

    def rebuild(self, plan: RecoveryPlan) -> tuple[dict[Key, Manifest], dict[Key, Damage]]:
        """Loads and replays by a plan, which is identical on all workers.

        Returns:
            The manifests that this worker has read; and the damage by checkpoint, if any.
        """
        if any(course.whole > course.begin for course in self._courses(plan)):
            check_freezing(self._state)
        keeps, course = self._world.rank in plan.keep | plan.complete, plan.course(self._world.pipeline_rank)
        course = None if keeps else course
        manifests, fragments, bad = self._read(plan, course)
        if bad:
            return manifests, bad
        if plan.way is not None and plan.way.base.tier != LIVE:
            base = plan.way.base
            self._reader.check(base, manifests[base.key], window=len(plan.way.moments) > 1 or bool(plan.way.folds))
            if plan.way.folds:  # refuse unsuitable state now: later it would count as damage
                self._engine.load_scalars(manifests[base.key].state, self._reader.where(base))
            self._log.message(f"loading snapshot {self._reader.where(base)}")
        self._know_records(plan)
        return manifests, self._follow(plan, course, manifests, fragments)

    def tell(self, cut_off: bool = False) -> None:
        """Reports replayed iterations; ``cut_off`` if another loss or a damaged snapshot ended the replay early."""
        for one in self._replayer.repeated():
            self._log.events.write(
                "replay",
                iteration=one.iteration,
                seconds=one.seconds,
                frozen=one.frozen,
                workers=one.workers,
                stages=one.stages,
                loss=one.loss,
                exact=one.exact,
                cut_off=cut_off,
            )
            if one.exact is False:
                self._log.message(
                    warning(
                        f"replayed iteration {one.iteration} has {one.is_not}, so this run is not bit-identical to the "
                        "original one. Fix: resume with the layout, the data and the flags of the original run",
                        code="replay-differs",
                    )
                )

    def restore_moment(self, saved: Mapping, steps: Mapping[str, int], operators: Iterable[str], where: str) -> None:
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

    def _courses(self, plan: RecoveryPlan) -> list[Course]:
        """Returns the distinct stage plans."""
        mine = plan.course(self._world.pipeline_rank)  # shared by all stages without their own stage plan
        return list(plan.courses.values()) or ([] if mine is None else [mine])

    def _read(
        self, plan: RecoveryPlan, course: Course | None
    ) -> tuple[dict[Key, Manifest], dict[Key, list[Fragment]], dict[Key, Damage]]:
        """Returns manifests, this worker's tensor chunks by checkpoint, and the damage by checkpoint.

        A stage that continues its replay reads only the state that it lacks.  The other stages' checkpoint need not be
        in its node's memory.
        """
        fragments = self._reader.fragments(course.way) if course is not None and course.way is not None else {}
        self._reader.adopted.fetch(_in_memory(fragments))
        manifests, problem = {}, None
        ways = [plan.way] if course is None or course.way is plan.way else [plan.way, course.way]
        for way in filter(None, ways):
            of_way, wrong = self._reader.manifests(way, fragments)
            manifests, problem = manifests | of_way, problem or wrong
        return manifests, fragments, self._agree(problem)

    def _agree(self, problem: Problem | None) -> dict[Key, Damage]:
        """Returns, by checkpoint, the damage that any worker has found."""
        found: dict[Key, Damage] = {}
        for key, text, operators in filter(None, gather(problem)):
            known = found.get(tuple(key), Damage(text, frozenset()))
            lost = None if operators is None or known.operators is None else known.operators | set(operators)
            found[tuple(key)] = Damage(known.text, lost)
        return found

    def _know_records(self, plan: RecoveryPlan) -> None:
        """Collects the step records of the replayed iterations from the workers that know them."""
        wanted = set(range(plan.begin, plan.iteration + 1))
        mine = wanted.intersection(self._records.iterations())
        for record in (record for records in gather(self._records.of(sorted(mine))) for record in records):
            self._records.add(record)

    def _follow(
        self,
        plan: RecoveryPlan,
        course: Course | None,
        manifests: dict[Key, Manifest],
        fragments: dict[Key, list[Fragment]],
    ) -> dict[Key, Damage]:
        with nothing_frozen_after(self._state):
            if course is not None and self._world.rank in course.behind:
                self._complete(course)
            for iteration in range(plan.begin, plan.iteration + 1):
                if bad := self._load(plan, course, iteration, manifests, fragments):
                    return bad
                if iteration < plan.iteration:
                    self._go_by(plan, course, iteration, manifests)
        return {}

    def _complete(self, course: Course) -> None:
        """Completes the iteration that others of this stage have completed: all must start from the same state."""
        progress, lacking = self._replayer.progress, _lacking(course)
        (record,) = self._records.of([course.begin])
        assert progress.at is not None  # the state before the iteration is valid
        position = progress.at.position.after(record)
        self._state.freeze(lacking)
        progress.move_to(None)
        self._replayer.complete(record)
        progress.move_to(Reached(position, frozenset(lacking)))

    def _load(
        self,
        plan: RecoveryPlan,
        course: Course | None,
        iteration: int,
        manifests: dict[Key, Manifest],
        fragments: dict[Key, list[Fragment]],
    ) -> dict[Key, Damage]:
        """Loads the state that any stage needs at an iteration; returns, by checkpoint, the damage on any worker."""
        if all(one.moment(iteration) is None for one in self._courses(plan)):
            return {}
        mine = None if course is None else course.moment(iteration)
        moment = mine or (plan.way and plan.way.moment(iteration))  # all workers verify the snapshot
        bad = self._agree(moment and self._reader.fill(moment, manifests, fragments))
        if not bad and moment is not None and moment.folds:
            bad = self._agree(mine and self._folder.fold(mine, manifests))
        if not bad:
            loaded = () if moment is None else self._reader.loaded_at(moment)
            give_to_other_stages(self._state, loaded, takes=mine is not None)
        if mine is not None:
            self._state.freeze(mine.frozen)
            self._state.activate(mine.full)
        return bad

    def _go_by(self, plan: RecoveryPlan, course: Course | None, iteration: int, manifests: dict[Key, Manifest]) -> None:
        """Replays or serves the iteration after this one."""
        stages = plan.computing(iteration + 1)
        if course is None or iteration < course.begin:
            self._replayer.serve(iteration + 1, stages)
            return
        moment = course.moment(iteration)
        if moment is not None:
            assert course.way is not None  # the stage plan loads state
            held = course.way.at(iteration)
            here = manifests[held.key]
            self.restore_moment(here.state, steps_of(here), moment.full, self._reader.where(held))
            position = position_of(here.state)
        else:
            at = self._replayer.progress.at
            assert at is not None  # the previous state is valid
            position = at.position
            if iteration == course.begin:
                self._state.gather_weights()
        if iteration >= course.whole:
            self._repair.comes_by(iteration)
        record = self._record(course, iteration + 1, manifests)
        self._replayer.compute(position, record, self._state.frozen, stages)
        if stages and iteration + 1 == self._digests.checks_before(plan.iteration):
            self._digests.replayed(iteration + 1, self._state.frozen)

    def _record(self, course: Course, iteration: int, manifests: dict[Key, Manifest]) -> StepRecord:
        """Returns the step record of an iteration; while snapshots are loaded, the next snapshot has it."""
        if iteration > course.whole:
            return self._records.of([iteration])[0]
        assert course.way is not None  # the stage plan loads up to this iteration
        held = course.way.at(iteration)
        return record_of(manifests[held.key].state, self._reader.where(held))


def _in_memory(fragments: Mapping[Key, Iterable[Fragment]]) -> dict[int, set[str]]:
    """Returns the operators of tensor chunks, by iteration of a snapshot in memory."""
    return {
        iteration: {one.operator for one in there} for (iteration, tier), there in fragments.items() if tier == MEMORY
    }


def _lacking(course: Course) -> set[str]:
    """Returns the operators that do not learn yet at the start of a stage plan."""
    return set() if course.way is None else {name for moment in course.way.moments for name in moment.full}


def position_of(saved: Mapping) -> Position:
    """Returns the position in a snapshot's non-tensor state."""
    return Position(**{name: saved[name] for name in asdict(Position())})


def steps_of(manifest: Manifest) -> dict[str, int]:
    """Returns, by operator, the updates that its moments have seen."""
    return {name: entry.step for name, entry in manifest.operators.items() if entry.step is not None}
