"""A run on the model clock: what it adds up to, and recoveries that were reckoned by hand."""

import dataclasses
import itertools
import math
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.simulate.closed_form import expected_ettr
from moc.simulate.cost import Work
from moc.simulate.engine import SimulatedJob, _Run, simulate
from moc.simulate.failures import ClusterEvent, Faults
from moc.simulate.policies import POLICIES, Options
from moc.simulate.policy_costs import CompletePipelines, SimulatedCosts, Strategy, VaryingNodes
from tests.cases import each_row
from tests.errors import raises
from tests.unit.simulate.setups import small_setup

DENSE = SimulatedCosts("full", interval=10, restart_s=5, replay_s=1)
WINDOW = SimulatedCosts("sparse", 4, lag=4, restart_s=2, replay_s=0.5, conversion_s=0.4, conversion=4, local=True)


def run(saving: SimulatedCosts, *events: ClusterEvent, wall_s: float = 100, **job):
    trace = events or (ClusterEvent(10**9, lost=1),)
    return simulate(
        SimulatedJob(**{"iteration_s": 1.0, "nodes": 4, "wall_s": wall_s, **job}), Faults(trace=trace), saving
    )


def assert_adds_up(result):
    parts = (result.useful_s, result.saving_s, result.slower_s, result.recovery_s, result.idle_s)
    assert sum(parts) == pytest.approx(result.wall_s, abs=1e-6)
    assert min(parts) >= -1e-6
    assert sum(result.goodput) * result.wall_s / len(result.goodput) == pytest.approx(result.samples, rel=1e-6, abs=1)


def test_rollback_replays_from_newest_checkpoint():
    result = run(DENSE, ClusterEvent(27.5, lost=1))
    assert result.recovery_s == pytest.approx(0.5 + 5 + 7)  # the iteration cut short, the restart, iterations 20 to 27
    assert result.replayed == 7 and result.longest_s == 12
    assert result.useful_s == pytest.approx(100 - 12.5) and result.iterations == 87


def test_undurable_checkpoint_is_skipped():
    lagging = dataclasses.replace(DENSE, lag=8)
    assert run(lagging, ClusterEvent(27.5, lost=1)).replayed == 17
    assert run(lagging, ClusterEvent(28.5, lost=1)).replayed == 8


def test_failure_during_rollback_resumes_from_replayed_state():
    # 27.5: back to 20; at 32.5 the replay begins; 4 iterations later, nothing newer than 20 is there.
    result = run(DENSE, ClusterEvent(27.5, lost=1), ClusterEvent(36.5, lost=1))
    assert result.recovery_s == pytest.approx(0.5 + 9 + 5 + 7)
    # A checkpoint of the replay counts: with one in every second iteration that of 22 comes back.
    often = dataclasses.replace(DENSE, interval=2, lag=10)
    result = run(often, ClusterEvent(27.5, lost=1), ClusterEvent(32.5 + 9.5, lost=1))
    assert result.replayed == (27 - 16) + (27 - 16)


def test_window_recovery_replays_its_and_later_iterations():
    # 11 iterations: the newest whole window is that of 4 to 7, so 7 iterations, 4 of them with frozen operators.
    result = run(WINDOW, ClusterEvent(11.25, lost=1))
    assert result.replayed == 7
    assert result.recovery_s == pytest.approx(0.25 + 2 + 4 * 0.4 + 3 * 0.5)
    assert run(WINDOW, ClusterEvent(3.5, lost=1)).replayed == 3  # before there is one: from the start


def test_neighbouring_stages_restart_together():
    first, second = ClusterEvent(11.25, lost=1), ClusterEvent(12.25, lost=1)
    both = {run(WINDOW, first, second, stages=8, seed=seed).recovery_s for seed in range(30)}
    alone = 2 + 4 * 0.4 + 3 * 0.5
    assert {round(seconds, 6) for seconds in both} == {round(0.25 + 1 + alone, 6)}
    # The second ends last, whether it has joined the first or not; only the segments tell.
    trace = Faults(trace=(first, second, ClusterEvent(12.5, lost=1)))
    found = set()
    for seed in range(30):
        state = _Run(SimulatedJob(1.0, nodes=4, stages=8, wall_s=13, seed=seed), trace, Strategy(WINDOW))
        while state.now < 13:
            state.step()
        found.add(len(state.segments))
        for (some, _), (others, _) in itertools.combinations(state.segments, 2):
            assert not any(abs(a - b) <= 1 for a in some for b in others)
    assert found == {1, 2, 3}


def test_too_many_lost_nodes_restore_from_storage():
    storage = SimulatedCosts("full", interval=25, restart_s=20, replay_s=1)
    saving = dataclasses.replace(WINDOW, survives=2, beyond=storage)
    assert run(saving, ClusterEvent(31.0, lost=2)).replayed == 31 - 24
    far = run(saving, ClusterEvent(31.0, lost=3))
    assert far.replayed == 31 - 25 and far.recovery_s == pytest.approx(20 + 6)


