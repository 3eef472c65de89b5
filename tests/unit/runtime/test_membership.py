"""Generations: whatever is lost, and in whatever order it becomes known, the job becomes whole again or ends."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moc.runtime.membership import MAX_SUSPICIONS, START_OVER, Abort, End, Go, Kill, Membership, Start, Worker

SIZE, PER_NODE = 4, 2


def begun(size=SIZE, per_node=PER_NODE, max_restarts=1000):
    membership, orders = Membership(size, per_node, max_restarts), []
    for node in range(size // per_node):
        orders += membership.joined(node)
    return membership, [order.worker for order in orders if isinstance(order, Start)]


def running(**how):
    membership, names = begun(**how)
    orders = [order for name in names for order in membership.here(name, 0)]
    assert orders == [Go(0)]
    for name in names:
        membership.built(name)
    return membership, names


def test_all_begin_together_when_all_nodes_are_there():
    membership = Membership(SIZE, PER_NODE, 1)
    assert membership.joined(1) == []
    orders = membership.joined(0)
    assert [(order.node, order.rank) for order in orders] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert all(order.together for order in orders)
    assert len({order.worker for order in orders}) == SIZE


def test_a_lost_worker_is_replaced_and_the_others_stay():
    membership, names = running()
    abort, start = membership.ended(names[2], -9)
    assert abort == Abort(1, "worker 2 was killed by signal 9")
    assert (start.rank, start.node, start.generation, start.together) == (2, 1, 1, False)
    new = [names[0], names[1], start.worker, names[3]]
    assert [order for name in new for order in membership.here(name, 1)] == [Go(1)]


def test_who_builds_in_step_with_a_lost_one_is_replaced_too():
    membership, names = begun()
    for name in names:
        membership.here(name, 0)
    orders = membership.ended(names[0], -9)
    assert [order.worker for order in orders if isinstance(order, Kill)] == names[1:]
    assert [order.rank for order in orders if isinstance(order, Start) and order.together] == [0, 1, 2, 3]
    assert membership.ended(names[1], -9) == []  # it was told to die


def test_two_at_once():
    membership, names = running()
    first = membership.ended(names[0], -9)[1]
    abort, second = membership.ended(names[1], -11)
    assert abort.generation == 2 and second.rank == 1
    for name in (first.worker, names[2], names[3]):
        assert membership.here(name, 1) == []  # too late
        assert membership.here(name, 2) == []
    assert membership.here(second.worker, 2) == [Go(2)]


def test_a_node_that_is_lost_is_waited_for():
    membership, names = running()
    orders = membership.left(1)
    assert orders == [Abort(1, "node 1 is lost")]
    assert [membership.here(name, 1) for name in names[:2]] == [[], []]
    orders = membership.joined(1)
    assert [order.rank for order in orders if isinstance(order, Start)] == [2, 3]


def test_a_controller_that_is_started_again_learns_what_it_must_know():
    membership = Membership(SIZE, PER_NODE, 1)
    told = [Worker(f"5.{rank}", rank // PER_NODE, rank, True, True, here=5) for rank in range(SIZE)]
    assert membership.joined(1, told[2:], 5) == [] == membership.joined(0, told[:2], 5)
    assert membership.running and membership.generation == 5
    assert [type(order) for order in membership.ended("5.3", -9)] == [Abort, Start]


def test_what_it_has_missed_begins_a_generation():
    membership = Membership(SIZE, PER_NODE, 1)
    told = [Worker(f"5.{rank}", rank // PER_NODE, rank, True, True, here=5) for rank in range(SIZE)]
    membership.joined(1, told[2:3], 5)
    orders = membership.joined(0, told[:2], 5)
    assert orders[0].generation == 6 and orders[1].rank == 3 and not orders[1].together


@pytest.mark.parametrize(
    "code, restarts, job, why",
    [
        (-9, 0, 137, "worker 0 was killed by signal 9, and 0 were replaced already"),
        (1, 9, 1, "worker 0 failed"),
        (75, 9, 75, "worker 0 was asked to stop, and has saved"),
    ],
)
def test_how_a_job_ends_before_its_time(code, restarts, job, why):
    membership, names = running(max_restarts=restarts)
    (end,) = membership.ended(names[0], code)
    assert end.code == job and end.reason.startswith(why)
    assert membership.ended(names[1], -9) == []


def test_a_job_ends_well_when_all_workers_have():
    membership, names = running()
    assert [membership.ended(name, 0) for name in names] == [[], [], [], [End(0, "")]]


def test_who_is_lost_when_others_are_done_brings_them_back():
    membership, names = running()
    membership.ended(names[0], 0)
    orders = membership.ended(names[1], -9)
    assert [order.rank for order in orders if isinstance(order, Start)] == [0, 1]


def test_who_loses_connections_again_and_again_ends_the_job():
    membership, names = running()
    for generation in range(MAX_SUSPICIONS):
        assert membership.suspected(names[0], generation) == [Abort(generation + 1, "worker 0 has lost connections")]
    assert membership.suspected(names[0], 0) == []  # of a generation that is over
    assert membership.suspected(names[0], MAX_SUSPICIONS)[0].code == 1


def test_a_job_that_was_asked_to_stop_replaces_nobody():
    membership, names = running()
    membership.stopping()
    assert membership.ended(names[0], -15)[0].code == 143


class Job(RuleBasedStateMachine):
    """Workers that do as they are told, are lost at any time, and whose messages come late."""

    def __init__(self):
        super().__init__()
        self.membership, self.alive, self.met = Membership(SIZE, PER_NODE, 10**6), {}, None
        for node in range(SIZE // PER_NODE):
            self.obey(self.membership.joined(node))

    def obey(self, orders):
        for order in orders:
            if isinstance(order, Start):
                assert order.rank not in {start.rank for start in self.alive.values()}
                self.alive[order.worker] = order
            elif isinstance(order, Kill):
                del self.alive[order.worker]
            elif isinstance(order, Go):
                assert len(self.alive) == SIZE and order.generation == self.membership.generation
                self.met = order.generation
            elif isinstance(order, Abort):
                self.met = None

    def some(self, data):
        return data.draw(st.sampled_from(sorted(self.alive)))

    @rule(data=st.data(), late=st.integers(0, 2))
    @precondition(lambda self: self.alive)
    def is_here(self, data, late):
        self.obey(self.membership.here(self.some(data), max(0, self.membership.generation - late)))

    @rule(data=st.data())
    @precondition(lambda self: self.alive)
    def has_built(self, data):
        name = self.some(data)
        if self.met is not None or not self.alive[name].together:
            self.obey(self.membership.built(name))

    @rule(data=st.data(), code=st.sampled_from([-9, -11, START_OVER]))
    @precondition(lambda self: self.alive)
    def is_lost(self, data, code):
        name = self.some(data)
        del self.alive[name]
        self.obey(self.membership.ended(name, code))

    @rule(node=st.integers(0, SIZE // PER_NODE - 1))
    def node_is_lost_and_comes_back(self, node):
        self.alive = {name: start for name, start in self.alive.items() if start.node != node}
        self.obey(self.membership.left(node))
        self.obey(self.membership.joined(node))

    @rule(data=st.data())
    @precondition(lambda self: self.alive and self.membership.suspicions < MAX_SUSPICIONS)
    def suspects(self, data):
        self.obey(self.membership.suspected(self.some(data), self.membership.generation))

    @invariant()
    def becomes_whole(self):
        """If nothing more is lost, all meet."""
        assert sorted(start.rank for start in self.alive.values()) == list(range(SIZE))
        assert set(self.membership.workers) == set(self.alive)

    @invariant()
    def nobody_builds_in_step_with_one_who_builds_alone(self):
        unbuilt = [w for w in self.membership.workers.values() if not w.built and w.here != self.membership.generation]
        assert len({worker.together for worker in unbuilt}) <= 1

    def teardown(self):
        for name in list(self.alive):
            self.obey(self.membership.here(name, self.membership.generation))
        assert self.met == self.membership.generation and self.membership.running


TestJob = Job.TestCase
TestJob.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
