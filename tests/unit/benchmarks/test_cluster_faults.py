"""What a campaign on a cluster takes for two worlds, and that the cluster is what it says."""

import json
import re
import subprocess

import pytest

from benchmarks.cluster.hosts import Cluster, unusable
from benchmarks.cluster.judge import Life, Publication, overlaps, told_twice, two_worlds
from benchmarks.cluster.scenarios import CONTROLLER, scenarios
from tests.cases import each_row


def told(*iterations):
    return [{"type": "iteration", "iteration": i, "time": float(i)} for i in iterations]


def test_iteration_may_repeat_only_after_new_generation():
    assert told_twice([*told(1, 2, 3), {"type": "resume"}, *told(3, 4)]) == []
    assert told_twice(told(1, 2, 3, 3, 4, 4)) == [3, 4]


def test_duplicate_rank_with_visible_effects_is_wrong():
    lives = [Life(0, 0, 0.0, 9.0), Life(1, 1, 0.0, 5.0), Life(1, 2, 4.0, 9.0)]
    assert overlaps(lives) == [(1, 4.0, 5.0)]
    assert two_worlds([], lives, []) == []
    assert len(two_worlds([{"type": "iteration", "iteration": 7, "time": 4.5}], lives, [])) == 1
    assert len(two_worlds([], lives, [Publication(4.5, 6, None)])) == 1
    assert two_worlds([], lives, [Publication(5.5, 6, None)]) == []


def test_older_generation_must_not_commit_after_newer():
    assert two_worlds([], [], [Publication(1.0, 4, 1), Publication(2.0, 6, 2), Publication(3.0, 8, 2)]) == []
    (wrong,) = two_worlds([], [], [Publication(1.0, 4, 2), Publication(2.0, 6, 1)])
    assert re.findall(r"generation (\d)", wrong) == ["1", "2"]


@each_row("nnodes, size", [(2, 3), (2, 5), (4, 7)])
def test_majority_remains_where_job_must_continue(nnodes, size):
    for name, one in scenarios(nnodes, size, 8.0).items():
        hosts = {host for step in one.steps for host in step.hosts} - {CONTROLLER}
        assert hosts <= set(range(size)), name
        if name != "world cut":  # there the others are no part of the world
            assert one.ends == (len(hosts) > (size - 1) // 2), name
            assert set(one.aside) <= hosts, name


@pytest.fixture
def cluster():
    if reason := unusable():
        pytest.skip(reason)
    with Cluster(3) as cluster:
        yield cluster


def reaches(cluster, one, other):
    """Whether a packet comes there, and an answer back: nobody listens, which is said at once."""
    command = ["timeout", "4", "bash", "-c", f"</dev/tcp/h{other}/9"]
    said = cluster.hosts[one].start(command, stderr=subprocess.PIPE, text=True).communicate()[1]
    return "refused" in said


def test_partitioned_hosts_reach_only_each_other(cluster):
    assert reaches(cluster, 0, 1) and reaches(cluster, 1, 2)
    cluster.cut([0, 1])
    assert reaches(cluster, 0, 1) and not reaches(cluster, 1, 2)
    cluster.mend()
    assert reaches(cluster, 1, 2) and reaches(cluster, 2, 0)


def test_powered_off_host_loses_processes_and_memory(cluster):
    host = cluster.hosts[1]
    (host.memory / "there").write_text("x")
    command = ["bash", "-c", "setsid sleep 1000 & echo $!; wait"]
    left = host.start(command, stdout=subprocess.PIPE, text=True)
    inside = host.process(json.loads(left.stdout.readline()))
    assert inside is not None and not (cluster.hosts[0].memory / "there").exists()
    host.power_off()
    assert left.wait(60) != 0 and not inside.is_running()
    host.power_on()
    assert host.processes() == [] and not (host.memory / "there").exists() and reaches(cluster, 1, 0)
