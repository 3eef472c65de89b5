"""Elects a leader among controller candidates: the candidate that a majority of the nodes has promised to follow.

Two state machines without sockets, clocks or processes: :class:`Follower` for an agent, :class:`Election` for a
candidate.  They implement leader leases over numbered epochs, as in Raft but without a log, because agents restore the
state of a leader.

* An epoch belongs to one candidate: with ``c`` candidates, epoch ``e`` belongs to number ``e % c``.
* An agent follows one candidate at a time.  Another candidate may rely on it only after the agent has received
  nothing from its own candidate for ``promise_s``, or has detected its death.
* A candidate leads while a majority echoes its heartbeat replies (*beats*).  An echo counts from the send time of the
  beat, so delays and pauses only shorten leadership.
* Workers may run until their *lease* ends, ``runs_s`` after the last contact with a majority.  A beat renews the lease,
  counted from the send time of the agent's message that the beat answers.
* A leader declares an absent node lost only after all leases that its predecessor may have granted have expired.
* Departed and lost nodes are no voters if the job can continue without them.  As in Raft (Ongaro's dissertation,
  section 4.1), the leader adds or removes one voter at a time, after a majority of the current voters has stored these
  under its epoch.  So a majority of older voters includes a node that knows newer ones.
* Unlike in Raft, a restarted agent has forgotten the voters.  It counts when a leader has admitted it, or if a *start
  quorum* has promised: so many nodes that each majority of possible voters includes one of them.

So two leaders never order a node at the same time, and a rank block never has two sets of workers.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

MIN_JOIN_TIMEOUT_S = 600.0
"""Seconds for nodes to join at the start of the job, if ``--max-wait`` is less."""


@dataclass(frozen=True)
class SilenceLimits:
    """Silence limits; ``lease_s`` are the seconds after which a node is lost (``--silence-timeout``)."""

    lease_s: float

    @property
    def worker_limit_s(self) -> float:
        """Seconds without a controller after which workers end; below ``lease_s`` because termination takes time."""
        return 0.9 * self.lease_s

    @property
    def promise_s(self) -> float:
        """Seconds of silence after which an agent may follow another candidate, while its workers continue."""
        return self.lease_s / 2

    @property
    def heartbeat_interval_s(self) -> float:
        """Seconds between two heartbeats of an agent."""
        return min(1.0, self.lease_s / 8)

    @property
    def controller_timeout_s(self) -> float:
        """Seconds without an answer after which the launcher restarts its controller."""
        return min(10.0, self.lease_s / 2)


@dataclass
class Follower:
    """Agent's side of the election: the candidate that it follows.

    Attributes:
        candidates: number of candidates.
        promise_s: see :class:`SilenceLimits`.
        started_at: start time of this process, while others may rely on the promise of an earlier process.
        epoch: newest promised epoch; -1 if none.
    """

    candidates: int
    promise_s: float
    started_at: float
    epoch: int = -1
    _contact_times: dict[int, float] = field(default_factory=dict)  # by candidate, time of its last promise or beat
    _newest_contact: float = -math.inf  # maximum over all candidates, including dead ones, whose leases may still run

    @property
    def last_contact(self) -> float:
        """Time of the last promise or beat of any candidate; without one, the start of this process."""
        return max(self.started_at, self._newest_contact)

    def free_in(self, index: int, now: float) -> float:
        """Returns the seconds until candidate ``index`` may rely on this agent, because no other candidate may.

        ``now`` is a time of a monotonic clock.  Only one process listens at a candidate's address.
        """
        if self.candidates == 1:
            return 0.0
        others = [heard for other, heard in self._contact_times.items() if other != index]
        return max(0.0, max([self.started_at, *others]) + self.promise_s - now)

    def handle_request(self, epoch: int, sure: bool, now: float) -> float | None:
        """Handles the request for a promise by a candidate that stands for election or leads in an epoch.

        ``sure`` is true if the candidate leads already, or will lead only if all nodes of the job promise.

        Returns:
            Seconds until the candidate may rely on this agent, which then obeys no older epoch; None for a refusal.
        """
        index = epoch % self.candidates
        wait = self.free_in(index, now)
        if epoch <= self.epoch or (wait > 0 and not sure):
            return None
        self.epoch = epoch
        self.record_heartbeat_reply(now)
        return wait

    def record_heartbeat_reply(self, now: float) -> None:
        """Records a beat of the leading candidate, which this agent follows."""
        self._contact_times[self.epoch % self.candidates] = self._newest_contact = now

    def record_admission(self) -> None:
        """Records that a leader has admitted this process: no candidate relies on an earlier process of this node.

        A majority has followed the leader since this process connected (:meth:`Election.may_admit`).
        """
        self.started_at = -math.inf

    def record_death(self, index: int) -> None:
        """Records that no process listens at a candidate's address."""
        self._contact_times.pop(index, None)


