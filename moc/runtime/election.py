"""Leader election among controller candidates: the one that a majority of the nodes has promised to follow leads.

Two state machines without sockets, clocks or processes: :class:`Allegiance` is an agent's, :class:`Election` a
candidate's.  They implement leader leases over numbered epochs, as in Raft but without a log: agents restore the state
of a leader.

* An epoch belongs to one candidate: epoch ``e`` of ``c`` candidates to number ``e % c``.
* An agent follows one candidate at a time.  Before another one may count on it, it has heard nothing from its own for
  ``promise_s``, or knows that process to be dead.
* A candidate leads while a majority echoes its *beats*.  An echo counts from the time at which its beat was sent, so
  delays and pauses only shorten leadership.
* Workers may run until their *lease* ends, ``runs_s`` after a majority was last heard.  A beat renews the lease,
  counted from the time at which the agent sent the message that the beat answers.
* A leader declares an absent node lost only after all leases that its predecessor may have granted have expired.

So no two leaders ever order the same node at the same time, and no place ever has two sets of workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

BEGIN_S = 600.0
"""Seconds that nodes have to join at the start of the job, if ``--max-wait`` is less."""


@dataclass(frozen=True)
class Times:
    """Silence limits; ``lease_s`` are the seconds after which a node is lost (``--silence-timeout``)."""

    lease_s: float

    @property
    def runs_s(self) -> float:
        """Seconds without a controller after which workers end; below ``lease_s``, since ending takes time."""
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
    """The candidate that an agent follows.

    Attributes:
        candidates: number of candidates.
        promise_s: see :class:`Times`.
        born: start of this process; an earlier one may have promised something.
        epoch: the newest promised; -1 if none.
    """

    candidates: int
    promise_s: float
    born: float
    epoch: int = -1
    _heard: dict[int, float] = field(default_factory=dict)  # by candidate, when it was last promised or heard
    _last: float = -math.inf  # the same of any candidate, dead ones included: what they have granted may outlive them

    @property
    def heard(self) -> float:
        """When a leading candidate was last heard; if none was, the start of this process."""
        return max(self.born, self._last)

    def free_in(self, index: int, now: float) -> float:
        """Seconds until candidate ``index`` may count on this agent, because no other one may any more.

        ``now`` is of a monotonic clock.  Only one process listens at a candidate's address.
        """
        if self.candidates == 1:
            return 0.0
        others = [heard for other, heard in self._heard.items() if other != index]
        return max(0.0, max([self.born, *others]) + self.promise_s - now)

    def asked(self, epoch: int, sure: bool, now: float) -> float | None:
        """Handles the request of a candidate that stands for election or leads in an epoch.

        ``sure`` says that it leads already, or will lead only if all nodes of the job promise.

        Returns:
            Seconds until it may count on this agent, which from now on obeys no older epoch; None if the agent refuses.
        """
        index = epoch % self.candidates
        wait = self.free_in(index, now)
        if epoch <= self.epoch or (wait > 0 and not sure):
            return None
        self.epoch = epoch
        self.beat(now)
        return wait

    def beat(self, now: float) -> None:
        """Records a beat of the leading candidate that this agent follows."""
        self._heard[self.epoch % self.candidates] = self._last = now

    def died(self, index: int) -> None:
        """Records that no process listens at a candidate's address any more."""
        self._heard.pop(index, None)


@dataclass
class _Voter:
    """A connected agent."""

    free_at: float  # from then on, this candidate may count on it
    silent_since: float  # it last heard a beat of any candidate
    promised: bool = False  # the current epoch
    echoed: float = -math.inf  # send time of the newest beat that it has echoed
    there: bool = True  # it is still connected


@dataclass
class Election:
    """A candidate's side of the election.

    Attributes:
        index: of this candidate.
        candidates: number of candidates.
        voters: nodes of the job, including spares.
        times: silence limits.
        epoch: in which it stands or leads; None if neither.
        leads: a majority has promised.
        needs_all: it leads only if all nodes promise, since other candidates may still count on some.
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
        """Votes to win; a sole candidate has no rival and needs one."""
        return 1 if self.candidates == 1 else self.voters // 2 + 1

    def comes(self, node: int, epoch: int, free_in: float, silent: float, now: float) -> None:
        """Registers a connected agent.

        Args:
            node: its number.
            epoch: the newest that it has promised.
            free_in: seconds until it may promise this candidate something.
            silent: seconds since it last heard a beat.
            now: of a monotonic clock that includes pauses of this process, as for all methods.
        """
        self._known = max(self._known, epoch)
        before = self._there.get(node)
        voter = self._there[node] = _Voter(now + free_in, now - silent)
        if self.leads and before is not None:
            # What it has echoed keeps counting, as while it is away: a new process of it promises no other one so soon.
            voter.echoed = before.echoed
            if epoch == self.epoch and before.promised:  # a reconnect
                voter.promised, voter.free_at = True, before.free_at

    def goes(self, node: int) -> None:
        """Unregisters a disconnected agent; under a leader its last echo keeps counting."""
        voter = self._there.get(node)
        if voter is not None and not self.leads:
            del self._there[node]
        elif voter is not None:
            voter.there = False

    def stands(self, now: float) -> int | None:
        """Starts a candidacy if enough agents are free; returns its epoch, in which to ask all agents, or None."""
        waits = now - self._stood_at < self.times.promise_s / 4  # for the last candidacy's answers
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

        ``epoch`` is the one that it has promised, another than the requested one if it refuses.
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
        if self.needs_all:  # no other candidate can count on any node
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
        """When the leases expire that an earlier leader may have granted to absent nodes."""
        return self._lost_at

    def heard(self, now: float) -> float:
        """Latest time at which a majority certainly followed; ``now`` for a sole candidate."""
        if self.candidates == 1:
            return now
        times = sorted((v.echoed for v in self._there.values()), reverse=True)
        return times[self.needed - 1] if len(times) >= self.needed else -math.inf

    def may_order(self, now: float) -> bool:
        """Whether it leads, and no other candidate can lead yet."""
        return self.leads and now - self.heard(now) < self.times.promise_s

    def is_over(self, now: float) -> bool:
        """Whether it has lost its majority for good, or an agent has promised a later epoch."""
        if not self.leads or self.epoch is None:
            return False
        return now - self.heard(now) >= self.times.lease_s or self._known > self.epoch


def lease_end(asked: float, age: float, runs_s: float) -> float:
    """Time until which workers may run.

    Args:
        asked: when the agent sent the message that the beat answers, by its own clock.
        age: seconds between the last contact with a majority and the sending of the beat.
        runs_s: see :class:`Times`.
    """
    return asked - age + runs_s
