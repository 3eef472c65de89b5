"""The program's ways back: as its plan function has them, and as recoveries reckoned by hand."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.recovery.copy_placement import place_copies, survival
from moc.simulate.engine import SimulatedJob, simulate
from moc.simulate.failures import ClusterEvent, Faults
from moc.simulate.policies import POLICIES, Options
from moc.simulate.policy_costs import Loss, RecoveryCosts, SimulatedCosts, program_recovery
from tests.cases import each_row
from tests.errors import raises
from tests.unit.simulate.setups import small_setup

PARTS = RecoveryCosts(detect_s=0.5, regroup_s=1.5, transfer_s=2.0, warm_up_s=1.0, frozen_s=0.75)
EACH = program_recovery(SimulatedCosts("full", interval=1), PARTS, iteration_s=1.0, lag=0.25)
EIGHTH = program_recovery(SimulatedCosts("full", interval=8, stall_s=0.8), PARTS, iteration_s=1.0, lag=1.5)
WINDOW = program_recovery(SimulatedCosts("sparse", interval=3), PARTS, iteration_s=1.0, lag=0.25, sparse=True)


def run(saving, *at, wall_s=100.0):
    faults = Faults(trace=tuple(ClusterEvent(when, lost=1) for when in at))
    return simulate(SimulatedJob(1.0, nodes=4, stages=4, wall_s=wall_s), faults, saving)


def assert_adds_up(result):
    parts = (result.useful_s, result.saving_s, result.slower_s, result.recovery_s, result.idle_s)
    assert sum(parts) == pytest.approx(result.wall_s, abs=1e-6) and min(parts) >= -1e-6


def test_survivors_keep_state_if_lost_state_is_available():
    result = run(EACH, 27.5)
    assert result.replayed == 0 and result.recovery_s == pytest.approx(0.5 + PARTS.restart_s)
    assert PARTS.restart_s == 5.0


def test_workers_return_to_newest_snapshot_otherwise():
    assert run(EACH, 27.125).recovery_s == pytest.approx(0.125 + PARTS.restart_s + 1)  # that of 27 is not copied yet
    # An iteration takes 1.1 s with what is saved: 27.5 of them; the newest snapshot is that of 24.
    result = run(EIGHTH, 27.5 * 1.1)
    assert result.replayed == 3 and result.recovery_s == pytest.approx(0.55 + PARTS.restart_s + 3 * 1.1)
    assert run(EIGHTH, 25.0 * 1.1).replayed == 25 - 16  # that of 24 is not written yet


def test_window_is_replayed_by_all():
    # The window of 6, 7 and 8 is whole, that of 9, 10 and 11 is not: two iterations with frozen operators, then two.
    result = run(WINDOW, 10.5)
    assert result.replayed == 10 - 6 and result.recovery_s == pytest.approx(0.5 + PARTS.restart_s + 2 * 0.75 + 2)
    assert run(WINDOW, 11.125).replayed == 11 - 6 and run(WINDOW, 11.5).replayed == 11 - 9
    assert run(WINDOW, 1.5).replayed == 1  # nothing is there yet: from the start


def test_lost_stage_replays_window_without_others():
    parts = dataclasses.replace(PARTS, alone_s=0.5)
    alone = program_recovery(SimulatedCosts("sparse", interval=3), parts, 1.0, 0.25, sparse=True)
    assert alone.local and not WINDOW.local
    assert run(alone, 10.5).recovery_s == pytest.approx(0.5 + PARTS.restart_s + 2 * 0.75 + 2 * 0.5)
    # Who is beside it joins it, and who is not replays at the same time: see test_engine.
    assert run(alone, 10.5, 11.5).recovery_s == pytest.approx(0.5 + 1 + PARTS.restart_s + 2 * 0.75 + 2 * 0.5)


def test_each_simultaneously_lost_worker_adds_time():
    saving = dataclasses.replace(EACH, more_s=2.0)
    faults = Faults(trace=(ClusterEvent(27.5, lost=3),))
    assert simulate(SimulatedJob(1.0, nodes=4, wall_s=100), faults, saving).recovery_s == pytest.approx(0.5 + 5 + 2 * 2)
    assert run(saving, 27.5).recovery_s == pytest.approx(0.5 + 5)


def test_replicas_send_state_without_replay():
    for saving in (EACH, EIGHTH, WINDOW):
        alike = dataclasses.replace(saving, replicas=True)
        assert [alike.restored(n) for n in (0, 0.5, 10.1, 11, 26.9)] == [0, 0, 10, 11, 26]


@given(
    interval=st.integers(1, 9),
    lag=st.floats(0, 20),
    iterations=st.floats(0, 200),
    sparse=st.booleans(),
    exact=st.booleans(),
)
def test_plan_function_resumes_where_formula_predicts(interval, lag, iterations, sparse, exact):
    saving = program_recovery(SimulatedCosts("any", interval=interval, exact=exact), PARTS, 1.0, lag, sparse=sparse)
    if exact or not sparse:  # no policy is both
        assert saving.restored(iterations) == SimulatedCosts.restored(saving, iterations)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    mtbf_s=st.floats(30, 1e5),
    together=st.integers(1, 4),
    spares=st.sampled_from([None, 0, 1]),
    parts=st.builds(RecoveryCosts, *[st.floats(0, 60)] * 4, *[st.one_of(st.none(), st.floats(0, 5))] * 2),
    seed=st.integers(0, 10**6),
)
def test_simulated_time_adds_up(name, mtbf_s, together, spares, parts, seed):
    setup = dataclasses.replace(small_setup(), program=parts)
    job = SimulatedJob(2.0, nodes=4, stages=4, wall_s=20_000, spares=spares, repair_s=600.0, seed=seed)
    result = simulate(job, Faults(mtbf_s, together=together), POLICIES[name](setup, Options(mtbf_s=mtbf_s)))
    assert_adds_up(result)
    assert 0 <= result.ettr <= 1


@each_row("name", ["blocking", "checkfreq", "full", "pec", "sparse"])
def test_policy_state_resumes_with_the_program(name):
    papers, program = (
        POLICIES[name](dataclasses.replace(small_setup(), program=parts), Options(mtbf_s=900)).saving
        for parts in (None, PARTS)
    )
    assert program.restart_s == PARTS.restart_s != papers.restart_s
    assert (program.exact, program.stall_s > 0) == (papers.exact, papers.stall_s > 0)
    assert papers.local == (name == "sparse") and not program.local
    few = simulate(SimulatedJob(2.0, nodes=4), Faults(math.inf), program)
    assert few.ettr == pytest.approx(2 / (2 + program.per_iteration_s()))


def test_lost_nodes_determine_whether_copies_survive():
    copies = place_copies(4, 1)
    saving = dataclasses.replace(EACH, survives=1, copies=copies, beyond=EIGHTH)
    chance = survival(copies, 2)
    assert 0 < chance < 1
    assert saving.recovery_costs(Loss(1, of=6), 0.999) == saving and saving.recovery_costs(Loss(3, of=6), 0.0) == EIGHTH
    assert (
        saving.recovery_costs(Loss(2, of=6), chance - 0.01) == saving
        and saving.recovery_costs(Loss(2, of=6), chance + 0.01) == EIGHTH
    )
    assert saving.recovery_costs(Loss(5, of=6), 0.0) == EIGHTH and EACH.recovery_costs(Loss(4, of=6), 0.999) == EACH
    assert dataclasses.replace(saving, copies=None).recovery_costs(Loss(2, of=6), 0.0) == EIGHTH
    full = POLICIES["full"](small_setup(), Options(mtbf_s=900, replicas=1)).saving
    assert (full.survives, full.copies) == (1, copies)


@each_row("wrong", [-1.0, math.nan, math.inf])
def test_invalid_recovery_costs_are_refused(wrong):
    with raises("value-out-of-range", "regroup_s", str(wrong)):
        dataclasses.replace(PARTS, regroup_s=wrong)
