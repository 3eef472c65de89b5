"""Generations: whatever is lost, and in whatever order it becomes known, the job becomes whole again or ends."""

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moc.runtime.membership import (
    LOST,
    MAX_SUSPICIONS,
    SAVED,
    START_OVER,
    Abort,
    End,
    Go,
    Kill,
    Membership,
    Start,
    Worker,
)

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


def test_a_spare_takes_the_place_of_a_lost_node_and_that_one_becomes_a_spare():
    membership, names = running()
    assert membership.joined(7) == []
    abort, *starts = membership.left(1)
    assert abort == Abort(1, "node 1 is lost, and node 7 takes its place")
    assert [(start.node, start.rank) for start in starts] == [(7, 2), (7, 3)]
    assert membership.joined(1) == [] == membership.waits_for()
    assert [(start.node, start.rank) for start in membership.left(7)[1:]] == [(1, 2), (1, 3)]


def test_a_spare_that_comes_late_takes_the_place_of_a_lost_node():
    membership, names = running()
    membership.left(1)
    assert membership.waits_for() == [1]
    assert [order.node for order in membership.joined(2) if isinstance(order, Start)] == [2, 2]


def test_a_spare_does_not_take_the_place_of_a_node_that_is_yet_to_come():
    membership = Membership(SIZE, PER_NODE, 1)
    assert membership.joined(0) == [] == membership.joined(2)
    assert membership.waits_for() == [1]
    assert [order.node for order in membership.joined(1)] == [0, 0, 1, 1]


def test_a_node_that_was_taken_for_lost_comes_back_with_workers_that_nobody_wants():
    membership, names = running()
    membership.joined(2)
    membership.left(1)
    told = [Worker(name, 1, rank, True, True, here=0) for rank, name in enumerate(names) if rank > 1]
    assert membership.joined(1, told, 0) == [Kill(1, names[2]), Kill(1, names[3])]


def test_a_node_that_was_taken_for_lost_comes_back_with_workers_that_are_told_what_they_have_missed():
    membership, names = running()
    membership.left(1)
    told = [Worker(name, 1, rank, True, True, here=0) for rank, name in enumerate(names) if rank > 1]
    assert membership.joined(1, told, 0) == [Abort(2, "node 1 is there")]


def test_a_node_that_begins_anew_before_it_was_known_to_be_lost():
    membership, names = running()
    abort, *starts = membership.joined(1)
    assert [start.rank for start in starts] == [2, 3]


def test_a_job_gives_up_when_a_lost_node_does_not_come():
    membership, names = running()
    assert membership.gives_up("nobody has come") == []  # nobody is missing
    membership.left(1)
    (end,) = membership.gives_up("nobody has come")
    assert end.code == SAVED and not end.leaving and end.reason.startswith("node 1 is missing")
    assert membership.waits_for() == []
    membership = Membership(SIZE, PER_NODE, 1)
    membership.joined(0)
    assert membership.gives_up("nobody has come")[0].code == LOST


def test_a_node_that_is_lost_when_its_workers_are_done_is_not_missed():
    membership, names = running()
    for name in names[2:]:
        membership.ended(name, 0)
    assert membership.left(1) == []
    assert [membership.ended(name, 0) for name in names[:2]] == [[], [End(0, "", True)]]


def test_who_was_not_connected_at_the_end_hears_of_it_when_it_is():
    membership, names = running()
    membership.left(1)
    (end,) = membership.ended(names[0], 1)
    assert membership.joined(1) == [end]
    assert restarted(membership).joined(1) == [end]


def restarted(membership):
    """A controller that takes up what another has left on disk."""
    other = Membership(membership.size, membership.per_node, membership.max_restarts)
    other.load_state_dict(json.loads(json.dumps(membership.state_dict())))
    return other


