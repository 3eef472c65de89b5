"""Saves all dense operators, and the experts whose loss would cost the most tokens (selective checkpointing)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from moc.policy.errors import PolicyError, rounded_up
from moc.policy.expert_selection import RULES, SCORES, ExpertId, ExpertSizes, Limit, count_limit
from moc.policy.interface import (
    Capability,
    Load,
    PolicyReport,
    RecoveryResponse,
    SnapshotPlan,
    SnapshotSchedule,
    SnapshotSizer,
    StorageSchedule,
    add_requirements,
)
from moc.policy.interval import Every, Interval
from moc.policy.partial import PartialPolicy, PartialRecovery, PartialSchedule, PartialStorage
from moc.policy.registry import policy
from moc.policy.selective_choice import (
    STORAGE_CYCLES,
    DetailByExpert,
    ExpertChoice,
    SelectiveState,
    SelectiveTuner,
    chained_experts,
    default_max_age,
    expert_cycle,
    gradient_chains,
)
from moc.policy.selective_flags import FOLDS, HIDES, MLT_LIMIT, SURVIVORS, SelectiveCosts, SelectiveFlags
from moc.policy.token_ledger import CapacityBoost
from moc.state.operators import Detail


@policy("selective", flags=SelectiveFlags(), costs=SelectiveCosts())
@dataclass(frozen=True)
class Selective(PartialPolicy):
    """MoEtion's selective snapshots (sections 4.1 to 4.3), by default in every iteration.

    The first snapshot of a run is full. Each later one saves all dense operators, and the experts that would lose the
    most tokens. Two budgets limit the experts:

    * local: bytes that a rank copies to host memory while it computes,
    * remote: bytes that nodes send to each other, or ranks write to storage, until the next snapshot.

    If nodes send less than ranks copy, the sent experts are chosen separately (Algorithm 1, lines 16 and 17). With
    ``experts`` or ``bytes``, the number of experts or their bytes are fixed instead.

    Attributes:
        experts: S, experts of each layer, mean over layers, whether by state or by gradients; None to choose by bytes.
        bytes: bytes of all experts in a snapshot, over all ranks; None to choose by budgets.
        local_gb: GB that the busiest rank copies; None to measure.
        remote_gb: GB that a node receives from others; None to measure.
        rule: ``per-byte`` or ``proportional`` (Algorithm 1).
        score: ``tokens`` or ``tokens-age``, with the rule ``per-byte``.
        max_age: iterations after which an expert is saved first; None for 8 E / S, with gradients 4 E / S.
        mlt_limit: proportion of the training's tokens that faults may lose without a warning.
        survivors: after the loss of a worker, ``keep`` live experts, or ``reload`` all.
        hide: copies hide behind ``compute``, or ``bubble`` for the pipeline's bubbles.
        bubble_share: share of forward and backward in bubbles until they are timed; 0 to hide behind computation.
        boost: capacity boost of experts that lost tokens, as a fraction; 0 for none.
        boost_iterations: maximum iterations of the boost.
        tier: tier that makes snapshots durable.
        gradients: memory has the gradients of experts in place of their state where these suffice.
        no_gradients: reason why it does not, unless a flag turns them off.
        fold: gradients are applied by ``peers``, in the background, or by a ``recovery``.
        sizes: sizes of snapshots; empty until known.

    Raises:
        ValueError: a setting is invalid, or the model has no experts.
    """

    experts: int | None = None
    bytes: int | None = None
    local_gb: float | None = None
    remote_gb: float | None = None
    rule: str = "per-byte"
    score: str = "tokens-age"
    max_age: int | None = None
    mlt_limit: float = MLT_LIMIT
    survivors: str = "reload"
    hide: str = "compute"
    bubble_share: float = 0.0
    boost: float = 0.0
    boost_iterations: int = 200
    tier: str = "memory"
    gradients: bool = False
    no_gradients: str | None = None
    fold: str = "recovery"
    state: SelectiveState = field(default_factory=SelectiveState, compare=False, kw_only=True)
    sizes: list[ExpertSizes] = field(default_factory=list, compare=False)

    def __post_init__(self):
        sets = {"rule": RULES, "score": SCORES, "survivors": SURVIVORS, "hide": HIDES, "fold": FOLDS}
        for name, choices in sets.items():
            if (value := getattr(self, name)) not in choices:
                raise PolicyError(
                    f"there is no {name} called {value}. Fix: choose {' or '.join(choices)}",
                    code="value-not-a-choice",
                )
        if not self.num_experts:
            raise PolicyError(
                "the model has no experts to select. Fix: choose --ckpt-policy full",
                code="model-without-experts",
            )
        fewest = min(self.num_experts.values())
        if self.experts is not None and not 1 <= self.experts <= fewest:
            raise PolicyError(
                f"{self.experts} experts of each layer cannot be in a snapshot, of {fewest}. Fix: set "
                f"--selective-experts to at most {fewest}",
                code="experts-per-snapshot-invalid",
            )
        every = self.interval.interval if isinstance(self.interval, Every) else 1
        is_fixed = self.experts is not None or self.bytes is not None
        if is_fixed or not isinstance(self.interval, SelectiveTuner):
            share = self.bubble_share if self.copies_in_bubbles else 0.0
            remote = self.tier == "memory" or (self.tier == "peers" and self.remote_gb is not None)
            tuner = SelectiveTuner(every, bubble_share=share, has_budgets=self.local_gb is not None and remote)
            interval: Interval = Every(every) if is_fixed else tuner
            object.__setattr__(self, "interval", interval)
        needed = {
            Capability.GRADIENTS: self.gradients,
            Capability.BACKGROUND_UPDATES: self._has_background_updates,
            Capability.BUBBLES: self.copies_in_bubbles,
            Capability.LIVE_EXPERTS: self.survivors == "keep",
        }
        add_requirements(self, (capability for capability, is_needed in needed.items() if is_needed))

    @property
    def saves_gradients(self) -> bool:
        """Gradients replace state where these suffice: ``gradients`` is set, and they do not delay training."""
        tuner = self.interval
        return self.gradients and (not isinstance(tuner, SelectiveTuner) or tuner.are_gradients_hidden)

    @property
    def _has_background_updates(self) -> bool:
        return self.gradients and self.fold == "peers"

    @property
    def copies_in_bubbles(self) -> bool:
        """Copies hide behind the pipeline's bubbles."""
        return self.hide == "bubble" and self.bubble_share > 0

    def on_sizes(self, busiest: SnapshotSizer) -> None:
        """As :meth:`Policy.on_sizes`: each expert's bytes by rank; unused with a fixed number.

        Raises:
            ValueError: a budget leaves no room for an expert.
        """
        if self.experts is not None:
            return
        dense = dict.fromkeys((operator.name for operator in self.operators if operator.expert_id is None), Detail.FULL)
        experts = {operator.expert_id: operator.name for operator in self.operators if operator.expert_id is not None}
        details = [Detail.FULL, *([Detail.GRAD] if self.gradients else [])]
        plans = {f"{name} {detail.value}": {name: detail} for name in experts.values() for detail in details}
        bytes_by_rank = busiest.by_rank({"": dense} | plans)
        each = {
            detail: {p: bytes_by_rank[f"{name} {detail.value}"] for p, name in experts.items()} for detail in details
        }
        gradients = each.get(Detail.GRAD, {})
        self.sizes[:] = [
            sizes := ExpertSizes(bytes_by_rank[""], each[Detail.FULL], busiest.nodes, busiest.replicas, gradients)
        ]
        if self.bytes is not None and self.bytes < sizes.largest_expert:
            raise PolicyError(
                f"{self.bytes} bytes leave no room for an expert. Fix: set --selective-bytes to "
                f"{sizes.largest_expert} or more, or leave it out",
                code="snapshot-budget-too-small",
            )
        for flag, least in (("local_gb", sizes.least_rank_bytes), ("remote_gb", sizes.least_node_bytes)):
            budget = getattr(self, flag)
            if budget is not None and budget * 1e9 < least:
                raise PolicyError(
                    f"a budget of {budget} GB leaves no room for an expert in addition to the dense operators. Fix: "
                    f"set --selective-{flag.replace('_', '-')} to {rounded_up(least)} or more, or leave it out",
                    code="snapshot-budget-too-small",
                )

    @property
    def storage(self) -> StorageSchedule:
        return SelectiveStorage(self)

    @property
    def schedule(self) -> SnapshotSchedule:
        return SelectiveSchedule(self)

    @property
    def report(self) -> PolicyReport:
        return SelectiveReport(self)

    @property
    def recovery(self) -> RecoveryResponse:
        return SelectiveRecovery(self)

    def is_due(self, iteration: int) -> bool:
        """As :meth:`PartialPolicy.is_due`; after the first snapshot, at a distance that the budgets allow."""
        return super().is_due(iteration) and not (self.state.based and iteration % self.schedule.snapshot_interval)

    def plan_partial(self, iteration: int, load: Load | None, persists: bool) -> SnapshotPlan | None:
        if load is None:
            raise PolicyError(
                "the tokens of experts are not counted, and selective snapshots need the counts. Fix: count them",
                code="tokens-not-counted",
            )
        chosen, copied = self._selected(iteration, load, persists)
        compared = self._compared(chosen, iteration)
        saved, remote = self._details_with(chosen), None if copied is None else self._details_with(copied)
        complete = len(saved) == len(self.operators) and Detail.GRAD not in saved.values()
        return SnapshotPlan(iteration, self.name, saved, complete, remote=remote, compared=compared)

    def on_snapshot(self, plan: SnapshotPlan, load: Load | None = None) -> None:
        super().on_snapshot(plan, load)
        self.state.in_peers.record(self.num_experts, self.experts_of_plan(plan.remote_plan), plan.iteration, load or {})
        if load:
            self.state.record_risk(plan.iteration, load)

    @property
    def max_expert_age(self) -> int:
        """Iterations after which an expert is saved first, whatever its score."""
        return self._max_age(list(self.limits().values()))

    def limits(self) -> dict[str, Limit]:
        """Returns the limits of a snapshot: ``experts``, their number or bytes; ``local`` and ``remote``, the budgets.

        If a budget has no room for an expert, snapshots are further apart.
        """
        tuner = self.interval
        if self.bytes is not None and self.sizes:
            return {"experts": self.sizes[0].total_limit(self.bytes)}
        limits = {"experts": self._count_limit}
        if not self.sizes or not isinstance(tuner, SelectiveTuner):
            return limits
        sizes, interval = self.sizes[0], self.schedule.snapshot_interval
        least = sizes.least_rank_bytes
        local = tuner.affordable_bytes(least, interval) if self.local_gb is None else self.local_gb * 1e9
        if local is not None:
            limits["local"] = sizes.rank_limit(max(local, least))
        remote = tuner.remote_bytes(self.tier)
        if self.tier == "peers" and (self.remote_gb is not None or remote is not None):
            received = (remote or 0) * interval if self.remote_gb is None else self.remote_gb * 1e9
            limits["remote"] = sizes.node_limit(received)
        elif remote is not None:
            limits["remote"] = sizes.rank_limit(max(remote * interval, least))
        return limits

    def _selected(self, iteration: int, load: Load, persists: bool) -> tuple[DetailByExpert, DetailByExpert | None]:
        """Returns the experts of a snapshot, each at its detail, and the experts copied to other nodes (None if equal).

        The copied experts are chosen first, by the tokens that copies lack.
        """
        state, limits, copied = self.state, self.limits(), None

        def choice(limits: Sequence[Limit]) -> ExpertChoice:
            return ExpertChoice(
                iteration,
                load,
                self.rule,
                self.score,
                self._max_age(limits),
                self.saves_gradients,
                self.sizes[0] if self.sizes else None,
                saves_comparison=self._has_background_updates,
                storage_max_age=self.max_age,
            )

        if self.tier == "peers" and "remote" in limits:
            budgets = list(limits.values())
            copied = choice(budgets).choose(state.in_peers, budgets)
            limits.pop("remote")
        storage, budgets = self.expected_in_storage() if persists else None, list(limits.values())
        saved = choice(budgets).choose(state.in_memory, budgets, copied or {}, storage)
        return saved, None if copied == saved else copied

    def _compared(self, chosen: DetailByExpert, iteration: int) -> frozenset[str]:
        """Returns the experts saved in full although gradients would suffice; empty unless a process applies chains."""
        if not self._has_background_updates:
            return frozenset()
        state = self.state.in_memory
        chained = chained_experts(gradient_chains(state.bases, state.at), iteration)
        saved_in_full = {expert_id for expert_id, detail in chosen.items() if detail is Detail.FULL} & chained
        return frozenset(name for name, expert_id in self.expert_by_name.items() if expert_id in saved_in_full)

    def _max_age(self, limits: Sequence[Limit]) -> int:
        interval = self.schedule.snapshot_interval
        return self.max_age or default_max_age(len(self.expert_places), interval, limits, self.saves_gradients)

    def _details_with(self, experts: DetailByExpert) -> dict[str, Detail]:
        """Returns all dense operators and these experts."""
        expert_ids = self.expert_by_name.items()
        details = {name: Detail.FULL if expert_id is None else experts.get(expert_id) for name, expert_id in expert_ids}
        return {name: detail for name, detail in details.items() if detail is not None}

    @cached_property
    def expert_places(self) -> list[ExpertId]:
        """Layer and number of each expert, in model order."""
        return [expert_id for expert_id in self.expert_by_name.values() if expert_id is not None]

    @cached_property
    def _count_limit(self) -> Limit:
        """The limit of ``experts``; of all experts if not fixed."""
        return count_limit(self.expert_places, self._max_experts)

    @property
    def _max_experts(self) -> int:
        return self.experts * len(self.num_experts) if self.experts else len(self.expert_places)


