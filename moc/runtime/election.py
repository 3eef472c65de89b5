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

So two leaders never order a node at the same time, and a rank block never has two sets of workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

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
        started_at: start time of this process; an earlier process may have made a promise.
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

    def record_death(self, index: int) -> None:
        """Records that no process listens at a candidate's address."""
        self._contact_times.pop(index, None)


@dataclass
class _KnownAgent:
    """Agent known to this candidate."""

    free_at: float  # time when this candidate may start to rely on the agent
    silent_since: float  # time of the last beat that it received from any candidate
    has_promised: bool = False  # it has promised the current epoch
    echoed_at: float = -math.inf  # send time of the newest beat that it has echoed
    is_connected: bool = True  # it is still connected


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
    """

    index: int
    candidates: int
    nodes: int
    times: SilenceLimits
    epoch: int | None = None
    is_leader: bool = False
    needs_all_nodes: bool = False
    _newest_epoch: int = -1
    _agents: dict[int, _KnownAgent] = field(default_factory=dict)
    _candidacy_at: float = -math.inf
    _leases_expire_at: float = -math.inf

    @property
    def required_promises(self) -> int:
        """Promises needed to lead: a majority, or one for the only candidate."""
        return 1 if self.candidates == 1 else self.nodes // 2 + 1

    def add_agent(self, node: int, epoch: int, free_in: float, silent: float, now: float) -> None:
        """Registers a connected agent.

        Args:
            node: number of the agent's node.
            epoch: newest epoch that it has promised.
            free_in: seconds until this candidate may rely on its promise.
            silent: seconds since it last received a beat.
            now: time of a monotonic clock that includes pauses of this process, as for all methods.
        """
        self._newest_epoch = max(self._newest_epoch, epoch)
        previous = self._agents.get(node)
        agent = self._agents[node] = _KnownAgent(now + free_in, now - silent)
        if self.is_leader and previous is not None:
            # Its last echo stays valid, as during a disconnect: a new process cannot promise another candidate so soon.
            agent.echoed_at = previous.echoed_at
            if epoch == self.epoch and previous.has_promised:  # a reconnect
                agent.has_promised, agent.free_at = True, previous.free_at

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
        if self.is_leader or answers_pending or len(self._agents) < self.required_promises:
            return None
        free = sum(voter.free_at <= now for voter in self._agents.values())
        if free < self.required_promises and not self.all_connected:
            return None
        self.needs_all_nodes = free < self.required_promises
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
        if free_in == 0:
            agent.echoed_at = self._candidacy_at
        promised = [v for v in self._agents.values() if v.has_promised and (self.needs_all_nodes or v.free_at <= now)]
        if self.is_leader or len(promised) < (self.nodes if self.needs_all_nodes else self.required_promises):
            return False
        self.is_leader = True
        self._leases_expire_at = max(v.silent_since for v in promised) + self.times.lease_s
        if self.needs_all_nodes:  # no other candidate can rely on any node
            for each in promised:
                each.free_at, each.echoed_at = now, self._candidacy_at
        return True

    def record_echo(self, node: int, sent: float) -> None:
        """Records that an agent has echoed a beat of this candidate sent at time ``sent``."""
        agent = self._agents.get(node)
        if agent is not None and agent.has_promised and sent >= agent.free_at:
            agent.echoed_at = max(agent.echoed_at, sent)

    @property
    def leases_expire_at(self) -> float:
        """Time when all leases of an earlier leader to absent nodes have expired."""
        return self._leases_expire_at

    def majority_contact(self, now: float) -> float:
        """Returns the latest time when a majority certainly followed; ``now`` for the only candidate."""
        if self.candidates == 1:
            return now
        times = sorted((v.echoed_at for v in self._agents.values()), reverse=True)
        return times[self.required_promises - 1] if len(times) >= self.required_promises else -math.inf

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
