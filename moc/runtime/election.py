"""Which candidate for the controller leads: the one that a majority of the nodes has promised to follow.

Two state machines without sockets, clocks and processes: :class:`Allegiance` is an agent's, :class:`Election` a
candidate's.  They are leader leases over numbered epochs (as in Raft, but without a log: what a leader has to know, the
agents tell it).

* An epoch belongs to one candidate: epoch ``e`` of ``c`` candidates to number ``e % c``.
* An agent follows one candidate at a time.  Before another one may count on it, it has heard nothing of its own for
  ``promise_s``, or knows that process to be dead.
* A candidate leads while a majority echoes what it sends (*beats*).  It counts from when it had sent the beat that was
  echoed, so delays and pauses only make it believe less.
* Workers may run until their *lease* ends, ``runs_s`` after a majority was heard last.  A beat renews it, counted from
  when the agent had sent what the beat answers.
* A leader takes an absent node for lost not before the leases that its predecessor may have given have ended.

So at no moment do two leaders give orders to the same node, and no place has two sets of workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

BEGIN_S = 600.0
"""How long nodes have to come at the beginning of the job, if ``--max-wait`` is less."""


@dataclass(frozen=True)
class Times:
    """How long silence is borne.

    Attributes:
        lease_s: seconds after which a node that was not heard of is lost (``--silence-timeout``).
    """

    lease_s: float

    @property
    def runs_s(self) -> float:
        """Seconds without the controller after which workers end: sooner, since to end takes them a moment."""
        return 0.9 * self.lease_s

    @property
    def promise_s(self) -> float:
        """Seconds of silence after which an agent may follow another candidate, while its workers go on."""
        return self.lease_s / 2

    @property
    def says_s(self) -> float:
        """How often an agent says that it is there."""
        return min(1.0, self.lease_s / 8)

    @property
    def hangs_s(self) -> float:
        """Seconds without an answer after which the launcher starts its controller again."""
        return min(10.0, self.lease_s / 2)


@dataclass
class Allegiance:
    """Whom an agent follows.

    Attributes:
        candidates: how many there are.
        promise_s: see :class:`Times`.
        born: when this process began; one before it may have promised something.
        epoch: the newest that was promised; -1 if none was.
    """

    candidates: int
    promise_s: float
    born: float
    epoch: int = -1
    _heard: dict[int, float] = field(default_factory=dict)  # by candidate, when it was promised or heard of last

    @property
    def heard(self) -> float:
        """When a candidate that led was heard of last; if none was, when this process began."""
        return max(self._heard.values(), default=self.born)

    def free_in(self, index: int, now: float) -> float:
        """Seconds until a candidate may count on this agent: no other one does so any more.

        Args:
            index: of the candidate; only one process listens at its address.
            now: by a clock that only goes forward.
        """
        if self.candidates == 1:
            return 0.0
        others = [heard for other, heard in self._heard.items() if other != index]
        return max(0.0, max([self.born, *others]) + self.promise_s - now)

    def asked(self, epoch: int, sure: bool, now: float) -> float | None:
        """A candidate stands, or leads.

        Args:
            epoch: of the candidate.
            sure: it leads already, or does so only if all nodes of the job promise.
            now: as in :meth:`free_in`.

        Returns:
            Seconds until it may count on this agent, which obeys nobody of an older epoch from now on; None if it is
            promised nothing.
        """
        index = epoch % self.candidates
        wait = self.free_in(index, now)
        if epoch <= self.epoch or (wait > 0 and not sure):
            return None
        self.epoch, self._heard[index] = epoch, now
        return wait

    def beat(self, now: float) -> None:
        """The candidate that it follows leads, and is there."""
        self._heard[self.epoch % self.candidates] = now

    def died(self, index: int) -> None:
        """No process listens at the address of a candidate any more."""
        self._heard.pop(index, None)


@dataclass
class _Voter:
    """An agent that is connected.

    Attributes:
        free_at: when this candidate may count on it.
        silent_since: when it had heard the last beat of any candidate.
        promised: it has promised the current epoch.
        echoed: when the newest beat had been sent that it has echoed; minus infinity if none.
        there: its connection is.
    """

    free_at: float
    silent_since: float
    promised: bool = False
    echoed: float = -math.inf
    there: bool = True


@dataclass
class Election:
    """A candidate's part.

    Attributes:
        index: of this candidate.
        candidates: how many there are.
        voters: nodes of the job, spares too.
        times: how long silence is borne.
        epoch: in which it stands or leads; None if it does neither.
        leads: a majority has promised.
        needs_all: it leads only if all nodes promise, since some may still be counted on by others.
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
        """Votes; a single candidate has no rival, so whoever comes will do."""
        return 1 if self.candidates == 1 else self.voters // 2 + 1

    def comes(self, node: int, epoch: int, free_in: float, silent: float, now: float) -> None:
        """An agent is connected.

        Args:
            node: its number.
            epoch: the newest that it has promised.
            free_in: seconds until it may promise this candidate something.
            silent: seconds since it heard a beat.
            now: by a clock that only goes forward, as everywhere here; it counts pauses of this process too.
        """
        self._known = max(self._known, epoch)
        before = self._there.get(node)
        voter = self._there[node] = _Voter(now + free_in, now - silent)
        if self.leads and epoch == self.epoch and before is not None and before.promised:  # it comes back
            voter.promised, voter.echoed, voter.free_at = True, before.echoed, before.free_at

    def goes(self, node: int) -> None:
        """Its connection is gone; for as long as it was last heard, it still counts as following."""
        voter = self._there.get(node)
        if voter is not None and not self.leads:
            del self._there[node]
        elif voter is not None:
            voter.there = False

    def stands(self, now: float) -> int | None:
        """The epoch in which to ask all agents for their promise now, if there are enough of them."""
        waits = now - self._stood_at < self.times.promise_s / 4  # for answers
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
        """Whether a promise is asked for that harms nobody: see :meth:`Allegiance.asked`."""
        return self.leads or self.needs_all

    def promised(self, node: int, epoch: int, free_in: float, now: float) -> bool:
        """An agent has answered; whether this candidate leads now, and did not before.

        Args:
            node: which.
            epoch: that it has promised; another one than was asked for if it refuses.
            free_in: seconds until it may be counted on.
            now: see :meth:`comes`.
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
        if self.needs_all:  # nobody else can count on anybody
            self._lost_at = now
            for each in promised:
                each.free_at, each.echoed = now, self._stood_at
        else:
            self._lost_at = max(v.silent_since for v in promised) + self.times.lease_s
        return True

    def echoed(self, node: int, sent: float) -> None:
        """An agent that has promised has heard a beat of this candidate, which was sent at some time."""
        voter = self._there.get(node)
        if voter is not None and voter.promised and sent >= voter.free_at:
            voter.echoed = max(voter.echoed, sent)

    @property
    def absent_are_lost_at(self) -> float:
        """When the leases end that an earlier leader may have given to nodes that are not here."""
        return self._lost_at

    def heard(self, now: float) -> float:
        """When a majority followed for certain; a single candidate needs none."""
        if self.candidates == 1:
            return now
        times = sorted((v.echoed for v in self._there.values()), reverse=True)
        return times[self.needed - 1] if len(times) >= self.needed else -math.inf

    def may_order(self, now: float) -> bool:
        """Whether it leads, and no other candidate can do so yet."""
        return self.leads and now - self.heard(now) < self.times.promise_s

    def is_over(self, now: float) -> bool:
        """Whether it has lost its majority for good, or somebody has followed a later one."""
        if not self.leads or self.epoch is None:
            return False
        return now - self.heard(now) >= self.times.lease_s or self._known > self.epoch


def lease_end(asked: float, age: float, runs_s: float) -> float:
    """Until when workers may run.

    Args:
        asked: when the agent had sent what the beat answers, by its own clock.
        age: seconds, when the beat was sent, since a majority had been heard.
        runs_s: see :class:`Times`.
    """
    return asked - age + runs_s
