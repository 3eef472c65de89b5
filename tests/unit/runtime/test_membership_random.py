"""The membership of a job: whatever is lost, and in whatever order it becomes known, it becomes whole again or ends."""

import json
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moc.runtime.membership import Membership
from moc.runtime.orders import (
    Abort,
    AssignRank,
    ChangeNotice,
    Connect,
    Kill,
    ReleaseNode,
    SaveAndExit,
    StartWorker,
    WorkerRecord,
)
from moc.runtime.termination import SAVED, START_OVER

SIZE, PER_NODE = 4, 2
NODES = range(4)  # two places, two spares


class Job(RuleBasedStateMachine):
    """Workers that do as they are told, are lost at any time, and whose messages come late or while nobody hears them.

    Attributes:
        membership: None while there is no controller; then messages are lost, and agents tell them the next one.
        kept: the newest of what the controller has had its agents keep.
        agents: by node that is there, what its agent knows: workers by name, and the newest generation.
        unnoted: by node, ends of workers of which no controller has heard.
        connected: nodes that the controller hears.
        asked_to_leave: names of workers.
        welcomed: by node, the newest generation whose workers have heard of guests.
        departing: newest generation with a notice, and the rank blocks that depart by its vote.
        leaving: nodes that were asked to leave.
    """

    places, least, stays, parts = SIZE // PER_NODE, 0, False, 1

    def __init__(self):
        super().__init__()
        self.membership, self.names, self.asked_to_leave = self.new(), set(), set()
        self.agents, self.generations, self.unnoted, self.connected, self.welcomed = {}, {}, {}, set(), {}
        self.departing, self.leaving = (-1, ()), set()
        for node in range(self.places):
            self.node_comes(node)
        if self.least:
            self.obey(self.membership.grow())

    def new(self):
        return Membership(self.places * PER_NODE, PER_NODE, 10**6, self.least, max_standstill=10**6)

    def node_of(self, rank):
        return self.membership.blocks.node_in(self.membership.blocks.members[rank // PER_NODE])

    @property
    def workers(self):
        return {name: worker for workers in self.agents.values() for name, worker in workers.items()}

    @property
    def seated(self):
        return {name: worker for name, worker in self.workers.items() if not worker.is_joining}

    def obey(self, orders):
        self.kept = json.loads(json.dumps(self.membership.state_dict()))
        for order in orders:
            if isinstance(order, StartWorker):
                taken = {w.rank for node in self.connected for w in self.agents[node].values() if not w.is_joining}
                assert order.worker not in self.names
                if not order.is_joining:
                    assert order.rank not in taken
                    assert order.node == self.node_of(order.rank) and order.size == self.membership.size
                self.names.add(order.worker)
                born = order.generation
                worker = WorkerRecord(
                    order.worker,
                    order.node,
                    order.rank,
                    order.starts_together,
                    rank_generation=born,
                    is_joining=order.is_joining,
                )
                worker.size, worker.partial_model_parts = order.size, order.partial_model_parts
                self.agents[order.node][order.worker] = worker
                self.generations[order.node] = max(self.generations[order.node], order.generation)
            elif isinstance(order, AssignRank):
                worker = self.agents[order.node].get(order.worker)
                if worker is None:  # it has died, and the controller is about to hear so
                    continue
                part = self.part(worker)
                worker.rank, worker.rank_generation, worker.is_joining = order.rank, order.generation, False
                worker.size, worker.partial_model_parts = order.size, order.partial_model_parts
                assert self.part(worker) == part
                assert order.size == self.membership.size
            elif isinstance(order, Kill):
                self.agents[order.node].pop(order.worker, None)
            elif isinstance(order, SaveAndExit):
                self.asked_to_leave = {name for node in self.connected for name in self.agents[node]}
            elif isinstance(order, ChangeNotice):
                self.welcomed = dict.fromkeys(self.connected, order.generation)
                if all(worker.drained_generation < order.generation for worker in self.seated.values()):
                    self.departing = order.generation, order.departing
            elif isinstance(order, ReleaseNode):
                self.node_is_lost(order.node)
            elif isinstance(order, Connect):
                self.go(order.generation)
            elif isinstance(order, Abort):
                for node in self.connected:
                    self.generations[node] = order.generation

    def part(self, worker):
        return self.membership.assignment.model_part(worker)

    def go(self, generation):
        there = [worker for node in self.connected for worker in self.agents[node].values() if not worker.is_joining]
        assert len(there) == self.membership.size and all(worker.reported_generation == generation for worker in there)

    def tell(self, node, what, *arguments):
        """A message, which is lost where nobody hears it."""
        if self.membership is not None and node in self.connected:
            self.obey(getattr(self.membership, what)(*arguments))
            return True
        return False

    def joins(self, node):
        """As an agent says hello: workers that live, those whose end nobody has heard of, and then these ends."""
        self.connected.add(node)
        mine = [replace(worker) for worker in self.agents[node].values()]
        there = {worker.rank for worker in mine if not worker.is_joining}
        dead = {name: end for name, end in self.unnoted[node].items() if end[0].rank not in there}
        mine += [replace(worker) for worker, _ in dead.values()]
        self.obey(self.membership.node_joined(node, mine, self.generations[node]))
        for name, (_, code) in dead.items():
            self.obey(self.membership.worker_exited(name, code))
        self.unnoted[node] = {}
        if node in self.leaving:
            self.obey(self.membership.departure_requested(node))

    def some(self, data):
        return data.draw(st.sampled_from(sorted(self.workers)))

    @rule(data=st.data(), again=st.booleans())
    @precondition(lambda self: self.workers)
    def is_here(self, data, again):
        """In the newest generation that its agent has heard of."""
        worker = self.workers[self.some(data)]
        worker.reported_generation = self.generations[worker.node]
        self.tell(worker.node, "worker_reported", worker.name, worker.reported_generation, self.parts)

    @rule(data=st.data())
    @precondition(lambda self: self.membership is not None and self.membership.running)
    def has_met(self, data):
        worker = self.workers[self.some(data)]
        if worker.reported_generation == self.membership.generation:
            worker.connected_generation = worker.reported_generation
            self.tell(worker.node, "worker_connected", worker.name, worker.connected_generation)

    @rule(data=st.data())
    @precondition(lambda self: self.workers)
    def has_built(self, data):
        worker = self.workers[self.some(data)]
        running = self.membership is not None and self.membership.running
        if running or not worker.starts_together:
            worker.is_ready, worker.survives_resize = True, self.stays
            self.tell(worker.node, "worker_ready", worker.name, self.stays)

    @rule(data=st.data(), code=st.sampled_from([-9, -11, START_OVER]))
    @precondition(lambda self: self.workers)
    def is_lost(self, data, code):
        worker = self.workers[self.some(data)]
        del self.agents[worker.node][worker.name]
        if not self.tell(worker.node, "worker_exited", worker.name, code):
            self.unnoted[worker.node][worker.name] = worker, code

    @rule(node=st.sampled_from(NODES))
    def node_is_lost(self, node):
        if node in self.agents:
            for of in (self.agents, self.generations, self.unnoted):
                of.pop(node, None)
            self.leaving.discard(node)
            if self.membership is not None and node in self.connected:
                self.connected.discard(node)
                self.obey(self.membership.node_lost(node))
            self.connected.discard(node)

    @rule(node=st.sampled_from(NODES))
    def node_comes(self, node):
        if node not in self.agents:
            self.agents[node], self.generations[node], self.unnoted[node] = {}, 0, {}
            if self.membership is not None:
                self.joins(node)

    @rule(node=st.sampled_from(NODES), taken_for_lost=st.booleans())
    @precondition(lambda self: self.membership is not None)
    def node_loses_its_connection_for_a_while(self, node, taken_for_lost):
        if node in self.agents:
            self.connected.discard(node)
            if taken_for_lost:
                self.obey(self.membership.node_lost(node))
            self.joins(node)

    @rule()
    @precondition(lambda self: self.membership is not None)
    def controller_dies(self):
        """What happens from now on, nobody hears."""
        self.membership = None
        self.connected.clear()

    @rule(data=st.data())
    @precondition(lambda self: self.membership is None)
    def controller_is_started_again(self, data):
        """And takes those for lost that have not come."""
        self.membership = self.new()
        self.membership.load_state_dict(self.kept)
        seated = set(self.membership.blocks.node_of_block.values())
        for node in data.draw(st.permutations(sorted(self.agents))):
            self.joins(node)
        for node in sorted(seated - set(self.agents)):
            self.obey(self.membership.node_lost(node))

    @rule(data=st.data())
    @precondition(
        lambda self: self.membership is not None and self.workers and self.membership.failures_without_loss < 9
    )
    def suspects(self, data):
        worker = self.workers[self.some(data)]
        self.tell(worker.node, "worker_blocked", worker.name, self.membership.generation)

    @invariant()
    def becomes_whole(self):
        """If nothing more is lost, all meet, and if nodes are missing, all wait for them."""
        if self.membership is not None:
            assert set(self.membership.workers) == set(self.seated)
            assert set(self.membership.joining) == set(self.workers) - set(self.seated)
            there = set(self.agents) - self.membership.departed
            assert bool(self.membership.missing_nodes()) == (len(there) < (self.least or self.places))
            if not self.membership.missing_nodes():
                ranks = sorted(worker.rank for worker in self.seated.values())
                assert ranks == list(range(self.membership.size)) or (self.membership.scale_up.in_progress and ranks)
                assert self.membership.size >= PER_NODE * (self.least or self.places)
                assert {self.generations[worker.node] for worker in self.seated.values()} == {
                    self.membership.generation
                }

    @invariant()
    def workers_are_where_their_places_are(self):
        if self.membership is not None:
            for worker in self.seated.values():
                assert self.node_of(worker.rank) == worker.node

    @invariant()
    def nobody_builds_in_step_with_one_who_builds_alone(self):
        if self.membership is not None:
            there, generation = self.membership.workers.values(), self.membership.generation
            unbuilt = [worker for worker in there if not worker.is_ready and worker.reported_generation != generation]
            assert len({worker.starts_together for worker in unbuilt}) <= 1

    def teardown(self):
        if self.membership is None:
            self.membership = self.new()
            self.membership.load_state_dict(self.kept)
            seated = set(self.membership.blocks.node_of_block.values())
            for node in sorted(self.agents):
                self.joins(node)
            for node in sorted(seated - set(self.agents)):
                self.obey(self.membership.node_lost(node))
        for node in NODES:
            if self.membership.missing_nodes():
                self.node_comes(node)
        while self.membership.can_grow:  # twice, if they do not leave
            self.obey(self.membership.grow())
            for name in self.membership.joining:
                self.tell(self.workers[name].node, "worker_ready", name, self.stays)
            if self.membership.has_scale_up_notice:
                generation = self.membership.generation
                for name, worker in self.seated.items():
                    self.tell(worker.node, "worker_drained", name, generation)
                assert self.membership.generation == generation + 1
        for name, worker in list(self.workers.items()):
            worker.reported_generation = self.generations[worker.node]
            self.tell(worker.node, "worker_reported", name, worker.reported_generation, self.parts)
        for name, worker in list(self.workers.items()):  # once more, if they were told how many nodes a copy takes
            worker.reported_generation = self.generations[worker.node]
            self.tell(worker.node, "worker_reported", name, worker.reported_generation, self.parts)
        assert self.membership.running


class VaryingJob(Job):
    """Of one to three nodes; a fourth is a spare, or takes a lost one's place later."""

    places, least = 3, 1

    @rule()
    @precondition(lambda self: self.membership is not None and self.membership.can_grow)
    def takes_in(self):
        self.obey(self.membership.grow())

    @rule(data=st.data(), code=st.sampled_from([SAVED, SAVED, SAVED, -15]))
    @precondition(lambda self: self.asked_to_leave & set(self.workers))
    def leaves(self, data, code):
        worker = self.workers[data.draw(st.sampled_from(sorted(self.asked_to_leave & set(self.workers))))]
        if self.membership is not None and self.membership.scale_up.in_progress:  # else it has been told to stay by now
            del self.agents[worker.node][worker.name]
            if not self.tell(worker.node, "worker_exited", worker.name, code):
                self.unnoted[worker.node][worker.name] = worker, code


class StayingJob(VaryingJob):
    """Whose workers stay when its members change; nodes that come have their workers built first."""

    stays = True

    @rule(data=st.data())
    @precondition(lambda self: self.seated)
    def leaves_to_meet_guests(self, data):
        """All workers have voted to leave if those of one node have heard of guests; it may tell so again."""
        worker = self.seated[data.draw(st.sampled_from(sorted(self.seated)))]
        if (
            worker.reported_generation == self.generations[worker.node]
            and worker.reported_generation in self.welcomed.values()
        ):
            generation, departing = self.departing
            worker.drained_generation = worker.reported_generation
            block = self.membership and self.membership.blocks.block_of(worker.node)
            worker.has_handed_over = generation == worker.drained_generation and block in departing
            told = worker.drained_generation, worker.has_handed_over
            self.tell(worker.node, "worker_drained", worker.name, *told)

    @rule(node=st.sampled_from(NODES))
    @precondition(lambda self: self.membership is not None and self.seated)
    def node_is_asked_to_leave(self, node):
        if node in self.connected:
            self.leaving.add(node)
            self.obey(self.membership.departure_requested(node))

    @rule()
    @precondition(lambda self: self.membership is not None and self.membership.has_departures_to_announce)
    def departures_are_announced(self):
        self.obey(self.membership.announce_departures())

    @rule(node=st.sampled_from(NODES))
    @precondition(lambda self: self.membership is not None)
    def node_and_controller_are_lost_before_others_are_told(self, node):
        if node in self.connected:
            for of in (self.agents, self.generations, self.unnoted):
                of.pop(node, None)
            self.membership.node_lost(node)
            self.kept = json.loads(json.dumps(self.membership.state_dict()))
            self.controller_dies()

    @invariant()
    def who_trains_is_not_started_anew(self):
        if self.membership is not None and any(worker.is_ready for worker in self.membership.workers.values()):
            there, generation = self.membership.workers.values(), self.membership.generation
            begun = [
                worker for worker in there if worker.reported_generation != generation
            ]  # others have built, and tell one by one
            assert not any(worker.starts_together and not worker.is_ready for worker in begun)


class SpreadJob(StayingJob):
    """A copy of whose model takes two nodes; others that have a part of it help."""

    places, least, parts = 4, 2, 2

    @invariant()
    def helpers_have_no_whole_copy(self):
        if self.membership is not None and self.membership.assignment.partial_model_parts:
            helping = self.membership.assignment.partial_model_parts
            assert self.membership.assignment.nodes_in_copies % 2 == 0 and len(set(helping)) == 1


class Asked(Job):
    """That is asked to stop at any time: while others than those who are lost have state to save, it becomes whole."""

    def __init__(self):
        super().__init__()
        for name, worker in self.workers.items():  # all train
            worker.reported_generation, worker.is_ready, worker.survives_resize = 0, True, self.stays
            self.tell(worker.node, "worker_reported", name, 0, self.parts)
            self.tell(worker.node, "worker_ready", name, self.stays)

    @rule()
    @precondition(lambda self: self.membership is not None)
    def is_asked(self):
        self.obey(self.membership.stop_requested(15))

    @property
    def asked(self):
        return self.kept["asked"] is not None

    @rule(data=st.data(), code=st.sampled_from([-9, -11, -15]))
    @precondition(lambda self: self.workers)
    def is_lost(self, data, code):
        """Also of the signal itself, but only before it has built; it is known at once, so others are there indeed."""
        worker = self.workers[self.some(data)]
        others = any(other.is_ready for other in self.seated.values() if other is not worker)
        can_save = others and self.membership is not None and worker.node in self.connected
        if not self.asked or (can_save and (code != -15 or not worker.is_ready)):
            del self.agents[worker.node][worker.name]
            if not self.tell(worker.node, "worker_exited", worker.name, code):
                self.unnoted[worker.node][worker.name] = worker, code

    @invariant()
    def goes_on(self):
        assert self.membership is None or self.membership.end is None


class AskedStayingJob(Asked, StayingJob):
    """Whose workers also stay when its members change."""

    @rule()
    def leaves(self):
        """None does: nobody who is asked to stop leaves without all others."""


TestJob, TestVaryingJob, TestStayingJob = Job.TestCase, VaryingJob.TestCase, StayingJob.TestCase
TestSpreadJob = SpreadJob.TestCase
TestSpreadJob.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestStayingJob.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestJob.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestVaryingJob.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestAsked, TestAskedStayingJob = Asked.TestCase, AskedStayingJob.TestCase
TestAsked.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestAskedStayingJob.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
