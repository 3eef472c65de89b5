"""The adaptive configuration: nothing that the equations know of is better, and what is free is taken."""

import dataclasses
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.policy import Every, policy_named
from moc.policy.pec_tuner import PecLimits, PecMeasurements, candidate_expert_counts, choose_pec_settings, uniform_plt
from moc.policy.token_ledger import TokenLedger
from moc.state.shape import ModelShape, model_operators
from tests.cases import each_row
from tests.errors import raises
from tests.unit.policy.test_pec import persist

MACHINE = PecMeasurements(
    busiest_rank_bytes={k: 100 + 50 * k for k in range(1, 9)},
    forward_backward_s=3.0,
    iteration_s=4.0,
    snapshot_bandwidth=100.0,
    persist_bandwidth=10.0,
    restart_s=60.0,
    faults_per_iteration=1e-3,
)


@st.composite
def machines(draw):
    sizes = sorted(draw(st.lists(st.integers(1, 1000), min_size=1, max_size=5)))
    seconds = st.floats(0.1, 50)
    return PecMeasurements(
        dict(enumerate(sizes, start=1)),
        *(draw(seconds) for _ in range(2)),
        *(draw(st.floats(1, 1000)) for _ in range(2)),
        draw(st.floats(0, 100)),
        draw(st.sampled_from([1e-6, 1e-4, 1e-2, 0.3])),
    )