@dataclass(frozen=True)
class Voters:
    """Numbered set of the nodes whose promises count.

    Attributes:
        nodes: the set.
        lineage: ID of the sets that follow one another; empty until a start quorum has stored this set, and so no
            majority of an earlier lineage can exist.
        epoch: epoch of the leader that made it.
        count: number of sets that this leader made before.
    """

    nodes: tuple[int, ...]
    lineage: str = ""
    epoch: int = -1
    count: int = 0

    @property
    def number(self) -> tuple[int, int]:
        """Newer sets of a lineage have larger numbers."""
        return self.epoch, self.count

    def to_message(self) -> dict:
        """Returns the set as a dictionary; JSON-serializable."""
        return vars(self) | {"nodes": list(self.nodes)}

    @classmethod
    def from_message(cls, message: dict) -> Voters:
        """Decodes a set; raises TypeError if the message has other fields."""
        fields: dict[str, Any] = message | {"nodes": tuple(message.get("nodes", ()))}
        return cls(**fields)


@dataclass
class _KnownAgent:
    """Agent known to this candidate."""

    free_at: float  # time when this candidate may start to rely on the agent
    silent_since: float  # time of the last beat that it received from any candidate
    connected_at: float
    has_promised: bool = False  # it has promised the current epoch
    echoed_at: float = -math.inf  # send time of the newest beat that it has echoed
    is_connected: bool = True  # it is still connected
    voters: Voters | None = None  # newest that it has certainly stored; None if none
    voters_sent_at: float = math.inf  # send time of the leader's voters to it
    is_admitted: bool = False  # its echoes count