def test_failure_during_full_replay_restarts_replay():
    storage = SimulatedCosts("full", interval=25, restart_s=20, replay_s=1)
    saving = dataclasses.replace(WINDOW, survives=2, beyond=storage)
    result = run(saving, ClusterEvent(31.0, lost=3), ClusterEvent(54.0, lost=1))
    assert result.recovery_s == pytest.approx(20 + 3 + 20 + 6) and result.failures == 2


def test_job_without_spares_waits_for_node():
    result = run(DENSE, ClusterEvent(20.0, lost=1), ClusterEvent(50.0, gained=1), available=4)
    assert result.idle_s == pytest.approx(30) and result.recovery_s == pytest.approx(5)
    spare = run(DENSE, ClusterEvent(20.0, lost=1), ClusterEvent(50.0, gained=1), available=5)
    assert spare.idle_s == 0


def test_elastic_job_shrinks_and_grows_again():
    elastic = SimulatedCosts("elastic", interval=1, restart_s=5, replay_s=1, members=VaryingNodes(1, 4, grow_s=5))
    result = run(elastic, ClusterEvent(20.0, lost=1), ClusterEvent(65.0, gained=1), available=4)
    assert result.idle_s == 0 and result.recovery_s == pytest.approx(5 + 5, abs=1.4)
    assert result.samples == pytest.approx(512 * (20 + 40 * 3 / 4 + 30), rel=0.01)
    # A node that comes while it replays from storage does not make it forget that.
    lost = dataclasses.replace(elastic, beyond=SimulatedCosts("full", interval=100, restart_s=5, replay_s=1))
    result = run(lost, ClusterEvent(20.0, lost=1), ClusterEvent(30.0, gained=1), available=4)
    assert result.recovery_s == pytest.approx(10 + 5 + 20 - int((30 - 25) * 3 / 4), abs=0.01)
    pairs = dataclasses.replace(elastic, members=CompletePipelines(1, 4, work=Work(pipelines=2)))
    assert run(pairs, ClusterEvent(20.0, lost=1), available=4).samples == pytest.approx(512 * (20 + 75 / 2), rel=0.01)


def test_fewer_nodes_count_by_computed_samples():
    """So a job that goes on with half of its nodes is not as good as one that has all of them."""
    elastic = SimulatedCosts("elastic", interval=10, stall_s=2, restart_s=5, replay_s=1, members=VaryingNodes(1, 4))
    halved = run(elastic, ClusterEvent(0.0, lost=2), available=4, wall_s=1000)
    whole = run(elastic, wall_s=1000)
    assert whole.slower_s == 0 and whole.useful_s == pytest.approx(1000 / 1.2)
    assert halved.useful_s == pytest.approx((1000 - 5) / 1.2 / 2) and halved.slower_s == pytest.approx((1000 - 5) / 2)
    for result in (halved, whole):
        assert result.useful_s == pytest.approx(result.samples / 512)
        assert result.overhead == pytest.approx(0.2)
    assert_adds_up(halved)


def test_lost_nodes_return_after_repair():
    faults = Faults(trace=(ClusterEvent(10**9, lost=1),))
    one = SimulatedJob(1.0, nodes=4, wall_s=1000, spares=0, repair_s=50, seed=3)
    result = simulate(one, Faults(300.0), DENSE)
    assert result.failures > 1 and result.idle_s == pytest.approx(50 * result.failures, rel=0.4)
    assert simulate(one, faults, DENSE).ettr == 1


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    mtbf_s=st.floats(30, 1e5),
    evenly=st.booleans(),
    together=st.integers(1, 3),
    while_training=st.booleans(),
    spares=st.sampled_from([None, 0, 1, 4]),
    repair_s=st.sampled_from([60.0, 3600.0, math.inf]),
    seed=st.integers(0, 10**6),
)
def test_simulated_time_adds_up(name, mtbf_s, evenly, together, while_training, spares, repair_s, seed):
    setup = small_setup()
    job = SimulatedJob(2.0, nodes=4, stages=4, wall_s=20_000, spares=spares, repair_s=repair_s, seed=seed)
    faults = Faults(mtbf_s, evenly, together, while_training=while_training)
    result = simulate(job, faults, POLICIES[name](setup, Options(mtbf_s=mtbf_s)))
    assert_adds_up(result)
    assert 0 <= result.ettr <= 1 and 0 <= result.plt


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    gaps=st.lists(st.floats(0, 4000), min_size=1, max_size=30),
    changes=st.lists(st.integers(-4, 4).filter(bool), min_size=30, max_size=30),
    available=st.integers(0, 8),
)
def test_simulated_traces_add_up(name, gaps, changes, available):
    times = itertools.accumulate(gaps)
    events = [ClusterEvent(at, max(0, -n), max(0, n)) for at, n in zip(times, changes, strict=False)]
    job = SimulatedJob(2.0, nodes=4, stages=4, wall_s=20_000, available=available)
    result = simulate(job, Faults(trace=tuple(events)), POLICIES[name](small_setup(), Options()))
    assert_adds_up(result)
    assert result.useful_s == pytest.approx(2.0 * result.samples / 512, abs=1e-6)


