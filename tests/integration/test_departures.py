"""Nodes of an elastic job that are asked to leave: the others get their state and go on."""

import os
import signal
import time

import pytest

from moc.runtime.controller_link import DUPLICATE_S
from moc.runtime.termination import DEPARTED, LOST, SAVED
from tests.integration.elastic_jobs import ZERO, assert_as_of_fixed_members, job_of
from tests.shared import ALL

pytestmark = pytest.mark.recovery
FIXED = dict(elastic_everywhere="0", elastic_rebalance_interval=0)
ONCE = FIXED | dict(elastic_min_replicas=1, elastic_slots=2)
WITHIN = 1e-6


def asked_to_leave(job, *nodes, iteration=5):
    """Sends the launchers of nodes SIGTERM while all workers are in an iteration."""
    job.is_in(iteration, workers=len(job.launchers))
    for node in nodes:
        os.kill(job.launchers[node].pid, signal.SIGTERM)


def begun_twice(job):
    return [pid for pid, begun in job.begun().items() if len(set(begun)) < len(begun)]


@pytest.fixture
def held(monkeypatch):
    """The first worker waits in iteration 5."""
    monkeypatch.setenv("TEST_WAITS_IN", "5")


@pytest.mark.parametrize("zero", [*ALL * [False], True])
def test_node_with_controller_and_only_replicas_leaves(data, tmp_path, held, zero):
    flags = ONCE | (ZERO if zero else {})
    with job_of(data, tmp_path, [], layout="DP3", candidates=3, **flags) as job:
        job.is_lost(0)
        asked_to_leave(job, 0, 0)  # twice within two seconds is one request
        before = job.pids
        job.tells("all workers leave this generation")
        job.go_on(5)
        assert job.launchers[0].wait(120) == DEPARTED, job.console[-4000:]
        assert job.wait() == 0, job.console[-4000:]
        assert job.left() == []
    assert_as_of_fixed_members(job, data, layout="DP3", close=WITHIN, **flags)
    assert not begun_twice(job) and job.pids == before
    assert [event["cause"] for event in job.events("generation")] == ["node-departed"]
    assert not job.events("fallback") and {event["tier"] for event in job.events("resume")} == {"live"}
    assert job.console.count("every expert has at least") == 2  # at the start and after the change
    first, second = job.events("migration")
    assert first["experts"] > 0 == second["experts"] and first["iteration"] == second["iteration"] == 5


def test_two_nodes_leave_together_and_return(data, tmp_path, held):
    with job_of(data, tmp_path, [], elastic_min_replicas=1, elastic_everywhere="0") as job:
        asked_to_leave(job, 2, 3)
        job.tells("all workers leave this generation")
        job.go_on(5)
        assert [job.launchers[node].wait(120) for node in (2, 3)] == [DEPARTED] * 2, job.console[-4000:]
        job.start(2)
        job.start(3)
        job.tells("4 nodes continue from iteration")
        assert job.wait() == 0, job.console[-4000:]
        assert job.left() == []
    assert_as_of_fixed_members(job, data, close=WITHIN)
    assert not begun_twice(job)
    assert [event["world_size"] for event in job.events("start")] == [4, 2, 4]


def test_job_survives_loss_of_leader_after_candidate_departed(data, tmp_path, monkeypatch):
    """Two nodes are left of four, but of three voters."""
    monkeypatch.setenv("TEST_WAITS_IN", "5,9")
    with job_of(data, tmp_path, [], candidates=3, **FIXED) as job:
        asked_to_leave(job, 1)
        job.tells("all workers leave this generation")
        job.go_on(5)
        assert job.launchers[1].wait(120) == DEPARTED, job.console[-4000:]
        job.is_lost(1)
        job.is_in(9, workers=3)
        job.lose(0)
        job.go_on(9)
        assert job.wait() == 0, job.console[-4000:]
        assert job.left() == []
    assert_as_of_fixed_members(job, data, close=WITHIN, **FIXED)
    assert [event["cause"] for event in job.events("generation")] == ["node-departed", "node-lost"]
    assert {event["tier"] for event in job.events("resume")} == {"live"} and not job.events("fallback")


def test_node_leaves_during_recovery_of_others(data, tmp_path, held):
    """The first worker waits in its iteration, so that it is not in the new generation yet."""
    with job_of(data, tmp_path, [], **FIXED) as job:
        job.is_in(5, workers=4)
        job.lose(3)
        job.tells("training continues on 3 of 4 nodes")
        asked_to_leave(job, 2)
        job.go_on(5)
        assert job.launchers[2].wait(120) == DEPARTED, job.console[-4000:]
        assert job.wait() == 0, job.console[-4000:]
        assert job.left() == []
    assert_as_of_fixed_members(job, data, close=WITHIN, **FIXED)
    assert [event["cause"] for event in job.events("generation")] == ["node-lost", "node-departed"]
    assert {event["tier"] for event in job.events("resume")} == {"live"} and not job.events("fallback")


@pytest.mark.parametrize("least, candidates", [(2, 1), (1, 3)])
def test_departure_below_minimum_makes_all_save_and_exit(least, candidates, data, tmp_path, held):
    """Three controllers on three nodes need two of these."""
    flags = FIXED | dict(exit_signal_handler=True, elastic_min_replicas=1, elastic_slots=4)
    with job_of(data, tmp_path, [], layout="DP3", least=least, candidates=candidates, **flags) as job:
        asked_to_leave(job, 1, 2)
        job.tells("the job stops instead")
        job.go_on(5)
        assert job.wait() == SAVED, job.console[-4000:]
        assert [launcher.wait(60) for launcher in job.launchers] == [SAVED] * 3
    assert ("controllers need 2 nodes, and 1 remain" in job.console) == (candidates == 3)
    assert job.events("exit")[-1]["iteration"] == job.iteration in (5, 6)  # the vote of 5 may be over


@pytest.mark.parametrize("how", ["second signal", *ALL * ["deadline"]])
def test_node_that_exits_before_moving_its_state_is_lost(data, tmp_path, held, how):
    own = ["--drain-seconds", "3" if how == "deadline" else "60"]
    with job_of(data, tmp_path, [], layout="DP3", own=own, **FIXED) as job:
        asked_to_leave(job, 2)
        if how == "second signal":
            time.sleep(DUPLICATE_S)
            asked_to_leave(job, 2)
        assert job.launchers[2].wait(60) == LOST, job.console[-4000:]
        assert "departure-incomplete" in job.console
        job.tells("training continues on 2 of 3 nodes")
        job.go_on(5)
        assert job.wait() == 0, job.console[-4000:]
    assert_as_of_fixed_members(job, data, layout="DP3", **FIXED)
    assert [event["cause"] for event in job.events("generation")] == ["node-lost"]
    assert "before it has moved its state" in job.events("generation")[0]["reason"]