@dataclass
class Election:
    """Candidate's side of the election.

    Attributes:
        index: number of this candidate.
        candidates: number of candidates.
        nodes: number of nodes of the job, including spares.
        times: silence limits.
        epoch: epoch of its candidacy or leadership; None if neither.
        is_leader: whether enough nodes have promised, and it is the leader.
        needs_all_nodes: whether all nodes must promise, because other candidates may still rely on some.
        min_voters: fewest voters that departures leave; 0 if all nodes remain voters.
        voters: current voters; None if it does not lead.
    """

    index: int
    candidates: int
    nodes: int
    times: SilenceLimits
    epoch: int | None = None
    is_leader: bool = False
    needs_all_nodes: bool = False
    min_voters: int = 0
    voters: Voters | None = None
    _newest_epoch: int = -1
    _agents: dict[int, _KnownAgent] = field(default_factory=dict)
    _candidacy_at: float = -math.inf
    _leases_expire_at: float = -math.inf

    @property
    def start_quorum(self) -> int:
        """Promises that suffice from any agents: a majority at least, or one for the only candidate."""
        if self.candidates == 1:
            return 1
        return max(self.nodes // 2 + 1, self.nodes - (self.min_voters or self.nodes) // 2)

    def _required(self, voters: Voters) -> int:
        return len(voters.nodes) // 2 + 1 if voters.lineage else self.start_quorum

    def _electing_voters(self, promised: Collection[int]) -> Voters | None:
        """Returns a set of voters with enough promises; None if there is none."""
        newest: dict[str, Voters] = {}
        for agent in self._agents.values():
            if agent.voters is not None and agent.voters.lineage:
                known = newest.setdefault(agent.voters.lineage, agent.voters)
                newest[known.lineage] = max(known, agent.voters, key=lambda voters: voters.number)
        stored = {node: self._agents[node].voters for node in promised}
        for lineage, voters in newest.items():
            knowing = [node for node, its in stored.items() if its is not None and its.lineage == lineage]
            if len(set(knowing).intersection(voters.nodes)) >= self._required(voters):
                return voters
        return Voters(tuple(range(self.nodes))) if len(promised) >= self.start_quorum else None

    def add_agent(
        self, node: int, epoch: int, free_in: float, silent: float, now: float, voters: Voters | None = None
    ) -> None:
        """Registers a connected agent.

        Args:
            node: number of the agent's node.
            epoch: newest epoch that it has promised.
            free_in: seconds until this candidate may rely on its promise.
            silent: seconds since it last received a beat.
            now: time of a monotonic clock that includes pauses of this process, as for all methods.
            voters: newest voters that it has stored; None if its process has stored none.
        """
        self._newest_epoch = max(self._newest_epoch, epoch)
        previous = self._agents.get(node)
        agent = self._agents[node] = _KnownAgent(now + free_in, now - silent, now, voters=voters)
        if self.voters and voters and voters.lineage:
            agent.is_admitted = voters.lineage == self.voters.lineage
        if self.is_leader and previous is not None:
            # Its last echo stays valid, as during a disconnect: a new process cannot promise another candidate so soon.
            agent.echoed_at = previous.echoed_at
            if epoch == self.epoch and previous.has_promised:  # a reconnect
                agent.has_promised, agent.free_at = True, previous.free_at
                agent.is_admitted |= previous.is_admitted

    def remove_agent(self, node: int) -> None:
        """Unregisters a disconnected agent; if this candidate leads, the agent's last echo stays valid."""
        agent = self._agents.get(node)
        if agent is not None and not self.is_leader:
            del self._agents[node]
        elif agent is not None:
            agent.is_connected = False

    def start_candidacy(self, now: float) -> int | None:
        """Starts a candidacy if enough agents are free; returns the epoch to request from all agents, or None."""
        answers_pending = (
            now - self._candidacy_at < self.times.promise_s / 4
        )  # answers to the last candidacy may still arrive
        if self.is_leader or answers_pending or self._electing_voters(self._agents) is None:
            return None
        free = self._electing_voters([node for node, voter in self._agents.items() if voter.free_at <= now])
        if free is None and not self.all_connected:
            return None
        self.needs_all_nodes = free is None
        first = self._newest_epoch + 1
        self.epoch = first + (self.index - first) % self.candidates
        self._newest_epoch, self._candidacy_at = self.epoch, now
        for voter in self._agents.values():
            voter.has_promised = False
        return self.epoch

    @property
    def all_connected(self) -> bool:
        """Whether all nodes of the job are connected."""
        return sum(voter.is_connected for voter in self._agents.values()) == self.nodes

    @property
    def is_safe_request(self) -> bool:
        """Whether a promise is safe at any time: see :meth:`Follower.handle_request`."""
        return self.is_leader or self.needs_all_nodes

    def handle_promise(self, node: int, epoch: int, free_in: float, now: float) -> bool:
        """Handles an agent's answer; returns whether it makes this candidate the leader.

        ``epoch`` is the epoch that the agent has promised; it differs from the requested epoch after a refusal.
        """
        self._newest_epoch = max(self._newest_epoch, epoch)
        agent = self._agents.get(node)
        if agent is None or epoch != self.epoch:
            return False
        agent.has_promised, agent.free_at = True, now + free_in
        if self.is_leader:
            return False
        if free_in == 0:
            agent.echoed_at = self._candidacy_at
        promised = {
            node: voter
            for node, voter in self._agents.items()
            if voter.has_promised and (self.needs_all_nodes or voter.free_at <= now)
        }
        voters = self._electing_voters(promised)
        if voters is None or (self.needs_all_nodes and len(promised) < self.nodes):
            return False
        self.is_leader, self.voters = True, Voters(voters.nodes, voters.lineage, epoch)
        self._leases_expire_at = max(v.silent_since for v in promised.values()) + self.times.lease_s
        for voter in promised.values():
            voter.is_admitted = True
            if self.needs_all_nodes:  # no other candidate can rely on any node
                voter.free_at, voter.echoed_at = now, self._candidacy_at
        return True

    def may_admit(self, node: int, now: float) -> bool:
        """Returns whether this leader may send orders and its voters to an agent that has promised to follow it.

        A restarted agent may have forgotten a promise to another leader.  If a majority has followed this one since the
        agent connected, there is no other.
        """
        agent = self._agents[node]
        contact = self.majority_contact(now)
        return self.may_order(now) and (agent.voters is not None or contact >= agent.connected_at)

    def record_voters_sent(self, node: int, now: float) -> None:
        """Records that this leader has sent its voters to an agent that it may admit."""
        agent = self._agents[node]
        agent.is_admitted, agent.voters_sent_at = True, min(agent.voters_sent_at, now)

    def record_echo(self, node: int, sent: float) -> None:
        """Records that an agent has echoed a beat of this candidate sent at time ``sent``.

        The agent has stored all voters that were sent to it before.
        """
        agent = self._agents.get(node)
        if agent is None or not agent.has_promised or sent < agent.free_at:
            return
        if agent.is_admitted or (self.voters is not None and not self.voters.lineage):
            agent.echoed_at = max(agent.echoed_at, sent)
        if sent >= agent.voters_sent_at:
            agent.voters = self.voters

    @property
    def _voters_are_stored(self) -> bool:
        """Whether enough of the current voters have stored these."""
        if self.voters is None:
            return False
        stored = [self._agents[node].voters for node in self.voters.nodes if node in self._agents]
        return stored.count(self.voters) >= self._required(self.voters)

    def revise_voters(self, present: set[int], leaving: set[int], now: float) -> bool:
        """Makes the next change of the voters, if any and if the last one is stored; returns whether it did.

        Args:
            present: nodes that this leader has admitted and that are connected.
            leaving: departing nodes among them, and lost nodes.
            now: as for :meth:`add_agent`.
        """
        if self.candidates == 1 or self.voters is None or not self.may_order(now) or not self._voters_are_stored:
            return False
        lineage, nodes, epoch = self.voters.lineage, set(self.voters.nodes), self.voters.epoch
        if not lineage:
            lineage = secrets.token_hex(8)
        elif nodes & leaving and len(nodes) > (self.min_voters or self.nodes):
            nodes.remove(min(nodes & leaving))
        elif new := present - leaving - nodes:
            nodes.add(min(new))
        else:
            return False
        self.voters = Voters(tuple(sorted(nodes)), lineage, epoch, self.voters.count + 1)
        for agent in self._agents.values():
            agent.voters_sent_at = math.inf
        return True

    def may_release(self, node: int) -> bool:
        """Returns whether a node may depart: it is no voter any more, or all voters are needed."""
        if self.candidates == 1:
            return True
        if self.voters is None or not self.voters.lineage or not self._voters_are_stored:
            return False
        return node not in self.voters.nodes or len(self.voters.nodes) <= (self.min_voters or self.nodes)

    def required_without(self, leaving: set[int], present: set[int]) -> int:
        """Returns how many of the other nodes a leader needs after nodes have departed; arguments as before."""
        if self.candidates == 1:
            return 1
        nodes = present.union(self.voters.nodes if self.voters else range(self.nodes))
        return max(len(nodes - leaving), min(len(nodes), self.min_voters or self.nodes)) // 2 + 1

    @property
    def leases_expire_at(self) -> float:
        """Time when all leases of an earlier leader to absent nodes have expired."""
        return self._leases_expire_at

    def majority_contact(self, now: float) -> float:
        """Returns the latest time when a majority certainly followed; ``now`` for the only candidate."""
        if self.candidates == 1:
            return now
        if self.voters is None:
            return -math.inf
        voters = (self._agents[node] for node in self.voters.nodes if node in self._agents)
        times, required = sorted((v.echoed_at for v in voters), reverse=True), self._required(self.voters)
        return times[required - 1] if len(times) >= required else -math.inf

    def may_order(self, now: float) -> bool:
        """Returns whether this candidate leads and no other candidate can lead yet."""
        return self.is_leader and now - self.majority_contact(now) < self.times.promise_s

    def has_lost_leadership(self, now: float) -> bool:
        """Returns whether it has lost its majority permanently, or an agent has promised a later epoch."""
        if not self.is_leader or self.epoch is None:
            return False
        return now - self.majority_contact(now) >= self.times.lease_s or self._newest_epoch > self.epoch


def lease_end(sent_at: float, age: float, worker_limit_s: float) -> float:
    """Returns the time until which workers may run.

    Args:
        sent_at: send time, by the agent's clock, of the message that the beat answers.
        age: seconds from the last contact with a majority to the sending of the beat.
        worker_limit_s: see :class:`SilenceLimits`.
    """
    return sent_at - age + worker_limit_s