def possible(machine):
    """All pairs of numbers with all intervals, up to far beyond the best one."""
    for k_snapshot in machine.busiest_rank_bytes:
        for k_persist in (k for k in machine.busiest_rank_bytes if k <= k_snapshot):
            least = -(-machine.persist_s(k_persist) // machine.iteration_s)
            for interval in (*range(max(1, int(least)), int(least) + 60), *(int(least) + 10**n for n in (2, 3, 4))):
                yield k_snapshot, k_persist, interval


@settings(deadline=None)
@given(machines(), st.sampled_from([None, 0.0, 0.001, 0.0375, 0.5]))
def test_nothing_is_better(machine, limit):
    choice = choose_pec_settings(machine, PecLimits(limit))
    assert choice.k_persist <= choice.k_snapshot
    assert choice.interval * machine.iteration_s >= machine.persist_s(choice.k_persist) * (1 - 1e-12)
    assert choice.overhead_s == machine.overhead_s(choice.k_snapshot, choice.interval)
    assert limit is None or choice.plt <= limit
    for k_snapshot, k_persist, interval in possible(machine):
        other = uniform_plt(machine.num_experts, machine.faults_per_iteration, 0.5, k_snapshot, k_persist, interval)
        if limit is None or other <= limit:
            assert choice.overhead_s <= machine.overhead_s(k_snapshot, interval) * (1 + 1e-9)


@settings(deadline=None)
@given(machines())
def test_k_snapshot_is_the_largest_that_hides(machine):
    hidden = [k for k in machine.busiest_rank_bytes if machine.snapshot_s(k) <= machine.forward_backward_s]
    choice = choose_pec_settings(machine)
    if hidden:
        assert choice.k_snapshot == max(hidden) and choice.save_s == 0


def test_the_example():
    """(100 + 50 K) / 100 <= 3 s: 4 experts hide.  One of them takes 15 s to storage, that is 4 iterations."""
    choice = choose_pec_settings(MACHINE)
    assert (choice.k_snapshot, choice.k_persist, choice.interval, choice.save_s) == (4, 1, 4, 0)
    assert choice.overhead_s == pytest.approx(1e-3 * (60 + 4 / 2 * 4))
    # all 8: 2 s of stall, 50 s to storage
    assert choice.full_overhead_s == pytest.approx(min(2 / i + 1e-3 * (60 + i / 2 * 4) for i in range(13, 99)))


def test_experts_that_cost_no_time_are_taken():
    """More experts at the same bottleneck, and a storage that has time left in the same interval."""
    same = {1: 150, 2: 200, 3: 300, 4: 300, 5: 301, 8: 400}
    choice = choose_pec_settings(dataclasses.replace(MACHINE, busiest_rank_bytes=same, persist_bandwidth=50.0))
    assert (choice.k_snapshot, choice.k_persist, choice.interval) == (4, 2, 1)
    less = choose_pec_settings(dataclasses.replace(MACHINE, busiest_rank_bytes={k: 150 for k in (1, 2, 3)}))
    assert (less.k_snapshot, less.k_persist) == (3, 3)


def test_a_limit_takes_more_experts():
    free, limited = choose_pec_settings(MACHINE), choose_pec_settings(MACHINE, PecLimits(0.007))
    assert free.plt > 0.007 >= limited.plt
    assert (free.k_persist, limited.k_persist) == (1, 2) and limited.interval > free.interval


def test_a_limit_may_be_kept_by_snapshots_that_are_more_frequent():
    """Nothing hides, and storage is quick: a snapshot costs 1 s and more, so that they are seldom without a limit."""
    machine = dataclasses.replace(MACHINE, forward_backward_s=0.5, persist_bandwidth=1e6)
    free, limited = choose_pec_settings(machine), choose_pec_settings(machine, PecLimits(0.07))
    assert (free.k_snapshot, free.interval) == (1, 22) and free.plt == pytest.approx(0.077)
    assert (limited.k_snapshot, limited.interval) == (1, 20)


def test_a_limit_of_nothing_saves_everything():
    strict = choose_pec_settings(MACHINE, PecLimits(0.0))
    assert (strict.k_snapshot, strict.k_persist, strict.plt) == (8, 8, 0)
    assert strict.overhead_s == strict.full_overhead_s
    with raises("plt-limit-too-low"):
        choose_pec_settings(MACHINE, PecLimits(0.1), lambda *_: 0.2)


def test_equation_10():
    assert [MACHINE.save_s(k) for k in (1, 4, 5, 8)] == [0, 0, 0.5, 2]


def test_saving_less_or_more_often_costs_less_than_everything():
    """Equation 16, and both ways to it that section 6.2.5 names."""
    cost = MACHINE.overhead_s
    assert cost(4, 20) < cost(8, 20)
    assert MACHINE.save_s(5) / 5 == MACHINE.save_s(8) / 20 and cost(5, 5) < cost(8, 20)


@each_row(("k_snapshot", "k_persist", "interval"), [(1, 1, 1), (3, 1, 2), (3, 2, 1), (4, 2, 3), (5, 4, 1), (8, 8, 5)])
@each_row("from_storage", [0, 3])
def test_the_expected_plt_is_that_of_a_ledger(k_snapshot, k_persist, interval, from_storage):
    """A policy plans for 8 equally busy experts, and at some checkpoint some were on a node that is lost."""
    shape = ModelShape((1,), 64, 256, 64, 64, 16, 1000, num_experts=8, expert_ffn_hidden_size=256)
    policy = policy_named("pec")(model_operators(shape), Every(interval), k=k_snapshot, k_persist=k_persist)
    ledger, losses = TokenLedger.empty({0: 8}), []
    for iteration in range(1, 400 * interval + 1):
        ledger = ledger.after_iteration({0: [5] * 8})
        if policy.plan(iteration) is None:
            continue
        plan, part = persist(policy, iteration)
        saved = [[e for e in range(8) if f"layers.0.expert.{e}" in one.operators] for one in (plan, part)]
        ledger = (
            ledger.with_snapshot({0: saved[0]}, {0: saved[1]})
            .with_snapshot_completed(iteration)
            .with_persist_completed(iteration)
        )
        if iteration > 200 * interval:
            (memory,), (storage,) = ledger.memory, ledger.storage
            for first in range(8):  # every expert once from storage, so that the mean over them is taken
                gone = [(first + i) % 8 for i in range(from_storage)]
                restored = {e: (storage if e in gone else memory)[e].iteration for e in range(8)}
                losses.append(ledger.after_recovery({0: restored}).plt() * ledger.iteration)
    expected = uniform_plt(8, 1.0, from_storage / 8, k_snapshot, k_persist, interval)
    assert sum(losses) / len(losses) == pytest.approx(expected, rel=1e-2)


def test_the_reason_is_said():
    said = choose_pec_settings(MACHINE, PecLimits(0.05)).reason
    assert re.findall(r"[\d.]+ (?:s|ms|%|experts?|iterations)(?= |,|;|:|\)|\.)|(?<=one of )\d+", said) == [
        *("4 experts", "3 s", "3 s", "5", "3.5 s"),
        *("15 s", "4 iterations", "16 s"),
        *("68 ms", "186 ms"),
        *("0.8 %", "5 %"),
    ]
    waits = choose_pec_settings(dataclasses.replace(MACHINE, forward_backward_s=0.5)).reason
    assert all(figure in waits for figure in ("of 1 expert ", " 1.5 s ", " 0.5 s ", " 1 s.", " 7.7 % "))
    quick = choose_pec_settings(dataclasses.replace(MACHINE, snapshot_bandwidth=1e3)).reason
    assert "all 8 experts" in quick and " 0.5 s " in quick


def test_numbers_of_experts_that_are_looked_at():
    assert (
        candidate_expert_counts(1) == [1]
        and candidate_expert_counts(3) == [1, 2, 3]
        and candidate_expert_counts(16) == list(range(1, 17))
    )
    assert candidate_expert_counts(17) == [1, 2, 4, 8, 16, 17] and candidate_expert_counts(64) == [
        1,
        2,
        4,
        8,
        16,
        32,
        64,
    ]


@each_row(
    "wrong",
    [
        {"busiest_rank_bytes": {}},
        {"busiest_rank_bytes": {0: 1, 1: 2}},
        {"iteration_s": 0.0},
        {"iteration_s": math.inf},
        {"restart_s": -1.0},
        {"faults_per_iteration": 0.0},
    ],
    ids=str,
)
def test_what_cannot_have_been_measured_is_refused(wrong):
    with raises("value-out-of-range"):
        dataclasses.replace(MACHINE, **wrong)


def test_a_restart_may_take_no_time():
    assert dataclasses.replace(MACHINE, restart_s=0.0).overhead_s(4, 4) == pytest.approx(1e-3 * 4 / 2 * 4)