def test_a_controller_that_is_started_again_has_counted_what_was_counted():
    membership, names = running(max_restarts=2)
    membership.suspected(names[0], 0)
    membership.ended(names[0], -9)
    membership.suspected(names[1], 2)
    membership = restarted(membership)
    assert (membership.generation, membership.restarts, membership.suspicions) == (3, 1, 1)
    membership.stopping(15)
    told = [Worker(f"3.{rank}", rank // PER_NODE, rank, True, True, here=3) for rank in range(SIZE)]
    membership = restarted(membership)
    assert membership.joined(0, told[:2], 3) == [] == membership.joined(1, told[2:], 3)
    assert membership.ended("3.0", -9)[0].code == 137


def test_a_controller_that_is_started_again_waits_for_nobody_who_may_be_about_to_join():
    membership, names = running()
    membership.joined(2)
    membership = restarted(membership)
    assert membership.joined(2) == [] == membership.waits_for()
    assert membership.left(1)[0] == Abort(1, "node 1 is lost, and node 2 takes its place")
    assert membership.left(1) == []


def test_what_one_node_has_missed_begins_a_generation():
    membership, names = running()
    told = [Worker(name, rank // PER_NODE, rank, True, True, here=0) for rank, name in enumerate(names)]
    membership.suspected(names[0], 0)  # and dies before node 0 has heard of it
    for last in (0, 1):
        again = restarted(membership)
        assert again.joined(1 - last, told[2 - 2 * last : 4 - 2 * last], 1 - last) == []
        assert again.joined(last, told[2 * last : 2 * last + 2], last)[0].generation == 2


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
    assert [membership.ended(name, 0) for name in names] == [[], [], [], [End(0, "", True)]]


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


def test_a_loss_between_them_ends_the_row_of_suspicions():
    membership, names = running()
    for generation in range(MAX_SUSPICIONS):
        membership.suspected(names[0], generation)
    membership.ended(names[1], -9)
    assert isinstance(membership.suspected(names[0], MAX_SUSPICIONS + 1)[0], Abort)


def test_a_long_calm_ends_it_too():
    membership, names = running()
    for generation in range(MAX_SUSPICIONS):
        membership.suspected(names[0], generation)
    membership.calm()
    assert isinstance(membership.suspected(names[0], MAX_SUSPICIONS)[0], Abort)


def test_it_is_said_why_a_worker_was_killed():
    membership, names = running()
    (abort, _) = membership.ended(names[1], -9, "had been in its step for 70 s")
    assert abort.reason == "worker 1 was killed by signal 9: it had been in its step for 70 s"


def test_a_job_that_was_asked_to_stop_replaces_nobody():
    membership, names = running()
    membership.stopping(15)
    assert membership.ended(names[0], -15)[0].code == 143


def test_a_job_that_was_asked_to_stop_waits_for_nobody():
    membership = Membership(SIZE, PER_NODE, 1000)
    membership.joined(0)
    assert membership.stopping(2) == [End(130, "the job was asked to stop (signal 2): nothing has begun", False)]

    membership = Membership(SIZE, PER_NODE, 1000)
    assert membership.joined(0, asked=15)[0].code == 143

    membership, _ = running()
    membership.left(1)
    (end,) = membership.stopping(15)
    assert end.code == SAVED and "node 1 is missing, and the job was asked to stop (signal 15)" in end.reason


def test_a_job_that_was_asked_to_stop_lets_nodes_come_back():
    membership, names = running()
    assert membership.stopping(15) == []
    left = membership.left(0)
    has = [trains(name, rank) for rank, name in enumerate(names[:PER_NODE])]
    assert left[0].generation == 1 and membership.joined(0, has, 0, asked=15)[0].generation == 2
    assert membership.end is None and membership.asked == 15


def test_a_controller_that_is_started_again_ends_no_job_since_others_are_about_to_join():
    membership, names = running()
    membership = restarted(membership)
    has = [trains(name, rank) for rank, name in enumerate(names[:PER_NODE])]
    assert membership.joined(0, has, 0, asked=15) == []


def trains(name, rank):
    return Worker(name, rank // PER_NODE, rank, True, True, here=0)


NODES = range(4)  # two places, two spares


class Job(RuleBasedStateMachine):
    """Workers that do as they are told, are lost at any time, and whose messages come late; nodes that come and go.

    Attributes:
        alive: workers, by name.
        hears: by worker, the newest generation that it has heard of.
        there: by node that is connected, the newest generation that its agent has heard of.
    """

    def __init__(self):
        super().__init__()
        self.membership, self.alive, self.met = Membership(SIZE, PER_NODE, 10**6), {}, None
        self.hears, self.there = {}, {}
        for node in range(SIZE // PER_NODE):
            self.join(node)

    def obey(self, orders):
        for order in orders:
            if isinstance(order, Start):
                assert order.rank not in {s.rank for s in self.alive.values() if s.node in self.there}
                assert order.node == self.membership.places.filler(order.rank // PER_NODE) and order.node in self.there
                assert order.worker not in self.hears
                self.alive[order.worker], self.hears[order.worker] = order, order.generation
            elif isinstance(order, Kill):
                del self.alive[order.worker]
            elif isinstance(order, Go):
                assert len(self.alive) == SIZE and order.generation == self.membership.generation
                self.met = order.generation
            elif isinstance(order, Abort):
                self.met = None
                self.there = dict.fromkeys(self.there, order.generation)
                self.hears |= {name: order.generation for name, s in self.alive.items() if s.node in self.there}

    def join(self, node, generation=0, workers=()):
        self.there[node] = generation
        self.obey(self.membership.joined(node, workers, generation))

    def leave(self, node):
        del self.there[node]
        self.met = None
        self.obey(self.membership.left(node))

    def told_by(self, node):
        """What an agent tells of its workers; the membership's own record stands for what the agent knows."""
        return [worker for worker in self.membership.workers.values() if worker.node == node]

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

    @rule(node=st.sampled_from(NODES))
    def node_is_lost(self, node):
        if node in self.there:
            self.alive = {name: start for name, start in self.alive.items() if start.node != node}
            self.leave(node)

    @rule(node=st.sampled_from(NODES))
    def node_comes(self, node):
        if node not in self.there:
            self.join(node)

    @rule(node=st.sampled_from(NODES))
    def node_loses_its_connection_for_a_while(self, node):
        if node in self.there:
            generation, workers = self.there[node], self.told_by(node)
            self.leave(node)
            self.join(node, generation, workers)

    @rule(data=st.data(), lost=st.sets(st.sampled_from(NODES)))
    def controller_is_started_again(self, data, lost):
        """And some nodes are lost meanwhile."""
        there = {node: (self.there[node], self.told_by(node)) for node in self.there if node not in lost}
        seated = set(self.membership.places.filled_by.values())
        self.alive = {name: start for name, start in self.alive.items() if start.node in there}
        self.membership, self.met, self.there = restarted(self.membership), None, {}
        for node in data.draw(st.permutations(sorted(there))):
            self.join(node, *there[node])
        for node in sorted(seated - set(self.there)):
            self.obey(self.membership.left(node))
        if self.membership.running:
            self.met = self.membership.generation

    @rule(data=st.data())
    @precondition(lambda self: self.alive and self.membership.suspicions < MAX_SUSPICIONS)
    def suspects(self, data):
        self.obey(self.membership.suspected(self.some(data), self.membership.generation))

    @invariant()
    def becomes_whole(self):
        """If nothing more is lost, all meet, and if nodes are missing, all wait for them."""
        assert set(self.membership.workers) == set(self.alive)
        assert bool(self.membership.waits_for()) == (len(self.there) < SIZE // PER_NODE)
        if not self.membership.waits_for():
            assert sorted(start.rank for start in self.alive.values()) == list(range(SIZE))

    @invariant()
    def all_hear_of_every_generation(self):
        if not self.membership.waits_for():
            assert {self.hears[name] for name in self.alive} == {self.membership.generation}

    @invariant()
    def workers_are_where_their_places_are(self):
        for start in self.alive.values():
            assert self.membership.places.filler(start.rank // PER_NODE) == start.node

    @invariant()
    def nobody_builds_in_step_with_one_who_builds_alone(self):
        unbuilt = [w for w in self.membership.workers.values() if not w.built and w.here != self.membership.generation]
        assert len({worker.together for worker in unbuilt}) <= 1

    def teardown(self):
        for node in NODES:
            if self.membership.waits_for() and node not in self.there:
                self.join(node)
        for name in list(self.alive):
            self.obey(self.membership.here(name, self.membership.generation))
        assert self.met == self.membership.generation and self.membership.running


TestJob = Job.TestCase
TestJob.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
