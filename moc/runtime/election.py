"""Elects a leader among controller candidates: the candidate that a majority of the nodes has promised to follow.

Two state machines without sockets, clocks or processes: :class:`Allegiance` for an agent, :class:`Election` for a
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

BEGIN_S = 600.0
"""Seconds for nodes to join at the start of the job, if ``--max-wait`` is less."""


@dataclass(frozen=True)
class Times:
    """Silence limits; ``lease_s`` are the seconds after which a node is lost (``--silence-timeout``)."""

    lease_s: float

    @property
    def runs_s(self) -> float:
        """Seconds without a controller after which workers end; below ``lease_s`` because termination takes time."""
        return 0.9 * self.lease_s

    @property
    def promise_s(self) -> float:
        """Seconds of silence after which an agent may follow another candidate, while its workers continue."""
        return self.lease_s / 2

    @property
    def says_s(self) -> float:
        """Seconds between two heartbeats of an agent."""
        return min(1.0, self.lease_s / 8)

    @property
    def hangs_s(self) -> float:
        """Seconds without an answer after which the launcher restarts its controller."""
        return min(10.0, self.lease_s / 2)


@dataclass
class Allegiance:
    """Agent's side of the election: the candidate that it follows.

    Attributes:
        candidates: number of candidates.
        promise_s: see :class:`Times`.
        born: start time of this process; an earlier process may have made a promise.
        epoch: newest promised epoch; -1 if none.
    """

    candidates: int
    promise_s: float
    born: float
    epoch: int = -1
    _heard: dict[int, float] = field(default_factory=dict)  # by candidate, time of its last promise or beat
    _last: float = -math.inf  # maximum over all candidates, including dead ones, whose leases may still run

    @property
    def heard(self) -> float:
        """Time of the last promise or beat of any candidate; without one, the start of this process."""
        return max(self.born, self._last)

    def free_in(self, index: int, now: float) -> float:
        """Returns the seconds until candidate ``index`` may rely on this agent, because no other candidate may.

        ``now`` is a time of a monotonic clock.  Only one process listens at a candidate's address.
        """
        if self.candidates == 1:
            return 0.0
        others = [heard for other, heard in self._heard.items() if other != index]
        return max(0.0, max([self.born, *others]) + self.promise_s - now)

    def asked(self, epoch: int, sure: bool, now: float) -> float | None:
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
        self.beat(now)
        return wait

    def beat(self, now: float) -> None:
        """Records a beat of the leading candidate, which this agent follows."""
        self._heard[self.epoch % self.candidates] = self._last = now

    def died(self, index: int) -> None:
        """Records that no process listens at a candidate's address."""
        self._heard.pop(index, None)


@dataclass
class _Voter:
    """Agent known to this candidate."""

    free_at: float  # time when this candidate may start to rely on the agent
    silent_since: float  # time of the last beat that it received from any candidate
    promised: bool = False  # it has promised the current epoch
    echoed: float = -math.inf  # send time of the newest beat that it has echoed
    there: bool = True  # it is still connected


