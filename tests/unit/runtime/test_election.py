"""Candidates for the controller: whatever is cut off, delayed or stopped, one leads at most, and one can lead again."""

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moc.runtime.election import Election, Follower, SilenceLimits, lease_end

TIMES = SilenceLimits(8.0)  # a promise holds for 4


def elected(voters=3, candidates=3, index=0, there=(0, 1), silent=100.0):
    election = Election(index, candidates, voters, TIMES)
    for node in there:
        election.add_agent(node, -1, 0.0, silent, now=10.0)
    return election


def test_majority_elects_leader_and_minority_does_not():
    election = elected(there=[0])
    assert election.start_candidacy(10.0) is None
    election.add_agent(1, -1, 0.0, 100.0, now=10.0)
    assert election.start_candidacy(10.0) == 0
    assert not election.handle_promise(0, 0, 0.0, 10.0) and election.handle_promise(1, 0, 0.0, 10.0)
    assert election.is_leader and election.may_order(10.0)


def test_single_candidate_leads_with_any_agent():
    election = elected(voters=5, candidates=1, there=[4])
    assert election.handle_promise(4, election.start_candidacy(10.0), 0.0, 10.0)
    assert election.may_order(1e9) and not election.has_lost_leadership(1e9)


def test_controller_epoch_is_unique_and_newer():
    for index in range(3):
        election = elected(index=index)
        election.add_agent(2, 7, 0.0, 100.0, now=10.0)
        epoch = election.start_candidacy(10.0)
        assert epoch > 7 and epoch % 3 == index


def test_promised_node_is_awaited_unless_all_connected():
    election = elected(there=[0])
    election.add_agent(1, 0, 3.0, 1.0, now=10.0)
    assert election.start_candidacy(12.9) is None and election.start_candidacy(13.0) is not None
    election = elected(there=[0])
    election.add_agent(1, 0, 3.0, 1.0, now=10.0)
    election.add_agent(2, 0, 3.0, 1.0, now=10.0)
    assert election.start_candidacy(10.0) is not None and election.needs_all_nodes


def test_new_leader_waits_for_leases_of_earlier_leader():
    election = elected(silent=5.0)
    epoch = election.start_candidacy(10.0)
    for node in (0, 1):
        election.handle_promise(node, epoch, 0.0, 10.0)
    assert election.leases_expire_at == 10.0 - 5.0 + TIMES.lease_s


def test_election_waits_for_a_node_that_leaves_before_admission():
    election = elected(there=[])
    for node in range(3):
        election.add_agent(node, 0, 3.0, 1.0, now=10.0)
    epoch = election.start_candidacy(10.0)
    assert [election.handle_promise(node, epoch, 3.0, 10.0) for node in range(3)] == [False, False, True]
    election.remove_agent(2)
    assert election.needs_all_nodes and election.leases_expire_at == 10.0 - 1.0 + TIMES.lease_s


def test_leader_without_majority_sends_no_orders():
    election = elected()
    epoch = election.start_candidacy(10.0)
    for node in (0, 1):
        election.handle_promise(node, epoch, 0.0, 10.0)
    election.record_echo(0, 12.0)  # itself, as it were
    assert election.may_order(13.9) and not election.may_order(14.0)
    election.record_echo(1, 13.0)
    assert election.may_order(15.9) and not election.has_lost_leadership(15.9)
    assert election.has_lost_leadership(10.0 + TIMES.lease_s + 3.0)


def test_leader_steps_down_after_later_epoch_is_followed():
    election = elected()
    epoch = election.start_candidacy(10.0)
    for node in (0, 1):
        election.handle_promise(node, epoch, 0.0, 10.0)
    election.add_agent(2, epoch + 1, 0.0, 0.0, now=11.0)
    assert election.has_lost_leadership(11.0)


