"""Provides the fault tolerance of a training loop on one worker.

    session = Session(engine, settings, log, remains)
    position = session.resume()                        # from survivors, memory, storage, or nothing
    while position.iteration < iterations:
        ...                                            # forward, backward, reduce
        totals = sum_over_workers(mine | session.contribution(), engine.world)
        session.on_totals(totals)                          # waits for copies of the state that the update changes
        ...                                            # update
        position = session.completed(record, begun)    # the commit: a later loss of a worker undoes nothing
        session.take()                                 # starts a snapshot if the policy plans one
    session.flush()
    session.close()

When another worker is lost, ``session.interrupt()`` keeps this worker's state in ``remains``.  The session of the next
generation resumes from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moc.policy import AUTO, Capability, Load, Policy, parse_interval, policy_named
from moc.policy.errors import policy_refusal
from moc.recovery.gradient_folding import RULES
from moc.runtime.collectives import gather
from moc.runtime.progress import PROGRESS
from moc.session.components import Components, SizesByPlan, build, close, may_replay, stage_replicas_of
from moc.session.elsewhere import NOWHERE, Chooser, Elsewhere
from moc.session.engine import CommitParticipant, Engine, Listener
from moc.session.peers import copies_of
from moc.session.resume.point import NoRecoveryPoint
from moc.session.resume.replay import check_freezing
from moc.session.resume.resuming import BEGUN_AT, resume
from moc.session.resume.survivors import LiveState, LocalRemains
from moc.session.saving.pipeline import Describer, SavingPipeline, storage_health
from moc.session.settings import Settings, SettingsError
from moc.session.tiers import make_claim, memory_of, nodes_of, take_ownership, tiers_of
from moc.state.operators import Operator
from moc.state.record import Position, StepRecord
from moc.store.errors import CheckpointError
from moc.store.host_memory import give_back_unused
from moc.store.storage import renew_lease

_ENDING_S = 10.0
"""Seconds that a pending storage write may take after a loss, if no memory tier holds the snapshot to resume from."""


class Session(CommitParticipant):
    """Fault tolerance of one generation: resumes, takes snapshots and commits them.

    A training loop calls :meth:`resume` once, and in each iteration :meth:`contribution` and :meth:`on_totals` (before
    and after the commit all-reduce), :meth:`completed` (after the update) and :meth:`take`.  It ends with
    :meth:`flush`, or after the loss of another worker with :meth:`interrupt`.  Every worker calls every method except
    :meth:`close` and :meth:`interrupt`.

    Args:
        engine: this worker's part of the model.
        settings: policy, schedule and tiers of snapshots; identical on all workers.
        log: receives events and messages.
        remains: state kept from the previous generation; kept up to date.
        elsewhere: other checkpoints to start from if there is no snapshot.
        chooser: chooses policy and settings, instead of ``settings``.

    Attributes:
        position: iterations and samples completed.
        record: step record of the last completed iteration, if known.
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
        self._running: tuple[Components, SavingPipeline] | None = None  # None without a policy, and before resume()
        self._memory: Path | None = None  # this node's memory, if the job uses and owns it
        self._is_consistent = True  # False while the update changes the state

    def resume(self) -> Position:
        """Brings all workers to the newest recoverable state, and returns its position; a collective call.

        Raises:
            CheckpointError: on all workers: no complete snapshot was found, the model differs, another job uses the
                directory, or memory for snapshots is insufficient.
            NoRecoveryPoint: there is no snapshot, and the model has been trained since it was built.
            SettingsError: the settings do not fit the model or the job.
        """
        if self._settings.policy is not None or self._chooser is not None:
            try:
                with contextlib.ExitStack() as undo:  # if a worker is lost meanwhile, all workers resume again
                    self._resume(undo)
                    undo.pop_all()
            except (CheckpointError, SettingsError):  # on all workers: the job ends
                self.remains.buffers.trim(0)
                if self._memory is not None:
                    give_back_unused(self._memory)
                raise
        elif self.remains.trained:
            raise NoRecoveryPoint
        else:
            self.position = self._elsewhere.load() or Position()
            self._elsewhere.check(self.position.iteration, "")
        PROGRESS.completed(self.position.iteration)
        self.remains.trained = True
        self.remains.progress.move_to(None)
        return self.position

    def _resume(self, undo: contextlib.ExitStack) -> None:
        engine, settings, chooser, log = self._engine, self._settings, self._chooser, self._log
        local = self.remains if self.remains.trained else None
        nodes = nodes_of(settings.node_of_rank, engine.world)
        if settings.tier == "peers":
            copies_of(settings, nodes)  # before anything is created, so that a refusal leaves no files
        policy = make_policy(settings, engine) if chooser is None else None
        claim = make_claim(settings, engine.world, self.remains.run, log)
        self.remains.run = claim.run
        tiers = tiers_of(settings, engine.world, nodes, claim)
        in_background = take_ownership(settings, tiers, engine.world, local is not None, log)
        if tiers.memory is not None or settings.upstream_logging:
            self._memory = memory_of(settings, engine.world, nodes, claim).root
        if chooser is not None:
            settings = chooser.in_force(engine, tiers, local)
            tiers = dataclasses.replace(tiers_of(settings, engine.world, nodes, claim), storage=tiers.storage)
        policy = make_policy(settings, engine) if policy is None else policy
        for remark in policy.report.remarks() if local is None else ():
            log.message(remark)
        buffers = self.remains.buffers
        track_tokens = Capability.TOKEN_COUNTS in policy.requires or chooser is not None and chooser.counts_tokens
        is_restart, known_digests = local is not None, self.remains.digests
        components = build(
            engine,
            settings,
            policy,
            tiers,
            log,
            track_tokens=track_tokens,
            is_restart=is_restart,
            buffers=buffers,
            known_digests=known_digests,
        )
        undo.callback(close, components, _patience_s(components))
        start = resume(
            engine,
            components,
            self.remains,
            self._elsewhere,
            log,
            settings.step,
            tidies=not in_background,
            deterministic=settings.deterministic,
        )
        health = storage_health(
            settings, components, start, log, in_background=in_background or not start.has_listed_storage
        )
        sizes = SizesByPlan(components)
        try:
            policy.on_sizes(sizes)
        except ValueError as error:  # on all workers
            refused = policy_refusal(policy.name, error)
            raise SettingsError(str(refused), code=refused.code) from None
        if chooser is not None:
            chooser.on_sizes(sizes, engine, lambda: may_replay(engine, components, settings.tier))
        elif local is None:
            components.report.expected(policy, settings)
        self.position, self.record = start.position, start.record
        if components.tokens is not None:
            components.report.boost(start.position.iteration, components.tokens.debt)
        saving = SavingPipeline(components, settings, health, start, self._describer(components))
        undo.callback(saving.close)
        saving.reserve(is_first=not any(gather(local is not None or engine.world.job.is_restart)))
        saving.restart_snapshot()
        self._running = components, saving
        components.digests.remember_scalars(self.position)

    @property
    def policy(self) -> Policy | None:
        """Policy in force; None without snapshots."""
        return None if self._running is None else self._running[0].policy

    def contribution(self) -> dict[str, Any]:
        """Returns the progress of this worker's snapshots; see :class:`CommitParticipant`."""
        if self._running is None:
            return {}
        components, saving = self._running
        contribution = saving.contribution()
        return contribution if components.tokens is None else components.tokens.contribution() | contribution

    def on_totals(self, totals: dict[str, float]) -> None:
        """Commits snapshots that all workers have copied, and waits for copies of the state that the update changes.

        Raises:
            CheckpointError: on all workers: a snapshot could not be saved.
        """
        if self._running is not None:
            components, saving = self._running
            saving.receive(totals)
            if components.tokens is not None:
                components.tokens.on_totals(totals)
            saving.wait_for_copies()
        self._is_consistent = False

    def completed(self, record: StepRecord, begun: float) -> Position:
        """Commits an iteration after its update, and returns the new position: no later loss undoes the iteration.

        Args:
            record: step record of the completed iteration.
            begun: start of the iteration in seconds, by ``time.perf_counter``.
        """
        self.position, self.record, self._is_consistent = self.position.after(record), record, True
        self.remains.records.add(record)
        PROGRESS.completed(self.position.iteration)
        if self._running is None:
            return self.position
        components, _ = self._running
        components.digests.completed(self.position.iteration)
        if components.tiers.memory is not None and components.tiers.leads_node:
            renew_lease(Path(components.tiers.memory.storage.name))
        if (measured := components.meter.completed(begun)) is not None:
            components.policy.interval.observe(measured)
            if self._chooser is not None:
                self._chooser.observe(measured)
            components.report.chosen(self.position.iteration, components.policy)
        if components.tokens is not None:
            components.tokens.completed(skipped=record.skipped)
            components.report.boost(self.position.iteration, components.tokens.debt)
            if Capability.GATING_PROBABILITIES in components.policy.requires and not record.skipped:
                components.policy.on_routing(components.tokens.probabilities)
        return self.position

    def take(self) -> None:
        """Starts a snapshot of the completed iteration if the policy plans one; weights must be gathered.

        Raises:
            CheckpointError: on all workers: a snapshot could not be saved.
        """
        if self._running is not None:
            components, saving = self._running
            components.digests.remember_scalars(self.position)
            saving.begin_if_planned(self.position, self.record)

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Returns a context for moves of state between workers, between two iterations; a collective call.

        It first completes the copies of snapshots in progress.  Later snapshots contain the moved state.

        Raises:
            CheckpointError: on all workers: the move has changed the state.
        """
        if self._running is None:
            yield
            return
        components, saving = self._running
        saving.wait_for_copies()
        with components.digests.moving(self.position.iteration):
            yield
            components.contents.renew(stage_replicas_of(self._engine, components.policy))
        components.digests.remember_scalars(self.position)  # which include the placement of experts

    def finish(self) -> None:
        """Waits until every snapshot is committed in each of its tiers."""
        if self._running is not None:
            self._running[1].finish()

    def flush(self) -> None:
        """Ends the run in good order: saves its state to storage, and releases the node's memory.

        Raises:
            CheckpointError: on all workers: the state could not be saved, even after retries.
        """
        if self._running is not None:
            self._running[1].flush()

    def interrupt(self) -> None:
        """Ends this generation after the loss of another worker, and keeps this worker's state for the next one."""
        if self._running is not None:
            components, saving = self._running
            state = self._describer(components)(self.position, self.record) if self._is_consistent else None
            components.digests.keep(self.position.iteration)
            self.remains.live = None if state is None else LiveState(self.position, state)
            self.remains.begun, self.remains.workers = saving.started_snapshots, self._engine.world.size
            self.remains.stored = saving.storage.available
        self._end()

    def close(self) -> None:
        """Abandons uncommitted snapshots, like a killed worker; communicates with no other worker.

        With a memory tier, nothing waits for storage, because the run does not resume from it.
        """
        self._end()
        self.remains.buffers.trim(0)

    def _end(self) -> None:
        if self._running is not None:
            components, saving = self._running
            saving.close()
            close(components, _patience_s(components))
        self._running = None

    @property
    def run(self) -> str | None:
        """Id of the run that the snapshots belong to; None before :meth:`resume` and without a policy."""
        return None if self._running is None else self._running[0].tiers.storage.storage.run

    @property
    def gauges(self) -> Mapping[str, float]:
        """Values to report with every iteration."""
        if self._running is None:
            return {}
        components, saving = self._running
        token_gauges = {} if components.tokens is None else components.tokens.gauges
        return token_gauges | components.policy.report.gauges() | dict(self._engine.tap.gauges) | saving.gauges

    @property
    def load(self) -> Load | None:
        """Tokens given to each expert since training began, by layer; None if they are not counted."""
        tokens = None if self._running is None else self._running[0].tokens
        return None if tokens is None else tokens.load

    @property
    def memory_is_free(self) -> bool:
        """Whether a memory tier exists and holds nothing that storage lacks; identical on all workers."""
        return self._running is not None and self._running[1].storage.memory_is_free

    @property
    def storage_fails(self) -> bool:
        """Whether the last snapshot meant for storage failed to get there; identical on all workers."""
        return self._running is not None and bool(self._running[1].storage.problem)

    def _describer(self, components: Components) -> Describer:
        """Returns a function for the non-tensor state at a position."""
        policy, tokens, chooser = components.policy, components.tokens, self._chooser
        return lambda position, record: {
            **self._engine.scalars(position),
            "record": None if record is None else dataclasses.asdict(record),
            "policy": policy.name,
            BEGUN_AT: self._settings.step,
            "interval": policy.interval.state_dict(),
            "policy_state": policy.state_dict(),
            "ledger": tokens.state_dict() if tokens is not None else None,
            "auto": chooser.state_dict() if chooser is not None else None,
            **({RULES: self._engine.rules().to_plain()} if Capability.BACKGROUND_UPDATES in policy.requires else {}),
        }


