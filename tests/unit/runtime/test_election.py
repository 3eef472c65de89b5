"""Candidates for the controller: whatever is cut off, delayed or stopped, one leads at most, and one can lead again."""

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moc.runtime.election import Election, Follower, SilenceLimits, Voters, lease_end

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


def test_admitted_process_has_no_promise_of_an_earlier_one():
    agent = Follower(3, TIMES.promise_s, started_at=10.0)
    agent.handle_request(0, sure=True, now=11.0)
    agent.record_death(0)
    assert agent.free_in(1, 11.0) == 3.0
    agent.record_admission()
    assert agent.free_in(1, 11.0) == 0.0 and agent.last_contact == 11.0


class Voting:
    """A leader of nodes that store what it sends, and echo its beats."""

    def __init__(self, nodes, min_voters):
        self.now, self.nodes = 10.0, set(range(nodes))
        self.election = Election(0, 3, nodes, TIMES, min_voters=min_voters)
        for node in self.nodes:
            self.election.add_agent(node, -1, 0.0, 100.0, self.now)
        epoch = self.election.start_candidacy(self.now)
        assert any([self.election.handle_promise(node, epoch, 0.0, self.now) for node in self.nodes])
        self.echo(self.nodes)

    def echo(self, nodes):
        for node in nodes:
            self.election.record_voters_sent(node, self.now)
        self.now += 1.0
        for node in nodes:
            self.election.record_echo(node, self.now)

    def revise(self, leaving=(), nodes=None):
        """Revises the voters until nothing is left to do; these nodes answer."""
        nodes = self.nodes if nodes is None else nodes
        while self.election.revise_voters(self.nodes, set(leaving), self.now):
            self.echo(nodes)
        return self.election.voters


def candidate(voters, *, knowing=(), fresh=(), nodes=4, min_voters=2):
    """Whether a candidate is elected by nodes that have stored the voters and by restarted ones."""
    election = Election(1, 3, nodes, TIMES, min_voters=min_voters)
    for node in [*knowing, *fresh]:
        election.add_agent(node, voters.epoch, 0.0, 100.0, 50.0, voters if node in knowing else None)
    epoch = election.start_candidacy(50.0)
    return epoch is not None and any([election.handle_promise(node, epoch, 0.0, 50.0) for node in [*knowing, *fresh]])


def test_majority_of_remaining_voters_elects_after_departure():
    job = Voting(4, min_voters=2)
    assert not job.election.may_release(1)
    before, after = job.revise(), job.revise(leaving={1})
    assert (before.nodes, after.nodes) == ((0, 1, 2, 3), (0, 2, 3)) and job.election.may_release(1)
    assert candidate(after, knowing=[2, 3]) and not candidate(before, knowing=[2, 3])
    assert not candidate(after, knowing=[1, 2]) and not candidate(after, knowing=[2], fresh=[3])
    assert candidate(after, knowing=[2], fresh=[1, 3]) and candidate(after, fresh=[1, 2, 3])


def test_node_is_released_when_majority_stored_new_voters():
    job = Voting(4, min_voters=2)
    job.revise()
    assert job.election.revise_voters(job.nodes, {1, 2}, job.now)
    job.echo([0])
    assert not job.election.may_release(1) and not job.election.revise_voters(job.nodes, {1, 2}, job.now)
    job.echo([3])
    assert job.election.may_release(1) and not job.election.may_release(2)
    assert job.revise(leaving={1, 2}, nodes=[0, 3]).nodes == (0, 3) and job.election.may_release(2)
    assert job.revise(leaving={1, 2, 3}).nodes == (0, 3) and job.election.may_release(3)  # no fewer voters


def test_returning_node_becomes_voter_again():
    job = Voting(3, min_voters=2)
    job.revise(leaving={2})
    job.election.remove_agent(2)
    job.election.add_agent(2, -1, 0.0, 100.0, job.now)
    assert not job.election.handle_promise(2, job.election.epoch, 0.0, job.now)
    assert job.revise().nodes == (0, 1, 2)


