"""Dynamic-K keeps the lost tokens below their limit, over any number of faults."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moc.policy.dynamic_k import DynamicK
from moc.policy.ledger import Ledger
from moc.policy.pec_selection import sequential_experts
from tests.errors import raises
from tests.unit.policy.routing import RECORDED, made_up, recorded

FAULTS, LIMIT = 32, 0.0375


def faulty_run(trace, start: DynamicK, dynamic: bool) -> tuple[list[int], list[float]]:
    """Trains over a trace with a snapshot after every iteration and evenly spread faults.

    After each fault the run goes on from the newest snapshot, and every expert from its newest version.

    Returns:
        K and the PLT of the whole training after each fault.
    """
    num_experts = {layer: len(row) for layer, row in trace[0].items()}
    whole = {layer: sum(sum(iteration[layer]) for iteration in trace) for layer in trace[0]}
    faults = {len(trace) * (fault + 1) // (FAULTS + 1) for fault in range(FAULTS)}
    ledger, now, ks, plts = Ledger.of(num_experts), start, [], []
    for iteration, counts in enumerate(trace, start=1):
        ledger = ledger.after(counts)
        chosen = {
            layer: sequential_experts(iteration, place, now.k, num_experts[layer], 1)
            for place, layer in enumerate(num_experts)
        }
        stored = ledger.begun(chosen)
        ledger = stored.snapshotted(iteration)
        if iteration in faults:
            versions = {
                layer: {expert: version.iteration for expert, version in enumerate(ledger.memory[place])}
                for place, layer in enumerate(ledger.layers)
            }
            before = ledger.plt(whole)
            ledger = stored.recovered(versions)
            if dynamic:
                now = now.recovered(ledger.plt(whole) - before)
            ks.append(now.k)
            plts.append(ledger.plt(whole))
    return ks, plts


def assert_kept_below_the_limit(trace, num_experts):
    ks, plts = faulty_run(trace, DynamicK(1, num_experts, LIMIT), dynamic=True)
    assert len(plts) == FAULTS and max(plts) < LIMIT
    assert ks == sorted(ks) and 1 < ks[-1] < num_experts  # it has grown, and need not save all
    fixed = faulty_run(trace, DynamicK(1, num_experts, LIMIT), dynamic=False)[1]
    assert fixed[-1] > LIMIT
    quarters = [fixed[i] / fixed[-1] for i in (7, 15, 23)]
    assert quarters == pytest.approx([0.25, 0.5, 0.75], abs=0.06)  # Figure 15(b): a fixed K loses in proportion


def test_32_faults_of_a_run_that_is_made_up():
    assert_kept_below_the_limit(made_up(iterations=1600, layers=3, experts=16), 16)


@pytest.mark.skipif(not RECORDED.exists(), reason="the recorded loads of SmartMoE are not on this machine")
def test_32_faults_of_a_run_that_was_recorded():
    assert_kept_below_the_limit(recorded(layers=24), 32)


@given(st.integers(1, 40), st.data())
def test_the_limit_is_kept_if_no_fault_costs_more_than_a_share(num_experts, data):
    now = DynamicK(data.draw(st.integers(1, num_experts)), num_experts, LIMIT)
    total = 0.0
    for cost in data.draw(st.lists(st.floats(0, 1), max_size=60)):
        if now.k == num_experts:
            cost = 0
        total += cost * now.share
        now = now.recovered(cost * now.share)
        assert total <= LIMIT * (1 + 1e-12)


@pytest.mark.parametrize(("k", "experts", "ks"), [(1, 16, [1, 2, 4, 8, 16]), (3, 16, [3, 6, 12, 16]), (5, 5, [5])])
def test_k_doubles_until_all_are_saved(k, experts, ks):
    now, seen = DynamicK(k, experts, LIMIT), [k]
    assert now.share == LIMIT / len(ks)
    for _ in range(2 * len(ks) + 1):
        now = now.recovered(0.6 * now.share)
        seen += [now.k] if now.k != seen[-1] else []
    assert seen == ks


def test_k_stays_until_its_share_is_passed():
    now = DynamicK(1, 8, 0.04)  # four shares of one percent
    assert now.recovered(0.01).k == 1
    assert now.recovered(0.01).recovered(0.001).k == 2
    assert now.recovered(0.01).recovered(0.001).booked == pytest.approx(0.001)
    assert now.recovered(0.0201).k == 4  # one fault that costs two shares
    assert now.recovered(0).recovered(0) == now


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((0, 4), "experts-per-snapshot-invalid"),
        ((5, 4), "experts-per-snapshot-invalid"),
        ((1, 4, 0.0), "value-out-of-range"),
        ((1, 4, 1.5), "value-out-of-range"),
    ],
    ids=str,
)
def test_what_is_not_possible_is_refused(arguments, code):
    with raises(code):
        DynamicK(*arguments)


def test_a_recovery_gives_no_tokens_back():
    with raises("tokens-not-counted", "-0.1"):
        DynamicK(1, 4).recovered(-0.1)