@each_row("name", sorted(POLICIES))
def test_same_seed_gives_same_run(name):
    def once(seed):
        job = SimulatedJob(2.0, nodes=4, stages=4, seed=seed, spares=2, repair_s=900)
        return simulate(job, Faults(900.0), POLICIES[name](small_setup(), Options()))

    assert once(1) == once(1) != once(2)


@each_row("name", sorted(set(POLICIES) - {"none"}))
def test_ettr_increases_with_rarer_failures(name):
    ettr = [
        fmean(
            simulate(
                SimulatedJob(2.0, nodes=4, stages=4, seed=seed, wall_s=50_000),
                Faults(mtbf_s),
                POLICIES[name](small_setup(), Options(mtbf_s=mtbf_s)),
            ).ettr
            for seed in range(10)
        )
        for mtbf_s in (300, 900, 2700, 8100, 24300)
    ]
    assert ettr == sorted(ettr) and ettr[0] < ettr[-1]


@each_row("name", sorted(POLICIES))
def test_run_without_failures_loses_only_overhead(name):
    strategy = POLICIES[name](small_setup(), Options(mtbf_s=900))
    stall_s = strategy.saving.per_iteration_s()
    result = simulate(SimulatedJob(2.0, nodes=4), Faults(math.inf), strategy)
    assert result.ettr == pytest.approx(2 / (2 + stall_s)) and result.failures == 0
    assert result.overhead == pytest.approx(stall_s / 2)


@each_row("saving", [dataclasses.replace(DENSE, stall_s=3), WINDOW], ids=lambda s: s.name)
def test_failures_in_training_time_match_closed_form(saving):
    saving = dataclasses.replace(saving, replay_s=saving.replay_s + (0 if saving.local else saving.per_iteration_s()))
    faults = Faults(100.0, while_training=True)
    ettr = fmean(simulate(SimulatedJob(1.0, nodes=4, wall_s=200_000, seed=s), faults, saving).ettr for s in range(5))
    assert ettr == pytest.approx(expected_ettr(saving, 1.0, 100.0), abs=0.01)


def test_simulation_work_depends_only_on_failures():
    """So twelve hours of 16,384 GPUs take as long as of 16."""

    def steps(iteration_s, nodes):
        state = _Run(
            SimulatedJob(iteration_s, nodes=nodes), Faults(600.0), Strategy(dataclasses.replace(DENSE, restart_s=1))
        )
        for count in itertools.count():
            if state.now >= state.job.wall_s:
                return count, state.failures
            state.step()

    few, failures = steps(100.0, 2)
    many, more = steps(0.001, 2048)
    assert more == failures and many <= 2 * failures + 1 and few <= 2 * failures + 1


def test_k_increases_when_failures_consume_its_share():
    options = Options(k=1, plt_limit=0.01, interval=5)
    result = simulate(SimulatedJob(2.0, nodes=4), Faults(600.0), POLICIES["pec"](small_setup(), options))
    assert result.k > 1 and 0 < result.plt <= 0.01
    assert list(result.ks) == sorted(result.ks) and list(result.plts) == sorted(result.plts)
    fixed = dataclasses.replace(options, dynamic=False)
    constant = simulate(SimulatedJob(2.0, nodes=4), Faults(600.0), POLICIES["pec"](small_setup(), fixed))
    assert constant.k == 1 and constant.plt > 0.01
    assert constant.saving_s <= result.saving_s


@each_row("change", [{"iteration_s": 0}, {"nodes": 0}, {"wall_s": -1}, {"spares": -1}, {"parts": 0}], ids=str)
def test_invalid_job_is_refused(change):
    with raises("value-out-of-range", str(*change.values())):
        SimulatedJob(**{"iteration_s": 1.0, **change})


def test_trace_in_training_time_names_positions_of_run():
    places = (
        ClusterEvent(27.5, lost=1),
        ClusterEvent(28.25, lost=1),
        ClusterEvent(0.0, lost=1, after_s=2.0),
        ClusterEvent(40.5, lost=1),
    )
    result = simulate(SimulatedJob(1.0, nodes=4, wall_s=100), Faults(trace=places, while_training=True), DENSE)
    # In the middle of the 28th iteration; when that is done, and a quarter of the next; 2 s later, while that recovers;
    # and in the middle of the 41st, which is a place behind the checkpoint of 40.
    lost = (0.5 + 5 + 7) + (0.25 + 2 + 5 + 8) + (0.5 + 5)
    assert result.recovery_s == pytest.approx(lost) and result.failures == 4
    assert result.iterations == 100 - math.ceil(lost)