def test_other_leader_cannot_change_voters_of_its_predecessor():
    """It makes them its own first, so that the change of a predecessor that few have stored is void."""
    job = Voting(4, min_voters=2)
    job.revise()
    job.election.revise_voters(job.nodes, {1}, job.now)
    job.echo([0])
    uncommitted = job.election.voters
    other = Election(1, 3, 4, TIMES, min_voters=2)
    for node in (1, 2, 3):
        other.add_agent(node, 0, 0.0, 100.0, 50.0, Voters((0, 1, 2, 3), uncommitted.lineage, 0, 1))
    epoch = other.start_candidacy(50.0)
    assert [other.handle_promise(node, epoch, 0.0, 50.0) for node in (1, 2, 3)] == [False, False, True]
    assert not other.revise_voters({1, 2, 3}, {2}, 50.0)
    assert other.voters.number > uncommitted.number


def test_start_quorum_includes_node_of_each_majority():
    for nodes in range(1, 12):
        for least in range((nodes + 1) // 2, nodes + 1):
            quorum = Election(0, 3, nodes, TIMES, min_voters=least).start_quorum
            assert nodes // 2 < quorum <= nodes and quorum + least // 2 + 1 > nodes
    assert Election(0, 3, 5, TIMES).start_quorum == 3


NODES, CANDIDATES = range(4), 2


class Partitions(RuleBasedStateMachine):
    """Four agents, two candidates; connections change, processes are paused and die, nodes depart and return.

    Messages take their time, and some are lost.

    Attributes:
        now: real time, of which nobody's clock is a part of its own.
        leases: by agent, until when its workers may run.
        follows: by agent, the candidate that it is connected with.
        came: by candidate, the agents that have promised its last epoch: from then on they are lost to it by silence.
        stored: by agent, the voters that it has stored.
        sent: nodes to which their candidate has sent its voters.
        leaving: nodes that are to depart.
    """

    def __init__(self):
        super().__init__()
        self.now = 1000.0
        self.agents = {node: self.new_agent() for node in NODES}
        self.elections = {index: self.new_election(index) for index in range(CANDIDATES)}
        self.follows, self.leases = {}, {}
        self.came = {index: set() for index in range(CANDIDATES)}
        self.beats = {}  # by agent, the last beat that it has heard of whom it is with, and has not echoed yet
        self.stored, self.sent, self.leaving = {}, {}, set()

    def new_agent(self):
        return Follower(CANDIDATES, TIMES.promise_s, self.now)

    def new_election(self, index):
        return Election(index, CANDIDATES, len(NODES), TIMES, min_voters=2)

    @initialize(departed=st.sets(st.sampled_from(NODES), max_size=2))
    def job_begins(self, departed):
        """All follow one candidate; some nodes have departed perhaps."""
        self.now += TIMES.promise_s
        for node in NODES:
            self.connect(node, 0)
        self.ask(0, list(NODES))
        self.leaving |= departed
        for _ in range(4):
            for node in [*NODES, *NODES]:
                if node in self.follows:
                    self.exchange(node, 0.0, 0.0, True)
            self.voters_change(0)

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 5.0]))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(nodes=st.sets(st.sampled_from(NODES), min_size=1), index=st.sampled_from(range(CANDIDATES)), data=st.data())
    def turn_to(self, nodes, index, data):
        """For whatever reason, also where the one that they leave does not notice; and ask it to lead."""
        for node in nodes & self.agents.keys():
            self.connect(node, index)
        self.stands(index, data)

    def connect(self, node, index):
        self.follows[node], agent = index, self.agents[node]
        self.beats.pop(node, None)
        self.sent.pop(node, None)
        free, silent = agent.free_in(index, self.now), self.now - agent.last_contact
        self.elections[index].add_agent(node, agent.epoch, free, silent, self.now, self.stored.get(node))

    @rule(node=st.sampled_from(NODES))
    def its_candidate_notices(self, node):
        if node in self.follows:
            self.elections[self.follows.pop(node)].remove_agent(node)

    @rule(index=st.sampled_from(range(CANDIDATES)), data=st.data())
    def asks_again(self, index, data):
        self.stands(index, data)

    def stands(self, index, data):
        there = [node for node, with_ in self.follows.items() if with_ == index]
        self.ask(index, data.draw(st.permutations(there)), data)

    def ask(self, index, nodes, data=None):
        election = self.elections[index]
        is_new = election.start_candidacy(self.now) is not None
        epoch, sure = election.epoch, election.is_safe_request
        if epoch is None:
            return
        if is_new:
            self.came[index].clear()
        for node in nodes:
            if self.agents[node].epoch == epoch:
                continue
            self.now += data.draw(st.sampled_from([0.0, 0.5])) if data else 0.0
            free_in = self.agents[node].handle_request(epoch, sure, self.now)
            election.handle_promise(node, self.agents[node].epoch, free_in or 0.0, self.now)
            if free_in is not None:
                self.came[index].add(node)

    @rule(
        nodes=st.sets(st.sampled_from(NODES), min_size=1),
        late=st.sampled_from([0.0, 0.3, 3.0]),
        back=st.sampled_from([0.0, 0.3, 3.0]),
        arrives=st.sampled_from([True, True, False]),
    )
    def say_that_they_are_there(self, nodes, late, back, arrives):
        """And hear a beat, twice, so that the first is echoed; all takes its time, and others act meanwhile."""
        for node in [*nodes, *nodes]:
            if node in self.follows:
                self.exchange(node, late, back, arrives)

    def exchange(self, node, late, back, arrives):
        """The answers of the candidate arrive, or the connection is lost before."""
        election, agent, asked = self.elections[self.follows[node]], self.agents[node], self.now
        echo = self.beats.pop(node, None)
        self.now += late
        if echo is not None:
            election.record_echo(node, echo)
        sent, age, leads = self.now, self.now - election.majority_contact(self.now), election.is_leader
        follows, voters = agent.epoch == election.epoch, None
        may_send = node in self.sent or election.may_admit(node, self.now)
        if follows and may_send and election.may_order(self.now) and self.sent.get(node) != election.voters:
            self.sent[node] = voters = election.voters
            election.record_voters_sent(node, self.now)
        self.now += back
        if not arrives:
            del self.follows[node]
            return
        if voters is not None:
            if node not in self.stored:
                agent.record_admission()
            self.stored[node] = voters
        if leads and follows:
            agent.record_heartbeat_reply(self.now)
            self.beats[node] = sent
            end = lease_end(asked, age, TIMES.worker_limit_s)
            self.leases[node] = max(self.leases.get(node, -math.inf), end)

    @rule(node=st.sampled_from(NODES))
    def is_to_depart(self, node):
        self.leaving.add(node)

    @rule(index=st.sampled_from(range(CANDIDATES)), lost=st.sets(st.sampled_from(NODES)))
    def voters_change(self, index, lost=frozenset()):
        """Nodes that are no voters any more depart; some that are not there are taken for lost."""
        election = self.elections[index]
        there = {node for node, with_ in self.follows.items() if with_ == index and node in self.sent}
        election.revise_voters(there, there & self.leaving | lost - there, self.now)
        for node in there & self.leaving:
            if election.may_order(self.now) and election.may_release(node):
                self.dies(node)
                del self.agents[node]

    @rule(index=st.sampled_from(range(CANDIDATES)))
    def candidate_dies_and_is_started_again(self, index):
        self.elections[index] = self.new_election(index)
        self.came[index].clear()
        for node in [node for node, with_ in self.follows.items() if with_ == index]:
            del self.follows[node]
            self.agents[node].record_death(index)

    @rule(node=st.sampled_from(NODES))
    def agent_is_started_again(self, node):
        """After it has died or departed; its workers have ended, and what it has promised or stored is forgotten."""
        self.dies(node)
        self.agents[node] = self.new_agent()

    def dies(self, node):
        if node in self.follows:
            self.elections[self.follows.pop(node)].remove_agent(node)
        for known in (self.leases, self.beats, self.stored, self.sent):
            known.pop(node, None)
        self.leaving.discard(node)

    def leading(self):
        """Those whose orders anybody follows."""
        for election in self.elections.values():
            its = [n for n, index in self.follows.items() if index == election.index]
            admitted = [node for node in its if node in self.sent and self.agents[node].epoch == election.epoch]
            if election.may_order(self.now) and admitted:
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
