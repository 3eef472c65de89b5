"""A training run on a model clock, with given costs of snapshots."""

import random
from dataclasses import dataclass, field

from moc.policy import Interval, ObservedIteration


@dataclass
class Clock:
    """Durations of an iteration and a snapshot, in seconds; may be changed between runs.

    Attributes:
        interval: decides when a snapshot is taken.
        iteration_s: an iteration that nothing disturbs.
        stall_s: for how long training stands still at a snapshot.
        persist_s: from its start until it is persisted, while training continues.
        slowdown: relative slowdown of iterations meanwhile.
        noise: maximum relative deviation of an iteration.
        starts: iterations completed at the start of each snapshot.
        lost_s: seconds lost by snapshots.
    """

    interval: Interval
    iteration_s: float = 1.0
    stall_s: float = 0.0
    persist_s: float = 0.0
    slowdown: float = 0.0
    noise: float = 0.0
    starts: list[int] = field(default_factory=list)
    lost_s: float = 0.0

    def __post_init__(self):
        self._random = random.Random(0)
        self._iteration, self._left_s, self._started = 0, 0.0, False

    def run(self, iterations: int, hiccups: dict[int, float] | None = None) -> "Clock":
        """Trains; a hiccup is the additional time of one iteration, counted from now."""
        for step in range(iterations):
            self._step((hiccups or {}).get(step, 0.0))
        return self

    def snapshots(self, count: int) -> "Clock":
        """Trains until so many more have been started, and the last of them is persisted."""
        wanted, limit = len(self.starts) + count, self._iteration + 10_000 * count
        while len(self.starts) < wanted or self._left_s > 0 or self._started:
            self._step(0.0)
            assert self._iteration < limit, "snapshots are not taken"
        return self

    def _step(self, hiccup: float) -> None:
        plain = self.iteration_s * (1 + self._random.uniform(-self.noise, self.noise))
        disturbed = min(plain * (1 + self.slowdown), plain + max(0.0, self._left_s) * self.slowdown)
        stall = self.stall_s if self._started else 0.0
        seconds = disturbed + stall + hiccup
        self.lost_s += disturbed - plain + stall
        self._left_s -= seconds
        self._iteration += 1
        self.interval.observe(ObservedIteration(seconds, stall, self._started, self._left_s > 0))
        self._started = self.interval.is_due(self._iteration)
        if self._started:
            assert self._left_s <= 0, "a snapshot starts while one is in flight"
            self.starts.append(self._iteration)
            self._left_s = self.persist_s
