"""Every policy with storage that is slow, hangs or fails in turns: what a run has if all memory is lost.

Policies, and what decides which snapshots go to storage, are real.  Storage is a model that writes so many bytes in an
iteration; a state of an operator counts as one, its gradients as a third.
"""

import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace

import pytest

from moc.policy import POLICIES, Capability, Every, check_plan, policy_named
from moc.policy.expert_selection import steady_risk
from moc.policy.token_ledger import TokenLedger
from moc.recovery.inventory import Persisted, Promise, overdue
from moc.recovery.sources import STORAGE, AvailableCheckpoint
from moc.session.resume.point import ResumePoint
from moc.session.saving.storage import ALL_REDUCES, OUTSTANDING, StorageHealth, StorageTier
from moc.state.operators import Detail
from moc.state.record import Position
from tests.cases import each_row
from tests.model_shape import ModelShape, model_operators
from tests.unit.policy.test_selective_choice import Told

LAYERS, EXPERTS = 2, 16
OPERATORS = model_operators(
    ModelShape((1,) * LAYERS, 8, 16, 8, 8, 4, 100, num_experts=EXPERTS, expert_ffn_hidden_size=16)
)
EVERY = 4
RESTS = 5
"""Iterations for which storage is left alone after a failed write."""

CASES = {
    "full": ("full", {}),
    "sparse": ("sparse", dict(window=3)),
    "gradient": ("gradient", dict(window=3)),
    "pec": ("pec", dict(k=4)),
    "pec, two levels": ("pec", dict(k=4, k_persist=1)),
    "pec, whose rotation is in step with storage": ("pec", dict(k=4, persist_every=EVERY)),
    "pec by load": ("pec", dict(k=4, selection="load_aware")),
    "selective": ("selective", dict(experts=4)),
    "selective, gradients": ("selective", dict(experts=4, gradients=True, score="tokens")),
    "selective, Algorithm 1": ("selective", dict(experts=4, rule="proportional")),
}
"""By name, the policy and its settings; ``auto`` chooses among these."""