def _patience_s(components: Components) -> float:
    """Returns the seconds allowed for a pending storage write; 0 if the run resumes from memory or from live state."""
    needs_storage = components.tiers.memory is None and not components.world.job.may_change_members
    return _ENDING_S if needs_storage else 0.0


def policy_of(settings: Settings, operators: Sequence[Operator]) -> Policy:
    """Returns the policy that the settings name.

    Raises:
        SettingsError: there is no such policy, or it does not fit these operators.
    """
    name = settings.policy
    assert name is not None  # otherwise there are no snapshots
    if name == AUTO:
        raise SettingsError(
            f"--ckpt-policy {AUTO} needs a chooser. Fix: give Session one, or name a policy, such as full",
            code="chooser-missing",
        )
    try:
        interval = parse_interval(str(settings.snapshot_interval), settings.overhead_budget)
        return policy_named(name)(operators, interval, **settings.options)
    except ValueError as error:
        refused = policy_refusal(name, error)
        raise SettingsError(str(refused), code=refused.code) from None
    except TypeError as error:
        raise SettingsError(
            f"--ckpt-policy {name} lacks an option ({error}). Fix: remove it from Settings.options",
            code="policy-option-unknown",
        ) from None


def make_policy(settings: Settings, engine: Engine) -> Policy:
    """Builds the policy that the settings name; a collective call.

    Raises:
        CheckpointError: on all workers: the policy replays iterations, and the model's operators cannot be frozen.
        SettingsError: there is no such policy, it does not fit this model, or the engine lacks a required method.
    """
    policy = policy_of(settings, engine.operators)
    if Capability.REPLAY in policy.requires:
        check_freezing(engine.state)
    needs = {
        "router_tally": Capability.TOKEN_COUNTS in policy.requires,
        "replay": Capability.REPLAY in policy.requires,
        "rules": Capability.BACKGROUND_UPDATES in policy.requires,
    }
    for method, needed in needs.items():
        if needed and getattr(type(engine), method, None) in (None, getattr(Engine, method)):  # or the protocol's
            raise SettingsError(
                f"--ckpt-policy {policy.name} needs {method}, which the engine lacks. Fix: add it to "
                f"{type(engine).__name__}, or choose a policy that does without, such as full",
                code="engine-incomplete",
            )
    return policy
