"""Jobs that go on with fewer nodes, and with more when they come; timelines were reckoned by hand.

An iteration on all four nodes takes a second, and 4 / n seconds on n of them.
"""

import dataclasses

import pytest

from moc.simulate.cost import Work
from moc.simulate.engine import SimulatedJob, simulate
from moc.simulate.failures import ClusterEvent, Faults
from moc.simulate.policies import POLICIES, Options
from moc.simulate.policy_costs import CompletePipelines, Loss, SimulatedCosts, VaryingNodes
from tests.errors import raises
from tests.unit.simulate.setups import small_setup


def live(members: VaryingNodes | None, **changes) -> SimulatedCosts:
    """Costs of a job that replays nothing."""
    return SimulatedCosts("live", interval=1, restart_s=5, replay_s=1, members=members, **changes)


def run(saving: SimulatedCosts, *events: ClusterEvent, available: int | None = 4):
    result = simulate(SimulatedJob(1.0, nodes=4, wall_s=100, available=available), Faults(trace=events), saving)
    assert sum(result.nodes_s.values()) == pytest.approx(100)
    parts = (result.useful_s, result.saving_s, result.slower_s, result.recovery_s, result.idle_s)
    assert sum(parts) == pytest.approx(100)
    return result


NOTHING = ClusterEvent(1e9, lost=1)


def test_job_grows_at_once_when_all_nodes_are_ready():
    result = run(
        live(VaryingNodes(2, 4, grow_wait_s=10, grow_s=3)), ClusterEvent(20, lost=1), ClusterEvent(40, gained=1)
    )
    # 20 iterations; 5 s; until 40 another 11.25, of which the quarter is lost; 3 s; 57 on all nodes
    assert result.samples == pytest.approx(512 * (20 + 11 + 57))
    assert result.recovery_s == pytest.approx(5 + 0.25 * 4 / 3 + 3)
    assert result.nodes_s == pytest.approx({3: 20, 4: 80})
    assert result.failures == 1  # a node that comes is none


def test_job_waits_to_grow_while_nodes_are_missing():
    result = run(
        live(VaryingNodes(2, 4, grow_wait_s=10, grow_s=3)), ClusterEvent(20, lost=2), ClusterEvent(40, gained=1)
    )
    # until 50 on two nodes: 12.5 iterations after the restart, and half of one is lost; 3 s; 47 s on three
    assert result.samples == pytest.approx(512 * (20 + 12 + 47 * 3 / 4))
    assert result.nodes_s == pytest.approx({2: 30, 3: 50, 4: 20})
    both = run(
        live(VaryingNodes(2, 4, grow_wait_s=10, grow_s=3)),
        ClusterEvent(20, lost=2),
        ClusterEvent(40, gained=1),
        ClusterEvent(44, gained=1),
    )
    assert both.nodes_s == pytest.approx({2: 24, 4: 76})


def test_joining_node_that_leaves_early_costs_nothing():
    events = ClusterEvent(20, lost=2), ClusterEvent(40, gained=1), ClusterEvent(45, lost=1)
    found = [
        simulate(
            SimulatedJob(1.0, nodes=4, wall_s=100, available=4, seed=seed),
            Faults(trace=events),
            live(VaryingNodes(2, 4, grow_wait_s=10, grow_s=3)),
        )
        for seed in range(30)
    ]
    assert {result.failures for result in found} == {1, 2}  # by chance it is the one that waits
    assert {result.recovery_s for result in found if result.failures == 1} == {5.0}


def test_nodes_joining_during_connection_are_added_later():
    result = run(live(VaryingNodes(1, 4, grow_s=3)), ClusterEvent(20, lost=1), ClusterEvent(22, gained=1))
    assert result.recovery_s == pytest.approx(5 + 3) and result.nodes_s == pytest.approx({3: 5, 4: 95})


def test_job_starts_with_fewer_nodes_after_wait():
    result = run(live(VaryingNodes(2, 4, grow_wait_s=10)), NOTHING, available=3)
    assert result.idle_s == 10 and result.samples == pytest.approx(512 * 85 * 3 / 4)
    all_there = run(live(VaryingNodes(2, 4, grow_wait_s=10)), NOTHING)
    assert all_there.idle_s == 0 and all_there.samples == 512 * 100