def tokens_of(iteration: int) -> dict[int, list[int]]:
    """Tokens of an iteration: popularity differs by a factor of up to 16, and changes with time."""
    return {
        layer: [1 + 960 // (1 + (expert + 5 * layer + iteration // 60) % EXPERTS) for expert in range(EXPERTS)]
        for layer in range(LAYERS)
    }


def size_of(plan) -> float:
    """Bytes of a part."""
    return sum(1 / 3 if detail is Detail.GRAD else 1 for detail in plan.operators.values())


@dataclass
class Run:
    """A run, and what storage has of it.

    Attributes:
        policy: takes the snapshots.
        rate: bytes that storage writes in an iteration.
        beside: memory makes snapshots safe.
        hangs_at: iteration from which storage writes nothing; None for never.
        fails: chance that a write fails.
        fails_every: one in so many writes fails, too; 0 for none.
    """

    policy: object
    rate: float
    beside: bool = True
    hangs_at: int | None = None
    fails: float = 0.0
    fails_every: int = 0
    said: list = field(default_factory=list)
    published: list = field(default_factory=list)
    begun: list = field(default_factory=list)
    advanced: list = field(default_factory=list)
    lags: list = field(default_factory=list)

    def __post_init__(self):
        log = SimpleNamespace(message=self.said.append, events=SimpleNamespace(write=lambda *_, **__: None))
        window = lambda: self.policy.schedule.window_length - 1 + ALL_REDUCES  # noqa: E731
        self.health = StorageHealth("there", EVERY if self.beside else None, EVERY, None, log, commit_delay=window)
        self.stored = StorageTier(self.policy, self.health, ResumePoint(Position()), self.beside)
        self.ledger = TokenLedger.empty(dict.fromkeys(range(LAYERS), EXPERTS))
        self._writes, self._chance, self._closed_until = deque(), Random(3), 0
        self._written, self._number = 0.0, 0

    def train(self, iterations: int) -> "Run":
        """Trains for so many iterations."""
        for _ in range(iterations):
            self._iterate(self.ledger.iteration + 1)
        return self

    def _iterate(self, iteration: int) -> None:
        self.ledger = self.ledger.after_iteration(tokens_of(iteration))
        self._write(self.rate if self.hangs_at is None or iteration < self.hangs_at else 0.0)
        self.health.receive({"storage_rests": float(iteration < self._closed_until), "storage_closed": 0.0})
        while not self.beside and len(self._writes) >= OUTSTANDING and self.hangs_at is None:
            self._write(self.rate)  # training waits
        self.stored.request_base(iteration)
        plan, storage = self.stored.plan(iteration, self.ledger.load, has_room=not self._writes)
        if plan is None:
            self.stored.on_skipped_iteration(iteration, self.ledger.load)
        else:
            check_plan(self.policy, plan)
            self.stored.on_start(plan, storage)
            self.policy.on_snapshot(plan, self.ledger.load)
            if storage is not None:
                self.policy.storage.on_write_begun(storage)
                self._writes.append((plan, storage, self.ledger))
                if plan.since == iteration:
                    self.begun.append(iteration)
        under_way = self._writes[0][0].iteration if self._writes else None
        self.health.on_iteration(iteration, under_way)
        self.lags.append(self.stored.lag(iteration))
        self.health.on_lag(self.lags[-1])

    def _write(self, amount: float) -> None:
        self._written += amount
        while self._writes and self._written >= size_of(self._writes[0][1]):
            plan, storage, ledger = self._writes.popleft()
            self._written -= size_of(storage)
            self._number += 1
            in_turn = self.fails_every and self._number % self.fails_every == 0
            if in_turn or self._chance.random() < self.fails:
                self.stored.problem = "no room"
                self.stored.on_failure(plan, storage, in_memory=self.beside)
                self._closed_until = self.ledger.iteration + RESTS
                continue
            before = self.stored.newest
            self.stored.on_committed(storage)
            if self.stored.newest != before:
                self.advanced.append(self.ledger.iteration)
            details = {name: detail.value for name, detail in storage.operators.items()}
            self.published.append((AvailableCheckpoint(plan.iteration, STORAGE, details, plan.policy), ledger))
        if not self._writes:
            self._written = 0.0

    @property
    def survives(self) -> Persisted:
        """What a recovery finds without any memory."""
        return Persisted.of([held for held, _ in self.published], self.policy)

    @property
    def lost_tokens(self) -> float:
        """Tokens of experts that such a recovery loses, or repeats, in iterations: the mean over layers."""
        learned, now, lost = self.survives.learned, self.ledger, []
        loads = {ledger.iteration: ledger.load for _, ledger in self.published}
        for layer, row in now.load.items():
            kept = [loads[learned[f"layers.{layer}.expert.{expert}"]][layer][expert] for expert in range(EXPERTS)]
            lost.append((sum(row) - sum(kept)) / sum(tokens_of(now.iteration)[layer]))
        return sum(lost) / LAYERS

    def promise(self, gap: int) -> Promise:
        """What the policy promises if storage takes a snapshot every so many iterations."""
        return Promise.of(self.policy, gap, 1 if self.beside else OUTSTANDING, ALL_REDUCES)

    def overdue(self, gap: int) -> list[str]:
        """The operators that are older than that in storage."""
        return overdue(self.survives, self.promise(gap), OPERATORS, self.ledger.iteration, self.begun[0])


def made(case: str):
    """The policy of a case."""
    name, settings = CASES[case]
    policy = policy_named(name)(OPERATORS, Every(1), **settings)
    if settings.get("gradients"):
        policy.on_sizes(Told())
    return policy


def needed_rate(case: str, beside: bool) -> float:
    """Bytes per iteration with which storage keeps up: those of a snapshot or window, every so many iterations."""
    run = Run(made(case), math.inf, beside).train(12 * EVERY)
    sizes = {held.iteration: sum(1 / 3 if detail == "grad" else 1 for detail in held.operators.values())
             for held, _ in run.published}  # fmt: skip
    later = run.begun[len(run.begun) // 2 :]  # the first ones are full
    windows = (sum(sizes.get(i, 0.0) for i in range(a, b)) for a, b in itertools.pairwise(later))
    return max(windows) / (EVERY if beside else run.policy.schedule.window_length)


@pytest.mark.slow
@each_row("beside", [True, False], ids=["memory", "disk"])
@each_row("case", CASES)
def test_fast_enough_storage_is_not_reported(case, beside):
    if not beside and "gradient" in case:
        pytest.skip("gradients need a memory tier")
    run = Run(made(case), 1.5 * needed_rate(case, beside), beside).train(60 * EVERY)
    late = [lag.overdue for lag in run.lags[len(run.lags) // 2 :]]
    assert not any(late) and not run.overdue(EVERY if beside else 1)
    assert not any("lags behind" in text for text in run.said[-1:])


@pytest.mark.slow
@each_row("beside", [True, False], ids=["memory", "disk"])
@each_row(
    "fails",
    [{}, dict(fails=0.5), dict(fails_every=2)],
    ids=["slow", "slow and failing", "slow, every second one fails"],
)
@each_row("case", CASES)
def test_storage_at_one_third_of_needed_speed_keeps_promise(case, fails, beside):
    """No state is older than promised for the interval at which storage really took snapshots."""
    if not beside and ("gradient" in case):
        pytest.skip("gradients need a memory tier")
    run = Run(made(case), needed_rate(case, beside) / 3, beside, **fails)
    for _ in range(12):
        run.train(10 * EVERY)
        gap = max(b - a for a, b in itertools.pairwise([0, *run.advanced, run.ledger.iteration]))
        assert not run.overdue(gap)
        assert run.stored.persisted == run.survives
    if (
        beside and Capability.WINDOWS in run.policy.requires and "fails_every" in fails
    ):  # no window of three writes is ever complete
        assert run.survives.iteration == 0 and run.lags[-1].overdue == len(OPERATORS)
        return
    assert run.survives.iteration > 0 and run.stored.newest == run.survives.iteration
    if beside:  # otherwise training waits for it
        assert max(lag.overdue for lag in run.lags) > 0
        assert sum("lags behind" in text for text in run.said) == 1
        assert run.health.gauges["storage_age"] == run.ledger.iteration - run.survives.iteration


@each_row("case", CASES)
def test_hanging_storage_is_reported_and_keeps_its_state(case):
    """Everything is missing since then, and is reported; what was there is still of use."""
    run = Run(made(case), 1.5 * needed_rate(case, True)).train(40 * EVERY)
    before, at = run.survives, run.ledger.iteration
    assert run.lags[-1].overdue == 0 and before.iteration > 0
    run.hangs_at = at
    run.train(400)
    assert run.survives == before == run.stored.persisted
    has_promise = [one for one in OPERATORS if one.expert_id is None or run.policy.storage.cycle is not None]
    assert run.lags[-1].overdue == len(has_promise) and run.lags[-1].age == at + 400 - before.iteration
    assert sum("lags behind" in text for text in run.said) == 1


def test_every_policy_is_in_table():
    ours = {name for name, kind in POLICIES.items() if kind.__module__.startswith("moc.")}
    assert {name for name, _ in CASES.values()} == ours


@each_row("gradients", [True, False])
@each_row("slower", [1, 3, 9])
def test_selective_token_loss_is_bounded_by_storage_speed(gradients, slower):
    """The optimum: with n = experts / (experts of a write) writes in a cycle, a cycle takes n times the interval.

    Of equally busy experts, half a cycle is lost on average; :func:`steady_risk` is that for any popularity.  The
    iterations since the newest state in storage are repeated, and its experts lack them too.
    """
    case = "selective, gradients" if gradients else "selective"
    run, lost, age = Run(made(case), needed_rate(case, True) / slower), [], []
    run.train(30 * slower * EVERY)
    for _ in range(60 * slower):
        run.train(1)
        lost.append(run.lost_tokens)
        age.append(run.ledger.iteration - run.survives.iteration)
    gap = (run.begun[-1] - run.begun[len(run.begun) // 2]) / (len(run.begun) - 1 - len(run.begun) // 2)
    of_a_write = sum(".expert." in name for name in run.published[-1][0].operators)
    rates = [tokens * gap for row in tokens_of(1).values() for tokens in row]
    optimum = steady_risk(rates, of_a_write) / (sum(rates) / gap) + sum(age) / len(age)
    assert sum(lost) / len(lost) <= 1.35 * optimum
