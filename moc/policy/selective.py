"""Selective expert checkpointing: all dense operators, and the experts whose loss would cost the most tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from moc.policy.budgets import Sizes
from moc.policy.debt import Boost
from moc.policy.flags import Asked, JobShape, PolicyFlag
from moc.policy.interval import Every, Interval
from moc.policy.plan import Busiest, Load, Policy, SnapshotPlan
from moc.policy.prices import Machine, Price, Settings
from moc.policy.registry import policy
from moc.policy.risk import lost_by_layer
from moc.policy.selection import (
    RULES,
    SCORES,
    Experts,
    Limit,
    Place,
    number_of_experts,
    per_byte,
    proportional,
    scores,
)
from moc.policy.selective_flags import BOOST, FLAGS, refusals
from moc.policy.selective_state import SelectiveState, Table
from moc.policy.selective_tuner import SelectiveTuner
from moc.state.detail import Detail


@policy("selective")
@dataclass(frozen=True)
class Selective(Policy):
    """MoEtion's selective snapshots (sections 4.1 to 4.3), by default in every iteration.

    The first snapshot of a run is full; each later one saves all dense operators, and the experts that lose the most
    tokens otherwise, as many as two budgets allow: what a rank copies to host memory while it computes, and what nodes
    send to each other, or ranks to storage, until the next snapshot.  With ``experts`` their number is fixed instead.

    Attributes:
        experts: S, experts of each layer in the mean over layers; None to choose by budgets.
        local_gb: GB that the busiest rank copies; None to measure.
        remote_gb: GB that a node receives from others; None to measure.
        rule: ``per-byte`` or ``proportional`` (Algorithm 1).
        score: ``tokens`` or ``tokens-age``, with the rule ``per-byte``.
        max_age: iterations after which an expert is saved first; None for 4 E / S.
        boost: capacity beyond their own with which experts make up lost tokens, as a fraction; 0 for none.
        boost_iterations: that they have for it.
        tier: where snapshots are safe.
        persist_interval: iterations between snapshots that also go to storage; None if none do.
        told: what the policy was told; stored with snapshots.
        sizes: of snapshots; empty until they are known.

    Raises:
        ValueError: a setting is invalid.
    """

    exact: ClassVar[bool] = False
    flags: ClassVar[tuple[PolicyFlag, ...]] = FLAGS
    grows: ClassVar[str | None] = None

    experts: int | None = None
    local_gb: float | None = None
    remote_gb: float | None = None
    rule: str = "per-byte"
    score: str = "tokens-age"
    max_age: int | None = None
    boost: float = 0.0
    boost_iterations: int = 200
    tier: str = "memory"
    persist_interval: int | None = None
    told: SelectiveState = field(default_factory=SelectiveState, compare=False)
    sizes: list[Sizes] = field(default_factory=list, compare=False)

    def __post_init__(self):
        for name, value, choices in (("rule", self.rule, RULES), ("score", self.score, SCORES)):
            if value not in choices:
                raise ValueError(f"there is no {name} called {value}: choose {' or '.join(choices)}")
        fewest = min(self.num_experts.values(), default=0)
        if self.experts is not None and not 1 <= self.experts <= fewest:
            raise ValueError(
                f"{self.experts} experts of each layer cannot be in a snapshot, of {fewest}: set --selective-experts "
                "to at most that, or choose --ckpt-policy full for a model without experts"
            )
        every = self.interval.interval if isinstance(self.interval, Every) else 1
        if self.experts or not isinstance(self.interval, SelectiveTuner):
            interval: Interval = Every(every) if self.experts else SelectiveTuner(every)
            object.__setattr__(self, "interval", interval)

    @classmethod
    def refusals(cls, asked: Asked) -> Iterator[str]:
        """As :meth:`Policy.refusals`."""
        return refusals(asked)

    @classmethod
    def settings(cls, asked: Asked, job: JobShape) -> dict[str, Any]:
        """As :meth:`Policy.settings`."""
        found = {"tier": asked.ckpt_tier, "persist_interval": asked.persist_interval}
        if asked.selective_boost is None:
            found["boost"] = BOOST if job.drops else 0.0
        return super().settings(asked, job) | found

    @classmethod
    def candidates(cls, machine: Machine) -> Iterator[Settings]:
        """As :meth:`Policy.candidates`: the most experts whose copy hides, as budgets would choose."""
        hidden = [k for k in machine.ks if machine.with_experts(k).busiest <= machine.hidden_s * machine.rate]
        return ({"experts": k} for k in ([max(hidden)] if hidden else machine.ks[:1]))

    @classmethod
    def price(cls, machine: Machine, settings: Settings) -> Price:
        """As :meth:`Policy.price`; by default with the experts of :meth:`candidates`."""
        if not machine.num_experts:
            return Price(machine.everything)
        k = settings.get("experts") or next(cls.candidates(machine))["experts"]
        return Price(machine.with_experts(k), k=k)

    @classmethod
    def described(cls, settings: Settings) -> str:
        """As :meth:`Policy.described`."""
        return f"{settings['experts']} experts" if "experts" in settings else ""

    def on_sizes(self, busiest: Busiest) -> None:
        """As :meth:`Policy.on_sizes`: the bytes of each expert by rank, unless their number is fixed.

        Raises:
            ValueError: a budget leaves no room for an expert.
        """
        if self.experts or not self.num_experts:
            return
        dense = dict.fromkeys((one.name for one in self.operators if one.place is None), Detail.FULL)
        experts = {one.place: one.name for one in self.operators if one.place is not None}
        found = busiest.by_rank({"": dense} | {name: {name: Detail.FULL} for name in experts.values()})
        experts = {place: found[name] for place, name in experts.items()}
        self.sizes[:] = [sizes := Sizes(found[""], experts, busiest.nodes, busiest.replicas)]
        for flag, least in (("local_gb", sizes.least_of_rank), ("remote_gb", sizes.least_of_node)):
            budget = getattr(self, flag)
            if budget is not None and budget * 1e9 < least:
                raise ValueError(
                    f"a budget of {budget} GB leaves no room for an expert beside the dense operators: set "
                    f"--selective-{flag.replace('_', '-')} to {least / 1e9:.3g} or more, or leave it out"
                )

    @property
    def makes_up(self) -> Boost | None:
        """As :meth:`Policy.makes_up` (section 6)."""
        return Boost(self.boost, self.boost_iterations) if self.boost else None

    def plan(self, iteration: int, load: Load | None = None) -> SnapshotPlan | None:
        """All dense operators and the experts selected now; a full plan if no full snapshot exists yet.

        Raises:
            ValueError: tokens are not counted.
        """
        if not self.interval.due(iteration):
            return None
        if not self.told.based or not self.num_experts:
            return self.everything(iteration)
        if iteration % self.iterations_apart:
            return None
        if load is None:
            raise ValueError("nobody counts the tokens of experts, which selective snapshots choose by: count them")
        return self._planned(iteration, self._selected(iteration, load))

    def on_snapshot(self, plan: SnapshotPlan, load: Load | None = None) -> None:
        """As :meth:`Policy.on_snapshot`."""
        self.told.based |= plan.complete
        self._note(plan, load or {}, self.told.saved, self.told.saved_at)
        if load:
            self._note_risk(plan.iteration, load)

    def for_storage(self, plan: SnapshotPlan) -> SnapshotPlan:
        """The whole snapshot; where memory holds snapshots too, :meth:`plan` chose its experts for storage.

        Raises:
            ValueError: storage has no full checkpoint, without which a partial one is of no use.
        """
        if not self.told.stored and not plan.complete:
            raise ValueError(
                f"the partial snapshot of iteration {plan.iteration} is of no use in storage, which does not hold all "
                "experts yet: save everything() at the first iteration that goes there"
            )
        return plan

    def on_stored(self, plan: SnapshotPlan) -> None:
        """As :meth:`Policy.on_stored`; called when the snapshot has just begun."""
        self.told.stored |= plan.complete
        self._note(plan, self.told.saved, self.told.persisted, self.told.persisted_at)
        every = self.persist_interval or 1
        self.told.due = (plan.iteration // every + 1) * every  # as storage itself counts

    def stores(self, plan: SnapshotPlan) -> bool:
        """As :meth:`Policy.stores`: a full snapshot if storage lacks one, since partial ones depend on it."""
        return plan.complete and not self.told.stored

    def on_resume(self, in_memory: bool, in_storage: bool) -> None:
        """As :meth:`Policy.on_resume`: if either tier lacks an expert, the next snapshot is full."""
        self.told.based, self.told.stored = in_memory and in_storage, in_storage

    def storage_lost(self) -> None:
        """As :meth:`Policy.storage_lost`: partial checkpoints need a full one, so the next snapshot is full."""
        self.told.based = self.told.stored = False

    @property
    def iterations_apart(self) -> int:
        """Iterations between snapshots: more than asked for where not even the dense operators and an expert hide."""
        seen = self.interval
        if not isinstance(seen, SelectiveTuner):
            return seen.interval if isinstance(seen, Every) else 1
        if not self.sizes:
            return seen.every
        sizes, apart, remote = self.sizes[0], 1, seen.remote(self.tier)
        if self.local_gb is None:
            apart = seen.stretched(sizes.least_of_rank)
        if remote and self.remote_gb is None:
            least = sizes.least_of_node if self.tier == "peers" else sizes.least_of_rank
            apart = max(apart, math.ceil(least / remote))
        return seen.every * -(-apart // seen.every)

    @property
    def oldest(self) -> int:
        """Iterations after which an expert is saved first, whatever its score."""
        return self._oldest(self.limits().values())

    def limits(self) -> dict[str, Limit]:
        """The limits of a snapshot: ``experts``, their number; ``local`` and ``remote``, the budgets that are known.

        Snapshots are further apart where a budget would leave no room for an expert.
        """
        layers, seen = len(self.num_experts), self.interval
        if self.experts is not None:
            return {"experts": number_of_experts(self._places, self.experts * layers)}
        limits = {"experts": number_of_experts(self._places, len(self._places))}
        if not self.sizes or not isinstance(seen, SelectiveTuner):
            return limits
        sizes, apart = self.sizes[0], self.iterations_apart
        local = seen.local if self.local_gb is None else self.local_gb * 1e9
        if local is not None:
            limits["local"] = sizes.by_rank(max(local, sizes.least_of_rank))
        remote = seen.remote(self.tier)
        if self.tier == "peers" and (self.remote_gb is not None or remote is not None):
            received = (remote or 0) * apart if self.remote_gb is None else self.remote_gb * 1e9
            limits["remote"] = sizes.by_node(received)
        elif remote is not None:
            limits["remote"] = sizes.by_rank(max(remote * apart, sizes.least_of_rank))
        return limits

    def gauges(self) -> dict[str, float]:
        """As :meth:`Policy.gauges`: experts of each layer in the newest snapshot, in the mean over layers, and MLT.

        MLT are the momentary lost tokens (eq. 6), which a fault right after the newest snapshot would lose, in units of
        an iteration's tokens; the paper sums over layers, this is the mean.
        """
        newest = max(map(max, self.told.saved_at.values()), default=0)
        if not newest:
            return {}
        saved = sum(row.count(newest) for row in self.told.saved_at.values())
        return {"selective_experts": saved / len(self.told.saved_at), "mlt": self.told.mlt}

    def chosen(self) -> dict[str, float]:
        """As :meth:`Policy.chosen`: the experts of each layer that budgets have room for, and the interval."""
        number = min(limit.total() for limit in self.limits().values()) / max(1, len(self.num_experts))
        return {"selective_experts": round(number, 2), "snapshot_interval": self.iterations_apart}

    def reason(self) -> str | None:
        """As :meth:`Policy.reason`."""
        seen = self.interval
        if not isinstance(seen, SelectiveTuner) or seen.local is None:
            return None
        text = f"a rank copies {seen.local / 1e9:.3g} GB during forward and backward"
        remote = seen.remote(self.tier)
        if remote is not None:
            who = "a node receives" if self.tier == "peers" else "a rank writes"
            text += f", and {who} {remote / 1e9:.3g} GB in an iteration"
        return text

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`Policy.state_dict`."""
        return asdict(self.told)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`Policy.load_state_dict`; the model must be the same, settings may differ."""
        self.told.load_state_dict(state)

    def _selected(self, iteration: int, load: Load) -> Experts:
        """The experts of a snapshot; by what storage lacks if it goes there too, otherwise by what memory lacks."""
        told, never, apart = self.told, self._zeros(), self.iterations_apart
        to_storage = self.persist_interval is not None and told.due <= iteration < told.due + apart
        saved, saved_at = (told.persisted, told.persisted_at) if to_storage else (told.saved, told.saved_at)
        unsaved, limits = _minus(load, never | saved), list(self.limits().values())
        if self.rule == "proportional":
            return proportional(unsaved, limits)
        ages = _minus({layer: [iteration] * len(row) for layer, row in never.items()}, never | saved_at)
        return per_byte(scores(unsaved, ages, self.score), ages, self._oldest(limits), limits)

    def _oldest(self, limits: Iterable[Limit]) -> int:
        if self.max_age is not None:
            return self.max_age
        fitting = min(limit.total() for limit in limits)
        return 4 * self.iterations_apart * -(-len(self._places) // max(1, fitting))

    def _note(self, plan: SnapshotPlan, tokens: Load, saved: Table, saved_at: Table) -> None:
        """Records which experts a plan saves, and the tokens that they have been given."""
        for layer, row in self._zeros().items():
            saved.setdefault(layer, row)
            saved_at.setdefault(layer, list(row))
        for one in self.operators:
            if one.place is not None and plan.operators.get(one.name) is Detail.FULL:
                layer, expert = one.place
                saved_at[layer][expert] = plan.iteration
                if layer in tokens:
                    saved[layer][expert] = tokens[layer][expert]

    def _note_risk(self, iteration: int, load: Load) -> None:
        """Records the tokens that a fault right after this snapshot would lose."""
        told, given = self.told, {layer: sum(row) for layer, row in load.items()}
        each = {
            layer: (given[layer] - told.given.get(layer, 0)) / max(1, iteration - told.iteration) for layer in given
        }
        risks = lost_by_layer(_minus(load, told.saved), each)
        told.given, told.iteration, told.mlt = given, iteration, sum(risks) / max(1, len(risks))

    def _planned(self, iteration: int, experts: Experts) -> SnapshotPlan:
        names = [one.name for one in self.operators if one.place is None or one.place[1] in experts[one.place[0]]]
        complete = len(names) == len(self.operators)
        return SnapshotPlan(iteration, self.name, dict.fromkeys(names, Detail.FULL), complete)

    def _zeros(self) -> Table:
        return {layer: [0] * number for layer, number in self.num_experts.items()}

    @cached_property
    def _places(self) -> list[Place]:
        return [one.place for one in self.operators if one.place is not None]

    @cached_property
    def num_experts(self) -> dict[int, int]:
        """Number of experts by layer, ascending, of layers with experts."""
        numbers: dict[int, int] = {}
        for layer, _ in self._places:
            numbers[layer] = numbers.get(layer, 0) + 1
        return dict(sorted(numbers.items()))


def _minus(now: Load, before: Load) -> Table:
    return {layer: [n - b for n, b in zip(now[layer], before[layer], strict=True)] for layer in before}