def test_leader_survives_restart_of_majority_member():
    """The fourth node has followed another one, and is not counted on yet."""
    election = elected(voters=5, there=(0, 1, 2, 3))
    epoch = election.start_candidacy(10.0)
    for node, free_in in ((3, 3.0), (0, 0.0), (1, 0.0), (2, 0.0)):
        election.handle_promise(node, epoch, free_in, 10.0)
    election.remove_agent(2)
    election.add_agent(2, -1, TIMES.promise_s, 0.0, now=12.0)
    for node in (0, 1, 3):
        election.record_echo(node, 12.5)
    assert (
        election.majority_contact(12.5) == 10.0 and election.may_order(12.5) and not election.has_lost_leadership(12.5)
    )
    election.record_echo(3, 13.0)
    election.record_echo(2, 13.0)  # by the process of before: this one has promised nothing
    assert election.majority_contact(13.0) == 12.5


def test_agent_follows_one_candidate_at_a_time():
    agent = Follower(3, TIMES.promise_s, started_at=0.0)
    assert agent.free_in(0, 1.0) == 3.0  # one before this process may have promised something
    assert agent.handle_request(0, sure=True, now=1.0) == 3.0
    assert agent.handle_request(1, sure=False, now=4.9) is None and agent.free_in(1, 4.9) > 0
    agent.record_heartbeat_reply(4.0)
    assert agent.handle_request(1, sure=False, now=7.9) is None
    assert agent.handle_request(1, sure=False, now=8.0) == 0 and agent.handle_request(0, sure=True, now=100.0) is None


def test_known_dead_candidate_is_not_waited_for():
    agent = Follower(3, TIMES.promise_s, started_at=0.0)
    agent.handle_request(3, sure=True, now=5.0)
    agent.record_death(1)
    assert agent.free_in(1, 5.0) > 0 and agent.free_in(0, 5.0) == 0
    agent.record_death(0)
    assert agent.handle_request(4, sure=False, now=5.0) == 0


def test_lease_granted_by_dead_candidate_remains_valid():
    agent = Follower(2, TIMES.promise_s, started_at=0.0)
    agent.handle_request(1, sure=True, now=5.0)
    agent.record_heartbeat_reply(8.0)
    agent.record_death(1)
    assert agent.free_in(0, 9.0) == 0 and agent.last_contact == 8.0
    election = elected(candidates=2, there=())
    for node in (0, 1):
        election.add_agent(node, 1, 0.0, 9.0 - agent.last_contact, now=9.0)
    epoch = election.start_candidacy(9.0)
    assert [election.handle_promise(node, epoch, 0.0, 9.0) for node in (0, 1)] == [False, True]
    assert election.leases_expire_at == 8.0 + TIMES.lease_s  # a third node may have heard the same beat


def test_delayed_promise_does_not_elect_at_once():
    election = elected(voters=5, there=(0, 1, 2))
    epoch = election.start_candidacy(10.0)
    assert not election.handle_promise(0, epoch, 0.0, 10.0) and not election.handle_promise(1, epoch, 0.0, 10.0)
    assert not election.handle_promise(2, epoch, 3.0, 10.0) and not election.is_leader


VOTERS, CANDIDATES = range(3), 2


