"""What happens to an elastic job is drawn so that every expert is left, and is counted by what the job did then."""

import random

from benchmarks.elastic_faults import CLUSTER, Row, stall, summary
from benchmarks.faults.members import COMES, LEAVES, MOMENTS, MOVE, SETTLED, Cluster, drawn, moment
from tests.cases import each_row


@each_row("cluster", [CLUSTER, Cluster(nodes=4, least=2, slots=6, experts=8, replicas=2)])
def test_losses_below_f_with_enough_nodes(cluster):
    kinds = set()
    for seed in range(100):
        there, held, lost, departs = set(range(cluster.nodes)), set(range(cluster.nodes)), set(), False
        happenings = drawn(random.Random(seed), 15, cluster)
        assert len(happenings) == 15 and happenings == drawn(random.Random(seed), 15, cluster)
        for one in happenings:
            kinds.add((one.action, one.when))
            if one.when == SETTLED:
                held, lost, departs = set(there), set(), False
            assert (one.node in there) != (one.action == COMES)
            if one.action == COMES:
                there.add(one.node)
            else:
                lost |= {one.node} & held
                there -= {one.node} if one.action != "worker" else set()
                departs |= one.action == LEAVES
                assert not departs or len(held - lost) >= cluster.least  # the others can continue meanwhile
            assert len(lost) <= cluster.survives(len(held)) and len(there) >= cluster.least
    assert kinds >= {
        (action, when) for action in ("node", "launcher", "worker", LEAVES, COMES) for when in (SETTLED, MOVE)
    }


def told(*kinds, at=1.0):
    return [{"type": kind, "time": at + number} | more for number, (kind, more) in enumerate(kinds)]


START, ITERATION, SLOW = (("start", {"world_size": n}) for n in (3,)), ("iteration", {}), ("inject", {})


def test_job_phase_at_event_is_classified():
    (start,) = START
    trained = told(start, ITERATION, ITERATION)
    assert moment(trained, None, 3) == "training"
    assert moment(trained, 1.5, 3) == "training"
    assert moment(trained, 1.5, 4) == "joining"  # three of four train
    assert moment(trained, 3.5, 2) == "recovery"  # one is lost, and nobody has gone on
    moving = told(start, ITERATION, ("generation", {}), SLOW)
    assert moment(moving, 2.5, 2) == "move"
    assert moment([*moving, *told(("migration", {}), at=5.0)], 2.5, 2) == "recovery"


def test_runs_are_counted_together():
    happened = [{"action": "node", "moment": "move"}, {"action": COMES, "moment": "training"}]
    rows = [Row(1, happened, [5, 4, 5], 2, 50, 1e-7), Row(2, happened[:1], [5, 4], 1, 30, 2e-7, wrong=["x"])]
    found = summary(rows)
    assert (found["runs"], found["as fixed members"], found["wrong"], found["events"], found["changes"]) == (
        2,
        1,
        1,
        3,
        3,
    )
    assert found["by kind"]["node"] == dict.fromkeys(MOMENTS, 0) | {"move": 2}
    assert found["largest difference of a loss"] == 2e-7


def test_stall_is_longest_among_continuing_threads():
    times = [[1.0, 2.0, 3.0, 6.5, 7.5], [1.0, 2.0, 3.0, 7.0, 8.0], [1.0, 2.0, 3.0]]  # the last one is lost
    assert stall(times, 3.2) == 3.0 and stall(times, 2.5) == 0.0 and stall(times, 9.0) is None