def test_job_with_fewer_than_min_nodes_waits():
    result = run(live(VaryingNodes(3, 4, grow_wait_s=10)), ClusterEvent(20, lost=2), ClusterEvent(50, gained=1))
    assert result.idle_s == 30 and result.samples == pytest.approx(512 * (20 + 45 * 3 / 4))
    assert result.nodes_s == pytest.approx({0: 30, 3: 50, 4: 20})


STORED = SimulatedCosts("stored", interval=25, restart_s=20, replay_s=1, why="no copy was left")


def assert_fell_back(result, *words):
    """Once, to storage, for a reason with these words."""
    ((why, times),) = result.fallbacks.items()
    assert times == result.fell_back == 1 and all(word in why for word in words)


def test_losses_add_up_until_replaced():
    saving = live(VaryingNodes(4, 4), survives=1, beyond=STORED)
    apart = run(saving, ClusterEvent(31, lost=1), ClusterEvent(40, lost=1), available=None)
    assert apart.recovery_s == pytest.approx(5 + 5) and not apart.fallbacks
    # 2 s, then from storage: 20 s, and iterations 25 to 31 again
    together = run(saving, ClusterEvent(31, lost=1), ClusterEvent(33, lost=1), available=None)
    assert together.recovery_s == pytest.approx(2 + 20 + 6)
    assert_fell_back(together, "copy", "2 of 4")


def test_loss_while_waiting_counts():
    saving = live(None, survives=1, beyond=STORED)
    events = ClusterEvent(31, lost=1), ClusterEvent(40, lost=1), ClusterEvent(50, gained=2)
    result = run(saving, *events)
    assert result.idle_s == 19 and result.recovery_s == pytest.approx(20 + 6)
    assert_fell_back(result, "copy", "2 of 4")


def test_memory_snapshots_need_same_node_count():
    changed = dataclasses.replace(STORED, why="other number of nodes")
    saving = live(VaryingNodes(2, 4, grow_s=7), changed=changed)
    fewer = run(saving, ClusterEvent(31, lost=1))
    assert fewer.recovery_s == pytest.approx(20 + 6 * 4 / 3)
    assert_fell_back(fewer, "number", "1 of 4")
    spare = run(saving, ClusterEvent(31, lost=1), available=50)
    assert spare.recovery_s in (0, 5) and not spare.fallbacks
    # Nodes that come cost no iteration again: workers save, and start anew.
    grown = run(saving, ClusterEvent(31, lost=1), ClusterEvent(75, gained=1))
    assert grown.replayed == fewer.replayed == 6
    assert grown.recovery_s == pytest.approx(20 + 8 + 7, abs=4 / 3)


def test_pipelines_divide_batch():
    members = CompletePipelines(1, 6, work=Work(global_batch=60, micro_batch=1, pipelines=6), stages=3)
    assert [members.usable(nodes) for nodes in (None, 9, 6, 5, 4, 3, 2, 1, 0)] == [6, 6, 6, 5, 4, 3, 2, 1, 0]
    assert members.slowdown(6) == 1 and members.slowdown(5) == pytest.approx((12 + 2) / (10 + 2))
    odd = CompletePipelines(2, 6, work=Work(global_batch=24, micro_batch=2, pipelines=3))
    assert [odd.usable(nodes) for nodes in (6, 5, 4, 3, 2, 1)] == [6, 4, 4, 2, 2, 0]
    assert odd.slowdown(4) == pytest.approx(6 / 4)


def test_invalid_node_range_is_refused():
    with raises("value-out-of-range", "5", "4"):
        VaryingNodes(5, 4)


def test_ordinary_policies_restart_on_remaining_nodes():
    setup = dataclasses.replace(
        small_setup(pp=2), shrinks=True, members=VaryingNodes(2, 4, 60.0), work=Work(512, 32, 2048)
    )
    for name in ("full", "pec", "sparse", "selective"):
        saving = POLICIES[name](setup, Options()).saving
        assert saving.members is not None and saving.members.grow_wait_s == 60
        way = saving.recovery_costs(Loss(1, of=4, remaining=3), 0.0)
        assert "number" in way.why and not way.local
        assert saving.recovery_costs(Loss(1, of=4, remaining=4), 0.0) is saving
    checkfreq = POLICIES["checkfreq"](setup, Options()).saving
    assert checkfreq.recovery_costs(Loss(1, of=4, remaining=3), 0.0) is checkfreq
    write_s = setup.full.total / setup.cluster.storage_bandwidth
    assert checkfreq.members is not None
    assert checkfreq.members.grow_s == pytest.approx(checkfreq.restart_s - setup.cluster.detect_s + write_s)