class Partitions(RuleBasedStateMachine):
    """Three agents, two candidates; who can reach whom changes, processes are paused and die, messages take their time.

    Attributes:
        now: real time, of which nobody's clock is a part of its own.
        leases: by agent, until when its workers may run.
        follows: by agent, the candidate that it is connected with.
        came: by candidate, the agents that have promised its last epoch: from then on they are lost to it by silence.
    """

    def __init__(self):
        super().__init__()
        self.now = 1000.0
        self.agents = {node: Follower(CANDIDATES, TIMES.promise_s, self.now) for node in VOTERS}
        self.elections = {index: Election(index, CANDIDATES, len(VOTERS), TIMES) for index in range(CANDIDATES)}
        self.follows, self.leases = {}, {}
        self.came = {index: set() for index in range(CANDIDATES)}
        self.beats = {}  # by agent, the last beat that it has heard of whom it is with, and has not echoed yet

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 5.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(nodes=st.sets(st.sampled_from(VOTERS), min_size=1), index=st.sampled_from(range(CANDIDATES)), data=st.data())
    def turn_to(self, nodes, index, data):
        """For whatever reason, also where the one that they leave does not notice; and ask it to lead."""
        for node in nodes:
            self.follows[node], agent = index, self.agents[node]
            self.beats.pop(node, None)
            free, silent = agent.free_in(index, self.now), self.now - agent.last_contact
            self.elections[index].add_agent(node, agent.epoch, free, silent, self.now)
        self.stands(index, data)

    @rule(node=st.sampled_from(VOTERS))
    def its_candidate_notices(self, node):
        if node in self.follows:
            self.elections[self.follows.pop(node)].remove_agent(node)

    @rule(index=st.sampled_from(range(CANDIDATES)), data=st.data())
    def asks_again(self, index, data):
        self.stands(index, data)

    def stands(self, index, data):
        election = self.elections[index]
        epoch, sure = election.start_candidacy(self.now), election.is_safe_request
        if epoch is None:
            return
        self.came[index].clear()
        for node in data.draw(st.permutations([node for node, with_ in self.follows.items() if with_ == index])):
            self.now += data.draw(st.sampled_from([0.0, 0.5]))
            free_in = self.agents[node].handle_request(epoch, sure, self.now)
            election.handle_promise(node, self.agents[node].epoch, free_in or 0.0, self.now)
            if free_in is not None:
                self.came[index].add(node)

    @rule(
        nodes=st.sets(st.sampled_from(VOTERS), min_size=1),
        late=st.sampled_from([0.0, 0.3, 3.0]),
        back=st.sampled_from([0.0, 0.3, 3.0]),
    )
    def say_that_they_are_there(self, nodes, late, back):
        """And hear a beat, twice, so that the first is echoed; all takes its time, and others act meanwhile."""
        for node in [*nodes, *nodes]:
            if node in self.follows:
                self.exchange(node, late, back)

    def exchange(self, node, late, back):
        election, agent, asked = self.elections[self.follows[node]], self.agents[node], self.now
        echo = self.beats.pop(node, None)
        self.now += late
        if echo is not None:
            election.record_echo(node, echo)
        sent, age, leads = self.now, self.now - election.majority_contact(self.now), election.is_leader
        self.now += back
        if leads and agent.epoch == election.epoch:
            agent.record_heartbeat_reply(self.now)
            self.beats[node] = sent
            end = lease_end(asked, age, TIMES.worker_limit_s)
            self.leases[node] = max(self.leases.get(node, -math.inf), end)

    @rule(index=st.sampled_from(range(CANDIDATES)))
    def candidate_dies_and_is_started_again(self, index):
        self.elections[index] = Election(index, CANDIDATES, len(VOTERS), TIMES)
        self.came[index].clear()
        for node in [node for node, with_ in self.follows.items() if with_ == index]:
            del self.follows[node]
            self.agents[node].record_death(index)

    @rule(node=st.sampled_from(VOTERS))
    def agent_dies_and_is_started_again(self, node):
        """Its workers die with it; what it has promised is forgotten."""
        if node in self.follows:
            self.elections[self.follows.pop(node)].remove_agent(node)
        self.agents[node] = Follower(CANDIDATES, TIMES.promise_s, self.now)
        self.leases.pop(node, None)
        self.beats.pop(node, None)

    def leading(self):
        """Those whose orders anybody follows."""
        for election in self.elections.values():
            its = [n for n, index in self.follows.items() if index == election.index]
            if election.may_order(self.now) and any(self.agents[node].epoch == election.epoch for node in its):
                yield election

    @invariant()
    def nobody_gives_a_place_away_whose_workers_may_run(self):
        """Nodes that have not come to a leader are lost to it only when what others have allowed them is over."""
        for election in self.leading():
            if self.now >= election.leases_expire_at:
                others = (node for node in self.leases if self.agents[node].epoch != election.epoch)
                absent = [node for node in others if node not in self.came[election.index]]
                assert all(self.leases[node] <= self.now for node in absent)

    @invariant()
    def one_leads_at_most(self):
        assert len(list(self.leading())) <= 1


TestPartitions = Partitions.TestCase
TestPartitions.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
