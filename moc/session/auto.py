"""Implements ``--ckpt-policy auto``: chooses the policy in force, and replaces it when another one becomes better.

    measure    a run starts with full snapshots, to measure bandwidths
    choose     the planner (:mod:`moc.simulate.planner`) compares the costs of policies (:mod:`moc.simulate.live_costs`)
    switch     between two iterations: all state is saved to storage, as at the end of a run, and the workers restart
               with the chosen flags, as survivors do after the loss of a worker
    watch      a choice holds until one of its input figures has changed by a factor of :data:`DRIFT`

Measurements are part of the commit all-reduces, so all workers make the same choice without further communication.
Measurements and choice are stored with every snapshot, and a resumed run restores both.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from moc.background import Harmless, within
from moc.files import decode
from moc.files.decode import Count, Positive
from moc.policy import POLICIES, ObservedIteration, full_policy_name
from moc.policy.errors import rounded_up
from moc.policy.interface import Load, SnapshotSizer
from moc.policy.interval import BLOCK, BLOCKS, Measurements
from moc.policy.partial import experts_by_layer
from moc.policy.pec_selection import candidate_expert_counts, sequential_experts
from moc.policy.windows import operators_by_stage
from moc.recovery.copy_placement import DEFAULT_REPLICAS
from moc.runtime.collectives import gather
from moc.session.engine import Engine, Listener
from moc.session.resume.survivors import LocalRemains
from moc.session.settings import Settings, SettingsError
from moc.session.tiers import LOOKING_S, Tiers
from moc.simulate.elastic import Lasting
from moc.simulate.live_costs import NAMES, Running, SavedBytes, flags_of_candidate, host_bytes, options_of
from moc.simulate.planner import Candidate, PlanLimits, PolicyChoice, best_of, every_candidate, keeps_to, priced
from moc.state.operators import Detail, Operator
from moc.store.errors import CheckpointError
from moc.store.store import Store

DRIFT = 2.0
"""Factor of change, up or down, of an input figure that triggers a new choice."""

HOLDS = BLOCK * BLOCKS
"""Minimum number of iterations between two choices: by then all earlier measurements are forgotten."""

WORTH = 0.005
"""Minimum ETTR gain of a better policy, because a switch costs time too."""

_MEASURED = ("iteration_s", "forward_backward_s", "copy_rate", "write_rate")


class PolicySwitched(Exception):
    """Signal on all workers that another policy is in force; they start again with it."""


@dataclass(frozen=True)
class AutoLimits:
    """Limits of a choice, and the job that it applies to.

    Attributes:
        tier: where snapshots are durable.
        replicas: other nodes that keep copies; None to choose.
        exact_only: a recovered run must be bit-identical.
        host_memory_gb: maximum memory of a node for snapshots and logs; None for no limit.
        plt: by policy, the maximum expected proportion of lost tokens.
        mtbf_hours: mean hours between failures; None to use the measured one.
        parallel: tensor-, pipeline- and expert-parallel sizes.
        has_experts: the model has experts, whose tokens are counted from the start.
        gradients: snapshots may contain gradients instead of state.
        lasting: loss model of an elastic job, whose workers continue when nodes leave or join; otherwise None.
        only: the only policy to choose from, which also measures; None for all.
        interval: iterations between snapshots, of policies without windows; None to choose.
    """

    tier: str
    replicas: int | None
    exact_only: bool
    host_memory_gb: float | None
    plt: Mapping[str, float]
    mtbf_hours: float | None
    parallel: tuple[int, int, int]
    has_experts: bool
    gradients: bool = False
    lasting: Lasting | None = None
    only: str | None = None
    interval: int | None = None


@dataclass(frozen=True)
class AutoState:
    """State of :class:`AutoPolicy` in a snapshot, with the keys of :meth:`AutoPolicy.state_dict`."""

    measured: dict[str, Any]
    flags: dict[str, bool | int | float | str | None]
    basis: dict[str, Positive]
    looked: Count
    machine: list[int]
    limits: list[Any]
    orderly: bool

    @classmethod
    def read(cls, state: Any) -> AutoState:
        """Decodes a state; raises ValueError if it is invalid."""
        stored = decode.convert_state(state, cls, "--ckpt-policy auto")
        Measurements.from_state(stored.measured)
        return stored


class Choices(Protocol):
    """The flags that ``auto`` may choose."""

    def check(self, flags: Mapping[str, object]) -> None:
        """Refuses flags that contradict the user's other flags.

        Raises:
            ValueError: the flags contradict each other.
        """

    def settings(self, flags: Mapping[str, object], engine: Engine) -> Settings:
        """Returns the settings with the chosen flags in force."""
        ...


class AutoPolicy:
    """Measurement of costs and choice of the policy; every worker calls every method."""

    def __init__(self, limits: AutoLimits, choices: Choices, log: Listener):
        self._job_limits, self._choices, self._log = limits, choices, log
        self._forget()
        self._orderly = False
        self._ranks: list[int] = []
        self._harmless = Harmless(log.message, "the choice of a policy", "the policy in force stays")
        self._fails = False

    def in_force(self, engine: Engine, tiers: Tiers, local: LocalRemains | None) -> Settings:
        """Restores measurements and choice from live workers or the newest snapshot; a collective call.

        Returns:
            The chosen settings; before the first choice, the settings for measuring.
        """
        return self._choices.settings(self._chosen(tiers, local, is_first=engine.world.rank == 0), engine)

    def _chosen(self, tiers: Tiers, local: LocalRemains | None, is_first: bool) -> Mapping[str, object]:
        self._ranks = sorted(Counter(tiers.nodes).values(), reverse=True)
        live_states = gather((_live(local), 0 if local is None else local.workers))
        has_more_workers = any(0 < workers < len(live_states) for _, workers in live_states)
        states = [entry for entry, _ in live_states if entry is not None]
        states = states or [*filter(None, gather(_newest(tiers, is_first)))]
        self._restore(max(states, key=lambda entry: entry[0])[1] if states else None, has_more_workers)
        if self._flags:
            with contextlib.suppress(ValueError):
                self._choices.check(self._flags)
                return self._flags
        self._flags = {}
        return self._measuring()

    def on_sizes(self, busiest: SnapshotSizer, engine: Engine, may_replay: Callable[[], bool]) -> None:
        """Receives functions for sizes (:meth:`moc.session.elsewhere.Chooser.on_sizes`); most are called on first use.

        Raises:
            SettingsError: every choice needs more memory for snapshots than ``--host-memory-gb``.
        """
        operators, stages = engine.operators, tuple(engine.stages)
        ep = self._job_limits.parallel[2]
        full_state = dict.fromkeys((operator.name for operator in operators), Detail.FULL)

        def saved() -> SavedBytes:
            by_k = bytes_by_expert_count(busiest, operators, ep)
            by_stage = operators_by_stage(busiest, operators, ep, stages)
            gradient = None
            if self._job_limits.gradients:  # gradients are fp32, like master weights
                masters, states = (
                    busiest({operator.name: detail for operator in operators if operator.expert_id is not None})
                    for detail in (Detail.MASTER, Detail.FULL)
                )
                gradient = masters / states
            return SavedBytes(busiest(full_state), by_k, by_stage, gradient)

        self._saved, self._may_replay = cache(saved), cache(may_replay)
        if (limit := self._job_limits.host_memory_gb) is not None:
            least = host_bytes(self._tier, self._ranks[0], busiest(full_state), min(self._replicas))
            if least > 1e9 * limit:
                raise SettingsError(
                    f"--host-memory-gb {limit} is not enough: with --ckpt-tier {self._job_limits.tier}, snapshots take "
                    f"{rounded_up(least)} GB of a node's memory. Fix: allow that, or choose another tier or more nodes",
                    code="host-memory-too-small",
                )

    def observe(self, measured: ObservedIteration) -> None:
        """Records the measurements of one iteration."""
        with self._harmless():
            self._measured.observe(measured)

    def switches_policy(self, iteration: int, load: Load | None = None) -> bool:
        """Returns whether another policy is in force from this iteration on; reports the reason.

        It is called between two iterations.  ``load`` is as in :meth:`moc.policy.Policy.plan`.  After a failed
        choice, no other one is made.  All workers choose by the same figures, so a choice fails on all of them.
        """
        if not self._fails:
            self._fails = True
            with self._harmless():
                switched = self._choose_again(iteration, load)
                self._fails = False
                return switched
        return False

    def _choose_again(self, iteration: int, load: Load | None) -> bool:
        figures = self._measured.medians
        names = (*_MEASURED, "replicate_rate") if max(self._replicas) else _MEASURED
        if not figures.keys() >= set(names) or self._flags and iteration < self._chosen_at + HOLDS:
            return False
        figures = {name: figures[name] for name in names} | {"mtbf_s": self._mtbf_s}
        cause = changed(self._basis, figures) if self._flags else "it has measured"
        if cause is None:
            return False
        self._basis, self._chosen_at = figures, iteration
        return self._choose(iteration, self._running(figures, load), cause)

    def mark_orderly_end(self) -> None:
        """Records that the run ends in good order once its state is saved: a resume from it counts as no failure."""
        self._orderly = True

    def cancel_end(self) -> None:
        """Records that the state could not be saved, so the run does not end."""
        self._orderly = False

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to store with snapshots, as JSON-compatible values."""
        return {
            "measured": self._measured.state_dict(),
            "flags": dict(self._flags),
            "basis": dict(self._basis),
            "looked": self._chosen_at,
            "machine": self._machine,
            "limits": self._limit_values,
            "orderly": self._orderly,
        }

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens are counted under every policy, so that the ledger continues across switches."""
        return self._job_limits.has_experts

    def _forget(self) -> None:
        self._measured, self._flags, self._basis, self._chosen_at = Measurements(), {}, {}, 0

    def _restore(self, state: Mapping[str, Any] | None, has_more_workers: bool) -> None:
        """Restores a state; if there are more workers than before, nodes have joined, which is no failure."""
        self._forget()
        if state is not None:
            stored = AutoState.read(state)
            self._measured = Measurements.from_state(stored.measured)
            self._measured.faults += not (stored.orderly or has_more_workers)
            if stored.machine != self._machine:
                self._measured = Measurements(self._measured.trained_s, self._measured.faults)
            elif stored.limits == self._limit_values:
                self._flags, self._basis, self._chosen_at = stored.flags, stored.basis, stored.looked
        self._orderly = False

    @property
    def _machine(self) -> list:
        """Parallel layout and workers per node; a change invalidates all measurements except failures.

        In an elastic job, one choice applies to all numbers of nodes.
        """
        return [*self._job_limits.parallel, *(self._ranks if self._job_limits.lasting is None else self._ranks[:1])]

    @property
    def _limit_values(self) -> list:
        """Limits as a list; a choice made under other limits is void."""
        job_limits = self._job_limits
        limits = [
            job_limits.tier,
            job_limits.replicas,
            job_limits.exact_only,
            job_limits.host_memory_gb,
            dict(job_limits.plt),
        ]
        return [
            *limits,
            job_limits.mtbf_hours,
            job_limits.gradients,
            *((job_limits.only, job_limits.interval) if job_limits.only else ()),
        ]

    @property
    def _replicas(self) -> tuple[int, ...]:
        """Permitted numbers of replica nodes."""
        if self._job_limits.tier != "peers" or len(self._ranks) == 1:
            return (0,)
        if self._job_limits.replicas is not None:
            return (self._job_limits.replicas,)
        return tuple(range(1, min(DEFAULT_REPLICAS, len(self._ranks) - 1) + 1))

    @property
    def _tier(self) -> str:
        tier = self._job_limits.tier
        return "memory" if tier == "peers" and not max(self._replicas) else tier

    @property
    def _mtbf_s(self) -> float:
        hours = self._job_limits.mtbf_hours
        return self._measured.mtbf_s if hours is None else 3600.0 * hours

    def _measuring(self) -> dict[str, object]:
        """Returns flags that measure bandwidths with little memory."""
        kind = POLICIES[self._job_limits.only or full_policy_name()]
        flags: dict[str, object] = {flag.name: flag.default for flag in kind.flags.specs if flag.chosen_by_auto}
        flags["ckpt_policy"] = kind.name
        if self._job_limits.tier != "disk":
            flags["persist_interval"] = 1
        return flags | ({"replicas": min(self._replicas)} if max(self._replicas) else {})

    def _running(self, figures: Mapping[str, float], load: Load | None) -> Running:
        measured = {name: figures[name] for name in figures if name != "mtbf_s"}
        return Running(self._tier, len(self._ranks), self._ranks[0], self._saved(), **measured, loads=load)

    def _limits(self, load: Load | None) -> PlanLimits:
        job_limits, lasting = self._job_limits, self._job_limits.lasting
        rarer = 1.0 if lasting is None else lasting.rarer(self._mtbf_s, load)
        return PlanLimits(
            exact_only=job_limits.exact_only,
            host_bytes=None if job_limits.host_memory_gb is None else 1e9 * job_limits.host_memory_gb,
            plt_by_policy=job_limits.plt,
            policies=tuple(name for name in NAMES if job_limits.only in (None, name) and self._is_permitted(name)),
            replicas=self._replicas,
            interval=job_limits.interval,
            rarer=rarer,
        )

    def _is_permitted(self, policy: str) -> bool:
        """Whether the model and the other flags permit a policy."""
        if POLICIES[policy].can_replay and not self._may_replay():
            return False
        try:
            self._choices.check({"ckpt_policy": policy})
        except ValueError:
            return False
        return True

    def _choose(self, iteration: int, run: Running, cause: str) -> bool:
        """Chooses a policy, and returns whether it is a new one; a collective call, because it gathers sizes."""
        limits = self._limits(run.loads)
        plan = best_of(every_candidate(run, self._mtbf_s, limits), run.iteration_s, self._mtbf_s, limits)
        current = self._in_force(run, limits) if self._flags else None
        keeps_current = current is not None and keeps_to(current, limits) and current.ettr >= plan.best.ettr - WORTH
        if not keeps_current:
            self._flags = flags_of_candidate(plan.best)
        self._report_choice(iteration, plan, current if keeps_current else None, cause)
        return not keeps_current

    def _in_force(self, run: Running, limits: PlanLimits) -> Candidate:
        name = str(self._flags["ckpt_policy"])
        return priced(run, name, options_of(self._flags, limits.rarer * self._mtbf_s))

    def _report_choice(self, iteration: int, plan: PolicyChoice, current: Candidate | None, cause: str) -> None:
        reason = plan.reason
        if current is not None:
            reason = f"{current.name} stays in force, with an ETTR of {current.ettr:.3f}; the best: {reason}"
        self._log.message(f"--ckpt-policy auto chooses, since {cause}. {reason}")
        ettr = {candidate.name: round(candidate.ettr, 4) for candidate in (plan.best, *plan.alternatives)}
        self._log.events.write(
            "choice", iteration=iteration, **self._flags, cause=cause, mtbf_s=self._mtbf_s, ettr=ettr, reason=reason
        )


def bytes_by_expert_count(sizer: SnapshotSizer, operators: Sequence[Operator], ep: int) -> dict[int, int]:
    """Returns the busiest rank's bytes by number of experts saved per layer; empty without experts.

    A collective call.
    """
    experts = experts_by_layer(operators)
    layers = {layer: index for index, layer in enumerate(experts)}

    def details(k: int) -> dict[str, Detail]:
        chosen = {layer: sequential_experts(0, layers[layer], k, number, ep) for layer, number in experts.items()}
        saved = (
            operator
            for operator in operators
            if operator.expert_id is None or operator.expert_id[1] in chosen[operator.expert_id[0]]
        )
        return {operator.name: Detail.FULL for operator in saved}

    counts = candidate_expert_counts(min(experts.values())) if experts else []
    return {k: sizer(details(k)) for k in counts}


def changed(before: Mapping[str, float], current: Mapping[str, float]) -> str | None:
    """Returns a clause with a figure that changed by a factor of :data:`DRIFT` or more; None if there is none."""
    for name, figure in current.items():
        earlier = before.get(name)
        if earlier is None or max(earlier / figure, figure / earlier) >= DRIFT:
            return f"{name} is {figure:.3g} now, and was {'not known' if earlier is None else f'{earlier:.3g}'}"
    return None


def _live(local: LocalRemains | None) -> tuple[int, Any] | None:
    """Returns the iteration of this worker's state, and the ``auto`` state that belongs to it."""
    if local is None or local.live is None:
        return None
    return local.live.position.iteration, local.live.state.get("auto")


def _newest(tiers: Tiers, is_first: bool) -> tuple[int, Any] | None:
    """Returns the newest iteration that this worker can read, and the ``auto`` state stored with it."""
    states = [_newest_in(tiers.memory)] if tiers.memory is not None and tiers.leads_node else []
    if is_first:
        states.append(within(LOOKING_S if any(states) else None, _newest_in, tiers.storage))
    return max(filter(None, states), key=lambda entry: entry[0], default=None)


def _newest_in(store: Store) -> tuple[int, Any] | None:
    for iteration in reversed(store.iterations()):
        with contextlib.suppress(CheckpointError, ValueError):
            state = store.read_manifest(iteration).state.get("auto") or None  # as for the check of a manifest
            if state is not None:
                AutoState.read(state)
            return iteration, state
    return None
