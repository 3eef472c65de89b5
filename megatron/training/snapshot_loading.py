"""Where a run goes on: from what workers have left, or a snapshot in memory or storage, whatever layout took it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import NoReturn

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.training import checkpoint_contents as contents
from megatron.training.agreement import gather, on_first
from megatron.training.checkpoint_contents import Position
from megatron.training.config import Config
from megatron.training.initialize import World
from megatron.training.logging import Log
from megatron.training.optimizer import VotedOptimizer
from megatron.training.replay import Repetition, Replay, check_freezing, convert, record_of
from megatron.training.snapshot_reading import Key, Problem, SnapshotReader
from megatron.training.snapshot_repair import Repair
from megatron.training.snapshot_tiers import Tiers
from megatron.training.step import Records, StepRecord
from megatron.training.survivors import Left, Live, Survivors
from megatron.training.tied_weights import give_to_other_stages
from megatron.training.tokens import TokenBook
from moc.policy import Policy
from moc.recovery.inventory import Summary, in_memory, in_storage, look
from moc.recovery.plan import Inventory, Plan, plans, reason
from moc.recovery.replicas import exchange
from moc.recovery.sources import MEMORY, STORAGE, Held, Moment, Recovery
from moc.state.detail import Detail
from moc.state.fragments import Fragment
from moc.state.training_state import TrainingState
from moc.store.errors import CheckpointError
from moc.store.manifest import Manifest
from moc.store.store import directory_of

LIVE = "live"
"""In place of a tier, where the state comes from the workers that are left."""


@dataclass(frozen=True)
class Loaded:
    """Where a run goes on.

    Attributes:
        plan: how everybody has got there.
        position: the same, with samples.
        record: of the iteration that led to it, if it is known.
        held: the checkpoints that are still of use.
    """

    plan: Plan
    position: Position
    record: StepRecord | None
    held: Sequence[Held]


class SnapshotLoader:
    """Loads into this worker's model and optimizer; all methods are collective, and fail on all workers alike.

    Args:
        config: the flags in force.
        world: this worker's place.
        state: what to fill.
        optimizer: of which loss scales are restored.
        scheduler: the schedule of learning rate and weight decay.
        tiers: where snapshots are.
        policy: which goes on from what it was told.
        tokens: the token ledger, where snapshots are partial.
        repair: saves again what lost workers had not saved.
        log: where to report.
        repetition: computes iterations again.
        records: of iterations of late, as far as this worker knows them.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        state: TrainingState,
        optimizer: VotedOptimizer,
        scheduler: OptimizerParamScheduler,
        tiers: Tiers,
        policy: Policy,
        tokens: TokenBook | None,
        repair: Repair,
        log: Log,
        repetition: Repetition,
        records: Records,
    ):
        self._config, self._world, self._state, self._log = config, world, state, log
        self._repetition, self._records = repetition, records
        self._optimizer, self._scheduler, self._policy, self._tokens = optimizer, scheduler, policy, tokens
        self._repair = repair
        self._stage = world.pipeline_rank
        self._storage, self._memory, self._leads_node = tiers.storage, tiers.memory, tiers.leads_node
        self._reader = SnapshotReader(config, world, state, tiers)
        self._damage: str | None = None

    def find(self) -> list[Held]:
        """The checkpoints that there are; what cannot be read of those in storage is said."""
        held, problems = self._look()
        for problem in problems:
            self._note(problem)
        return held

    def find_again(self) -> list[Held]:
        """The same, when what lost workers had not saved was saved again."""
        return self._look()[0]

    def _look(self) -> tuple[list[Held], list[str]]:
        where = f"cannot look for snapshots in {self._storage.place.name}"
        stored, problems = on_first(lambda: look(self._storage), where)
        here = look(self._memory)[0] if self._memory is not None and self._leads_node else []
        nodes = [[Summary(*one) for one in node] for node in gather(here)]
        return in_storage(Summary(*one) for one in stored) + in_memory(nodes, self._policy.operators), problems

    def load(self, held: list[Held], oldest: int | None, left: Survivors, mine: Left | None) -> Loaded | None:
        """Fills model, optimizer and schedule by the newest plan that works.

        Args:
            held: the checkpoints that there are.
            oldest: iteration of a dense checkpoint, which is better than older snapshots; None if there is none.
            left: what workers still have.
            mine: what this one has, which it loses where it loads.

        Returns:
            None if there is no plan.

        Raises:
            CheckpointError: there are checkpoints, but none of them is whole, nor is there a dense one; or they are of
                another model; or iterations would have to be computed again, and operators cannot be frozen.
        """
        found = bool(held)
        self._check_newest(held)
        while plan := next(self._plans(held, left), None):
            if oldest is not None and plan.iteration < oldest:
                break
            if plan.stages and (damaged := self._damaged_logs(plan)):
                left = left.without_logs(damaged)
                continue
            if mine is not None and self._world.rank not in plan.keep:
                mine.live = None  # it is about to be written over
            with self._repair.of(self._torn(plan, held, left)):
                saved, bad = self._follow(plan, left)
            if not bad:
                if mine is not None:  # should another worker be lost before training goes on
                    mine.live = Live(_position(saved), saved)
                return Loaded(plan, _position(saved), _record(saved), held)
            for problem in bad.values():
                self._note(problem)
            held, left = [one for one in held if one.key not in bad], left.only(plan.keep)
        if oldest is None and (found or self._damage):
            self._refuse(held)
        if self._damage:
            self._forget_moments()
        return None

    def _refuse(self, held: list[Held]) -> NoReturn:
        nothing, only = reason(Inventory(held), self._policy.operators), self._config.checkpoint.ckpt_step
        if only is not None:
            path, there = self._storage.place.path(directory_of(only)), any(one.iteration == only for one in held)
            nothing = f"{path} {'neither holds all of the model nor ends a window' if there else 'is not there'}"
        raise CheckpointError(
            f"no snapshot is whole ({self._damage or nothing}): restore one, or start anew in another directory with "
            "--ckpt-dir"
        )

    def _plans(self, held: list[Held], left: Survivors) -> Iterator[Plan]:
        only = None if left.again else self._config.checkpoint.ckpt_step
        return plans(
            Inventory(held, left.live, left.pieces, left.logs), self._policy.operators, self._policy.exact, only
        )

    def _damaged_logs(self, plan: Plan) -> dict[int, list[int]]:
        """By rank, iterations of which its log is there, but could not be served."""
        damaged = []
        if self._stage not in plan.stages:
            damaged = self._repetition.stepper.boundaries.damaged(plan.again, plan.stages)
        told = {rank: iterations for rank, iterations in enumerate(gather(damaged)) if iterations}
        if told:
            self._log.message(f"WARNING: upstream logs of workers {', '.join(map(str, told))} are damaged")
        return told

    def _torn(self, plan: Plan, held: list[Held], left: Survivors) -> dict[int, Mapping[str, Detail]]:
        """What was to be saved by the snapshots that are not whole, and come by when stages compute again alone."""
        tier = STORAGE if self._memory is None else MEMORY
        return {
            iteration: begun.operators
            for iteration, begun in left.begun.items()
            if plan.stages
            and plan.way.iteration < iteration < plan.iteration
            and not any(one.has(iteration, tier, begun.operators) for one in held)
        }

    def _follow(self, plan: Plan, left: Survivors) -> tuple[Mapping | None, dict[Key, str]]:
        """What of the state is not a tensor, once all is there; or by checkpoint what is wrong with it."""
        begun, amount, manifests = time.perf_counter(), 0, {}
        if plan.way is not None:
            manifests, bad = self._load(plan)
            if bad:
                return None, bad
            amount = sum(manifest.bytes for manifest in manifests.values())
        if plan.way is None or plan.stages:
            amount += sum(gather(exchange(plan.copies, self._state, self._world.rank)))
            saved = self._join(plan, left)
        else:
            self._restore_from(plan.way, manifests)
            saved = manifests[plan.way.base.key].state
        self._report(plan, amount, begun)
        return saved, {}

    def _join(self, plan: Plan, left: Survivors) -> Mapping:
        """Brings all workers to where those are who keep their state; what of it is not a tensor."""
        saved = left.states[plan.iteration]
        if self._world.rank in plan.complete:
            self._repetition.complete(_record(saved))
        self._restore(saved, left.steps[plan.iteration], saved["policy"], "the workers that are left")
        if self._tokens is not None:
            self._tokens.goes_on(saved["ledger"])
        return saved

    def _load(self, plan: Plan) -> tuple[dict[Key, Manifest], dict[Key, str]]:
        """Loads what a plan has loaded, and computes again what it has computed again."""
        if len(plan.way.moments) > 1:
            check_freezing(self._state)
        fragments = {} if self._keeps(plan) else self._reader.fragments(plan.way)
        manifests, problem = self._reader.manifests(plan.way, fragments)
        bad = self._agree(problem)
        if not bad:
            self._reader.check(plan.way.base, manifests[plan.way.base.key], window=len(plan.way.moments) > 1)
            self._log.message(f"loading snapshot {self._reader.where(plan.way.base)}")
            bad = self._fill(plan, manifests, fragments)
        return manifests, bad

    def _keeps(self, plan: Plan) -> bool:
        return self._world.rank in plan.keep | plan.complete

    def _forget_moments(self) -> None:
        """What a damaged snapshot may have filled: a dense checkpoint without optimizer would leave it so."""
        for fragment in self._state.fragments(self._state.operators(), Detail.MOMENTS):
            fragment.view.zero_()

    def _check_newest(self, held: list[Held]) -> None:
        """Another model is refused by name, before anybody wonders what of it is missing."""
        newest = max((one for one in held if one.tier != MEMORY), key=lambda one: one.iteration, default=None)
        if newest is not None:
            self._reader.check(newest, self._reader.store(newest).manifest(newest.iteration))

    def _agree(self, problem: Problem | None) -> dict[Key, str]:
        """By checkpoint what is wrong with it, for all that any worker has found."""
        return {tuple(key): text for key, text in filter(None, gather(problem))}

    def _note(self, problem: str) -> None:
        self._damage = self._damage or problem
        self._log.message(f"WARNING: {problem}; an older snapshot is tried")

    def _fill(self, plan: Plan, manifests: dict[Key, Manifest], fragments: dict[Key, list[Fragment]]) -> dict[Key, str]:
        """Fills this worker's state; by checkpoint what is wrong with it, as all workers know."""
        bad: dict[Key, str] = {}
        known = self._known(range(plan.way.iteration + 1, plan.iteration + 1))

        def load(moment: Moment) -> bool:
            bad.update(self._agree(self._reader.fill(moment, manifests, fragments)))
            if not bad:
                give_to_other_stages(self._state, self._reader.loaded_at(moment), takes=not self._keeps(plan))
            return not bad

        with self._repetition.by(plan.stages) as replay:
            again = partial(self._compute_again, way=plan.way, manifests=manifests, replay=replay)
            if convert(plan.way.moments, load, self._state, again, learns=replay.takes_part):
                self._catch_up(plan, manifests, known, replay)
                self._tell(replay, plan)
                for failure in filter(None, gather(self._repair.failure)):
                    self._log.message(
                        f"WARNING: a snapshot cannot be saved again, so its window is given up: {failure}"
                    )
        return bad

    def _known(self, iterations: Sequence[int]) -> list[StepRecord]:
        """Records of iterations, from whoever knows them; a collective call."""
        mine = set(self._records.iterations())
        told = gather(self._records.of(iteration for iteration in iterations if iteration in mine))
        for record in (record for records in told for record in records):
            self._records.add(record)
        return self._records.of(iterations)

    def _catch_up(
        self, plan: Plan, manifests: dict[Key, Manifest], records: Sequence[StepRecord], replay: Replay
    ) -> None:
        """From a window's end to where the others have stayed."""
        if not replay.takes_part:
            for record in records:
                replay.serve(record.iteration)
            return
        base = manifests[plan.way.base.key]
        if records:
            self._restore_moment(base.state, _steps(base), plan.way.moments[-1].full, self._reader.where(plan.way.base))
        position = _position(base.state)
        for record in records:
            replay.compute(position, record)
            position = position.after(record)
            self._repair.comes_by(position.iteration)

    def _compute_again(self, moment: Moment, way: Recovery, manifests: dict[Key, Manifest], replay: Replay) -> None:
        """The iteration after a moment of a window, once the state is that of the moment."""
        if not replay.takes_part:
            replay.serve(moment.iteration + 1)
            return
        here, after = (manifests[way.at(moment.iteration + i).key] for i in (0, 1))
        self._restore_moment(here.state, _steps(here), moment.full, self._reader.where(way.at(moment.iteration)))
        record = record_of(after.state, self._reader.where(way.at(moment.iteration + 1)))
        replay.compute(_position(here.state), record, len(moment.frozen))

    def _tell(self, replay: Replay, plan: Plan) -> None:
        for one in replay.repeated():
            self._log.events.write(
                "replay",
                iteration=one.iteration,
                seconds=one.seconds,
                frozen=one.frozen,
                workers=one.workers,
                stages=sorted(plan.stages),
                loss=one.loss,
                exact=one.exact,
            )
            if one.exact is False:
                self._log.message(
                    f"WARNING: iteration {one.iteration}, computed again, has {one.is_not}. Layout, data or flags are "
                    "others than it was saved with: the run that goes on is not bit-identical to the one that was"
                )

    def _restore_from(self, way: Recovery, manifests: dict[Key, Manifest]) -> None:
        base = manifests[way.base.key]
        self._restore(base.state, _steps(base), base.policy, self._reader.where(way.base))
        if self._memory is not None and way.base.tier != MEMORY:
            self._policy.memory_lost()
        if self._tokens is not None:
            self._count_lost_tokens(way, manifests)

    def _restore(self, saved: Mapping, steps: Mapping[str, int], policy: str, where: str) -> None:
        """All but the tensors."""
        self._restore_moment(saved, steps, [operator.name for operator in self._policy.operators], where)
        contents.warn_of_other_samples(self._config, self._world, saved["sample_order"], self._log.message)
        if policy == self._policy.name:  # another one has measured and remembers other things
            if saved.get("interval"):
                self._policy.interval.load_state_dict(saved["interval"])
            if saved.get("policy_state"):
                self._policy.load_state_dict(saved["policy_state"])

    def _restore_moment(self, saved: Mapping, steps: Mapping[str, int], operators: Iterable[str], where: str) -> None:
        """What is not a tensor and belongs to some operators, after they were loaded."""
        self._state.gather_weights()
        # stale experts count the run's updates, not their own, as the published systems have it
        latest = max(steps.values(), default=None)
        if latest is not None:
            self._state.set_steps({name: steps.get(name, latest) for name in operators})
        contents.restore_grad_scaler(self._optimizer, saved["grad_scaler"])
        contents.restore_scheduler(self._scheduler, saved["scheduler"], where)

    def _count_lost_tokens(self, way: Recovery, manifests: dict[Key, Manifest]) -> None:
        mine = {key: manifest.state["ledger"] for key, manifest in manifests.items() if manifest.state.get("ledger")}
        has = gather(sorted(mine))  # in the memory of another node there may be ledgers that this one cannot read
        first = {tuple(key): rank for rank, keys in reversed(list(enumerate(has))) for key in keys}
        told = gather({key: ledger for key, ledger in mine.items() if first[key] == self._world.rank})
        states = {key: ledger for ledgers in told for key, ledger in ledgers.items()}
        raised = self._tokens.recovered(way, states)
        self._policy.recovered(raised)
        by_layer = {str(layer): plt for layer, plt in self._tokens.plt_by_layer.items()}
        self._log.events.write(
            "lost", iteration=way.iteration, plt=self._tokens.plt, raised_by=raised, by_layer=by_layer
        )
        self._log.message(
            f"experts have lost {self._tokens.plt:.3%} of their tokens so far, {raised:.3%} by this recovery"
        )

    def _report(self, plan: Plan, amount: int, begun: float) -> None:
        seconds, tier = time.perf_counter() - begun, plan.way.base.tier if plan.way else LIVE
        self._log.events.write(
            "resume",
            iteration=plan.iteration,
            tier=tier,
            bytes=amount,
            seconds=seconds,
            sources=[list(one.key) for one in plan.way.used()] if plan.way else [],
            kept=len(plan.keep) + len(plan.complete),
            stages=sorted(plan.stages),
        )
        kept = f"{len(plan.keep)} workers keep their state of iteration {plan.iteration}; " if plan.keep else ""
        source = f"from {tier}" if plan.way else "from one another"
        if plan.stages:
            stages, first, last = ", ".join(map(str, sorted(plan.stages))), plan.again[0], plan.again[-1]
            kept += f"stages {stages} alone computed iterations {first} to {last} again; "
        self._log.message(f"{kept}loaded {amount / 1e9:.3g} GB {source} in {seconds:.2f} s")


def _position(saved: Mapping) -> Position:
    return Position(**{name: saved[name] for name in asdict(Position())})


def _record(saved: Mapping) -> StepRecord | None:
    return StepRecord(**saved["record"]) if saved.get("record") else None


def _steps(manifest: Manifest) -> dict[str, int]:
    return {name: entry.step for name, entry in manifest.operators.items() if entry.step is not None}