@dataclass(frozen=True)
class SelectiveStorage(PartialStorage):
    """Storage receives no gradients."""

    policy: Selective

    def part_of(self, plan: SnapshotPlan) -> SnapshotPlan:
        """As :meth:`PartialStorage.part_of`, without gradients; :meth:`plan` chose states instead."""
        return super().part_of(plan).without(Detail.GRAD)

    @property
    def cycle(self) -> int | None:
        """As :attr:`StorageSchedule.cycle`; None for Algorithm 1, which selects only by tokens."""
        policy = self.policy
        if policy.rule == "proportional":
            return None
        limits = [limit for name, limit in policy.limits().items() if name != "remote" or policy.tier != "peers"]
        return STORAGE_CYCLES * expert_cycle(len(policy.expert_places), limits, policy.saves_gradients)


@dataclass(frozen=True)
class SelectiveSchedule(PartialSchedule):
    """Snapshots are as far apart as the budgets require."""

    policy: Selective

    @property
    def snapshot_interval(self) -> int:
        """As :attr:`SnapshotSchedule.snapshot_interval`.

        The result exceeds the setting if the dense operators and one expert take longer.
        """
        policy, tuner = self.policy, self.policy.interval
        if not isinstance(tuner, SelectiveTuner):
            return tuner.interval if isinstance(tuner, Every) else 1
        if not policy.sizes:
            return tuner.every
        sizes, interval, remote = policy.sizes[0], 1, tuner.remote_bytes(policy.tier)
        if policy.local_gb is None:
            interval = tuner.affordable_interval(sizes.least_rank_bytes)
        if remote and policy.remote_gb is None:
            least = sizes.least_node_bytes if policy.tier == "peers" else sizes.least_rank_bytes
            interval = max(interval, math.ceil(least / remote))
        return tuner.every * -(-interval // tuner.every)


@dataclass(frozen=True)
class SelectiveReport(PolicyReport):
    """Settings without effect, saved experts, budgets, and a warning about tokens at risk."""

    policy: Selective

    def remarks(self) -> Iterator[str]:
        policy = self.policy
        if policy.experts is not None and policy.gradients:
            yield (
                "--selective-experts counts experts, saved by their state or by their gradients; until the previous "
                "release, it set the bytes of as many states, which --selective-bytes sets now"
            )
        if policy.no_gradients is not None:
            yield f"experts are saved as their state, not as gradients: {policy.no_gradients}"
        if policy.hide == "bubble" and not policy.copies_in_bubbles:
            yield (
                "--selective-hide bubble has no effect: on CUDA the host does not wait for other stages, so copies "
                "cannot be delayed until a stage waits; they run during forward and backward"
            )

    def gauges(self) -> dict[str, float]:
        """As :meth:`PolicyReport.gauges`: experts of each layer in the newest snapshot, mean over layers, and MLT.

        MLT are the momentary lost tokens (eq. 6), in units of an iteration's tokens: the loss of a fault right after
        the newest snapshot. The paper sums over layers, this is the mean. With peers, ``mlt_peers`` is the loss with a
        node: its experts are loaded from copies.
        """
        policy, state = self.policy, self.policy.state
        if not (number := state.experts_per_layer(state.in_memory)):
            return {}
        gauges = {"selective_experts": number, "mlt": state.mlt}
        if policy.gradients:
            gauges["selective_gradients"] = state.experts_per_layer(state.in_memory, chained=True)
        if policy.tier == "peers":
            gauges |= {"selective_copies": state.experts_per_layer(state.in_peers), "mlt_peers": state.mlt_peers}
        return gauges

    def chosen(self) -> dict[str, float]:
        """As :meth:`PolicyReport.chosen`: experts of each layer that fit the budgets, and the interval."""
        policy = self.policy
        limits, layers = policy.limits(), len(policy.num_experts)
        chosen: dict[str, float] = {"snapshot_interval": policy.schedule.snapshot_interval}
        if policy.tier == "peers" and "remote" in limits:
            chosen["selective_copies"] = round(min(limit.expert_count() for limit in limits.values()) / layers, 2)
            limits.pop("remote")
        number = min(limit.expert_count() for limit in limits.values()) / layers
        if policy.gradients and not policy.saves_gradients:
            chosen["selective_gradients"] = 0.0
        return {"selective_experts": round(number, 2), **chosen}

    def reason(self) -> str | None:
        policy, tuner = self.policy, self.policy.interval
        if not isinstance(tuner, SelectiveTuner) or tuner.local_bytes is None:
            return None
        during = "in the pipeline's bubbles" if policy.copies_in_bubbles else "during forward and backward"
        text = f"a rank copies {tuner.local_bytes / 1e9:.3g} GB {during}"
        remote = tuner.remote_bytes(policy.tier)
        if remote is not None:
            subject = "a node receives" if policy.tier == "peers" else "a rank writes"
            text += f", and {subject} {remote / 1e9:.3g} GB in an iteration"
        if policy.gradients and not policy.saves_gradients:
            text += f"; states are saved, because gradients delay training by {tuner.gradients_s:.3g} s in each"
        return text

    def at_risk(self, plt: float, train_iters: int) -> tuple[str, dict] | None:
        """As :meth:`PolicyReport.at_risk`: momentary and already lost tokens, compared with ``mlt_limit``.

        With peers, the next fault may be the loss of a node, whose experts are loaded from copies.
        """
        policy, state = self.policy, self.policy.state
        mlt = max(state.mlt, state.mlt_peers) if policy.tier == "peers" else state.mlt
        after = plt + mlt / train_iters
        if after <= policy.mlt_limit:
            return None
        budgets = "--selective-local-gb" + (" and --selective-remote-gb" if policy.tier == "peers" else "")
        fixed = {"--selective-experts": policy.experts, "--selective-bytes": policy.bytes}
        raised = next((flag for flag, value in fixed.items() if value is not None), budgets)
        text = (
            f"the next fault would bring the tokens that experts have lost to {after:.3%} of this training's, above "
            f"--selective-mlt-limit {policy.mlt_limit:g}: snapshots lack {mlt:.3g} iterations of tokens, and faults "
            f"have lost {plt:.3%} before; raise {raised}, or lower "
            "--snapshot-interval"
        )
        return text, {"plt": after, "lost": plt, "mlt": mlt, "mlt_sum": mlt * len(policy.num_experts)}


@dataclass(frozen=True)
class SelectiveRecovery(PartialRecovery):
    """Experts compensate lost tokens with extra capacity."""

    policy: Selective

    @property
    def capacity_boost(self) -> CapacityBoost | None:
        """As :attr:`RecoveryResponse.capacity_boost` (section 6)."""
        policy = self.policy
        return CapacityBoost(policy.boost, policy.boost_iterations) if policy.boost else None