@dataclass
class Election:
    """Candidate's side of the election.

    Attributes:
        index: number of this candidate.
        candidates: number of candidates.
        voters: number of nodes of the job, including spares.
        times: silence limits.
        epoch: epoch of its candidacy or leadership; None if neither.
        leads: whether enough nodes have promised, and it is the leader.
        needs_all: whether all nodes must promise, because other candidates may still rely on some.
    """

    index: int
    candidates: int
    voters: int
    times: Times
    epoch: int | None = None
    leads: bool = False
    needs_all: bool = False
    _known: int = -1
    _there: dict[int, _Voter] = field(default_factory=dict)
    _stood_at: float = -math.inf
    _lost_at: float = -math.inf

    @property
    def needed(self) -> int:
        """Promises needed to lead: a majority, or one for the only candidate."""
        return 1 if self.candidates == 1 else self.voters // 2 + 1

    def comes(self, node: int, epoch: int, free_in: float, silent: float, now: float) -> None:
        """Registers a connected agent.

        Args:
            node: number of the agent's node.
            epoch: newest epoch that it has promised.
            free_in: seconds until this candidate may rely on its promise.
            silent: seconds since it last received a beat.
            now: time of a monotonic clock that includes pauses of this process, as for all methods.
        """
        self._known = max(self._known, epoch)
        before = self._there.get(node)
        voter = self._there[node] = _Voter(now + free_in, now - silent)
        if self.leads and before is not None:
            # Its last echo stays valid, as during a disconnect: a new process cannot promise another candidate so soon.
            voter.echoed = before.echoed
            if epoch == self.epoch and before.promised:  # a reconnect
                voter.promised, voter.free_at = True, before.free_at

    def goes(self, node: int) -> None:
        """Unregisters a disconnected agent; if this candidate leads, the agent's last echo stays valid."""
        voter = self._there.get(node)
        if voter is not None and not self.leads:
            del self._there[node]
        elif voter is not None:
            voter.there = False

    def stands(self, now: float) -> int | None:
        """Starts a candidacy if enough agents are free; returns the epoch to request from all agents, or None."""
        waits = now - self._stood_at < self.times.promise_s / 4  # answers to the last candidacy may still arrive
        if self.leads or waits or len(self._there) < self.needed:
            return None
        free = sum(voter.free_at <= now for voter in self._there.values())
        if free < self.needed and not self.everybody:
            return None
        self.needs_all = free < self.needed
        first = self._known + 1
        self.epoch = first + (self.index - first) % self.candidates
        self._known, self._stood_at = self.epoch, now
        for voter in self._there.values():
            voter.promised = False
        return self.epoch

    @property
    def everybody(self) -> bool:
        """Whether all nodes of the job are connected."""
        return sum(voter.there for voter in self._there.values()) == self.voters

    @property
    def sure(self) -> bool:
        """Whether a promise is safe at any time: see :meth:`Allegiance.asked`."""
        return self.leads or self.needs_all

    def promised(self, node: int, epoch: int, free_in: float, now: float) -> bool:
        """Handles an agent's answer; returns whether it makes this candidate the leader.

        ``epoch`` is the epoch that the agent has promised; it differs from the requested epoch after a refusal.
        """
        self._known = max(self._known, epoch)
        voter = self._there.get(node)
        if voter is None or epoch != self.epoch:
            return False
        voter.promised, voter.free_at = True, now + free_in
        if free_in == 0:
            voter.echoed = self._stood_at
        promised = [v for v in self._there.values() if v.promised and (self.needs_all or v.free_at <= now)]
        if self.leads or len(promised) < (self.voters if self.needs_all else self.needed):
            return False
        self.leads = True
        self._lost_at = max(v.silent_since for v in promised) + self.times.lease_s
        if self.needs_all:  # no other candidate can rely on any node
            for each in promised:
                each.free_at, each.echoed = now, self._stood_at
        return True

    def echoed(self, node: int, sent: float) -> None:
        """Records that an agent has echoed a beat of this candidate sent at time ``sent``."""
        voter = self._there.get(node)
        if voter is not None and voter.promised and sent >= voter.free_at:
            voter.echoed = max(voter.echoed, sent)

    @property
    def absent_are_lost_at(self) -> float:
        """Time when all leases of an earlier leader to absent nodes have expired."""
        return self._lost_at

    def heard(self, now: float) -> float:
        """Returns the latest time when a majority certainly followed; ``now`` for the only candidate."""
        if self.candidates == 1:
            return now
        times = sorted((v.echoed for v in self._there.values()), reverse=True)
        return times[self.needed - 1] if len(times) >= self.needed else -math.inf

    def may_order(self, now: float) -> bool:
        """Returns whether this candidate leads and no other candidate can lead yet."""
        return self.leads and now - self.heard(now) < self.times.promise_s

    def is_over(self, now: float) -> bool:
        """Returns whether it has lost its majority permanently, or an agent has promised a later epoch."""
        if not self.leads or self.epoch is None:
            return False
        return now - self.heard(now) >= self.times.lease_s or self._known > self.epoch


def lease_end(asked: float, age: float, runs_s: float) -> float:
    """Returns the time until which workers may run.

    Args:
        asked: send time, by the agent's clock, of the message that the beat answers.
        age: seconds from the last contact with a majority to the sending of the beat.
        runs_s: see :class:`Times`.
    """
    return asked - age + runs_s
