"""Simulates a run by discrete events: failures, replacements and recoveries; a step leads to the next event."""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from moc.simulate.errors import SimulationError
from moc.simulate.failures import Event, Faults
from moc.simulate.members import Members
from moc.simulate.policy_costs import Loss, PolicyCosts, Strategy, Traffic
from moc.simulate.result import Result


@dataclass(frozen=True)
class SimulatedJob:
    """Job to simulate, and its duration.

    Attributes:
        iteration_s: seconds of an iteration without checkpoints.
        samples: sequences per iteration.
        nodes: nodes that the job needs.
        stages: pipeline stages; a local recovery replays some of them.
        wall_s: seconds to simulate.
        spares: spare nodes; None for unlimited.
        repair_s: seconds until a lost node is a spare again.
        available: nodes at the start according to a trace; None to use nodes and spares.
        seed: seed of all random numbers.
        parts: number of equal parts of the run for values over time.

    Raises:
        ValueError: a value that must be positive is not.
    """

    iteration_s: float
    samples: int = 512
    nodes: int = 12
    stages: int = 1
    wall_s: float = 12 * 3600.0
    spares: int | None = None
    repair_s: float = math.inf
    available: int | None = None
    seed: int = 0
    parts: int = 72

    def __post_init__(self):
        for name in ("iteration_s", "samples", "nodes", "stages", "wall_s", "repair_s", "parts"):
            if not getattr(self, name) > 0:
                raise SimulationError(
                    f"{name} cannot be {getattr(self, name)}. Fix: give a number above 0",
                    code="value-out-of-range",
                )
        if self.spares is not None and self.spares < 0:
            raise SimulationError(
                f"there cannot be {self.spares} spare nodes. Fix: give 0 or more",
                code="value-out-of-range",
            )


def simulate(job: SimulatedJob, faults: Faults, strategy: Strategy | PolicyCosts) -> Result:
    """Simulates a job with failures.

    Time and memory depend only on the number of failures, not on ranks or iterations.  The same arguments give the same
    result; a strategy has state, so pass a new one for each run.
    """
    if isinstance(strategy, PolicyCosts):
        strategy = Strategy(strategy)
    run = _Run(job, faults, strategy)
    while run.now < job.wall_s:
        run.step()
    return run.result()


class _Run:
    def __init__(self, job: SimulatedJob, faults: Faults, strategy: Strategy):
        self.job, self.faults, self.strategy = job, faults, strategy
        self.rng = random.Random(job.seed)
        self.events: Iterator[Event] = faults.events(random.Random(self.rng.random()))
        self.event = next(self.events, None)
        self.returns: list[tuple[float, int]] = []  # times and numbers of returning nodes
        self.now = self.exposed = self.event_at = 0.0
        self.up = job.available  # nodes; None for unlimited
        if self.up is None and job.spares is not None:
            self.up = job.nodes + job.spares
        self.members = strategy.saving.members or Members(job.nodes, job.nodes)
        self._train_on(self.members.usable(self.up))
        self.grows_at = math.inf  # when newly arrived nodes join
        if 0 < self.used < self.members.most and self.members.grow_wait_s:
            self.grows_at = self.members.grow_wait_s
            self._train_on(0)
        self.whole, self.gone, self.chance = self.used, 0, 0.0  # nodes that had state, later losses, random number
        self.done = 0.0  # iterations, including the fraction of the current one
        self.way, self.base = strategy.saving, 0  # costs of the recovery, and the iteration that it restores
        self.replay_starts = self.ends = self.failed_at = 0.0
        self.oldest, self.lost_at, self.again = 0, 0.0, False  # least iteration to restore; that at the loss; again?
        self.segments: list[tuple[set[int], float]] = []  # stages that replay together, and when they finish
        self.useful = self.saving = self.slower = self.recovery = self.idle = self.longest = 0.0
        self.failures = self.replayed = 0
        self.nodes_s: defaultdict[int, float] = defaultdict(float)
        self.fallbacks: Counter[str] = Counter()
        self.saves = Traffic()
        self.iterations = [0.0] * job.parts
        self.plts, self.ks = [0.0] * job.parts, [0] * job.parts

    def step(self) -> None:
        """Advances to the next event."""
        event_s = self._event_s()
        back_s = self.returns[0][0] if self.returns else math.inf
        grow_s = max(self.grows_at, self.replay_starts)  # not before all workers have state
        until = min(self.job.wall_s, event_s, back_s, grow_s, self.ends if self._recovers() else math.inf)
        self._pass(until)
        if until == event_s:
            event, self.event, self.event_at = self.event, next(self.events, None), self.now
            assert event is not None  # an event was due
            if event.gained:
                self._gain(event.gained)
            if event.lost:
                self._lose(event.lost)
        elif until == back_s:
            self._gain(heapq.heappop(self.returns)[1])
        elif until == grow_s:
            self._grow()

    def _train_on(self, nodes: int) -> None:
        """Sets the number of training nodes; with 0, the job waits."""
        self.used, self.waits = nodes, nodes == 0
        self.slowdown = 1.0 if self.waits else self.members.slowdown(nodes)

    def _recovers(self) -> bool:
        return not self.waits and self.now < self.ends

    def _event_s(self) -> float:
        if self.event is None:
            return math.inf
        if self.event.after_s is not None:
            return max(self.now, self.event_at + self.event.after_s)
        if not self.faults.while_training:
            return self.event.at_s
        if self.waits or self._recovers():
            return math.inf
        return max(self.now, self.now + self.event.at_s - self.exposed)

    def _pass(self, until: float) -> None:
        seconds, start = until - self.now, self.now
        self.nodes_s[self.used] += seconds
        if self.waits:
            self.idle += seconds
        elif self._recovers():
            self.recovery += seconds
        else:
            self.exposed += seconds
            self._train(start, until)
        self.now = until
        for part in self._parts(start, until):
            self.plts[part], self.ks[part] = self.strategy.plt, self.strategy.k or 0

    def _train(self, start: float, until: float) -> None:
        each_s = self.job.iteration_s + self.strategy.saving.per_iteration_s()
        iterations = (until - start) / (each_s * self.slowdown)
        self.done += iterations
        self._book(iterations)
        self.saves = self.saves.after(iterations / self.strategy.saving.interval, self.strategy.saving.traffic)
        part_s = self.job.wall_s / self.job.parts
        for part in self._parts(start, until):
            within = min(until, (part + 1) * part_s) - max(start, part * part_s)
            self.iterations[part] += iterations * max(0.0, within) / (until - start) if until > start else 0.0

    def _parts(self, start: float, until: float) -> range:
        """Returns the parts of the run that a time span overlaps."""
        part_s, last = self.job.wall_s / self.job.parts, self.job.parts - 1
        return range(min(int(start / part_s), last), min(int(until / part_s), last) + 1)

    def _book(self, iterations: float) -> float:
        """Books iterations (negative to undo) and returns their seconds; useful time is at the full job's speed."""
        useful, saving = iterations * self.job.iteration_s, iterations * self.strategy.saving.per_iteration_s()
        slower = (useful + saving) * (self.slowdown - 1)
        self.useful, self.saving, self.slower = self.useful + useful, self.saving + saving, self.slower + slower
        return useful + saving + slower

    def _lose(self, nodes: int) -> None:
        hit = self._hit(nodes)
        if self.up is not None:
            self.up = max(0, self.up - nodes)
            if not self.faults.trace and math.isfinite(self.job.repair_s):
                heapq.heappush(self.returns, (self.now + self.job.repair_s, nodes))
        if hit and self.waits:
            self._decide(hit, again=True)  # waiting nodes may lose state, too
        elif hit:
            self._fail(hit)

    def _hit(self, nodes: int) -> int:
        """Returns how many lost nodes are the job's: all with an MTBF, which is the job's; a trace also has others."""
        job = self.whole - self.gone if self.waits else self.used
        if self.up is None or not self.faults.trace:
            return min(nodes, job)
        hit = 0
        for lost in range(min(nodes, self.up)):
            hit += self.rng.random() * (self.up - lost) < job - hit
        return hit

    def _fail(self, nodes: int) -> None:
        self.failures += 1
        again = self.again = self._recovers()
        self.lost_at, self.oldest = self.done, 0
        self._drop_unfinished()
        if not again:
            self.failed_at = self.now
        elif not self.way.local:  # replayed iterations are saved again, and the restored checkpoint still exists
            self.oldest, self.lost_at = self.base, self._replayed()
        self.strategy.failed(int(self.lost_at))
        fixed = self.strategy.saving.members is None  # replaces lost nodes immediately, as in the closed form
        if fixed or self.now >= self.replay_starts:
            self.whole, self.gone, self.chance = self.used, 0, self._luck()
        self.grows_at = math.inf
        self._train_on(self.members.usable(self.up))
        self._decide(nodes, again)
        if self.waits:
            self.replay_starts = math.inf
        else:
            self._recover(again)

    def _luck(self) -> float:
        saving = self.strategy.saving
        return self.rng.random() if saving.copies or saving.members else 0.0

    def _decide(self, nodes: int, again: bool) -> None:
        """Chooses the recovery path after a loss of this many more nodes, and the iteration that it restores."""
        loss = Loss(nodes, self.whole, self.gone, self.used)
        way = self.strategy.saving.way_back(loss, self.chance)
        self.gone = loss.total
        if not (again and way.local):  # in a global rollback, stages of another failure also roll back globally
            if way.why and not self.way.why:
                self.oldest = 0  # the previously restored state is lost
            self.way = way
        if self.way.why and not self.waits:
            self.fallbacks[f"{self.way.why}: {loss.total} of {loss.of} nodes lost"] += 1
        self.base = max(self.oldest, self.way.restored(self.lost_at))

    def _drop_unfinished(self) -> None:
        """Moves the time of the interrupted iteration from useful to recovery."""
        whole = math.floor(self.done + 1e-9)
        part = max(0.0, self.done - whole)
        seconds, self.done = -self._book(-part), float(whole)
        self.recovery += seconds
        if self.faults.trace:
            self.exposed -= seconds
        last = min(int(self.now / self.job.wall_s * self.job.parts), self.job.parts - 1)
        for place in range(last, -1, -1):  # the parts that counted it
            taken = min(part, self.iterations[place])
            self.iterations[place] -= taken
            part -= taken
            if part <= 0:
                break

    def _replayed(self) -> float:
        """Returns the iteration, with its fraction, up to where the current recovery has replayed."""
        seconds = (self.now - self.replay_starts) / self.slowdown
        return min(self.done, self.base + self.way.replayed(seconds)) if seconds > 0 else self.base

    def _recover(self, again: bool) -> None:
        count = int(self.done) - self.base
        self.replayed += count
        self.replay_starts = self.now + self.way.restart_s
        self.ends = self.replay_starts + self.way.replay_total_s(count) * self.slowdown
        if self.way.local:
            self._join(again)
        self.longest = max(self.longest, self.ends - self.failed_at)

    def _join(self, again: bool) -> None:
        """Adds a stage to a neighbouring segment that replays; others replay in parallel (MoEvement, Appendix A)."""
        stage = self.rng.randrange(self.job.stages)
        segment, apart = {stage}, []
        for stages, through in self.segments if again else ():
            if stages & {stage - 1, stage, stage + 1}:
                segment |= stages
            else:
                apart.append((stages, through))
        self.segments = [*apart, (segment, self.ends)]
        self.ends = max(through for _, through in self.segments)

    def _gain(self, nodes: int) -> None:
        if self.up is None:
            return
        self.up += nodes
        after = self.members.usable(self.up)
        if after <= self.used:
            return
        if self.waits and self.whole:
            self._grow()
        else:
            wait_s = self.members.grow_wait_s if after < self.members.most else 0.0
            self.grows_at = min(self.grows_at, self.now + wait_s)

    def _grow(self) -> None:
        """Adds newly arrived nodes to the job, or starts or resumes it after waiting."""
        self.grows_at = math.inf
        after = self.members.usable(self.up)
        if after <= self.used:
            return
        if not self.waits:
            self._regroup(after)
        elif self.whole:
            self._train_on(after)
            self._decide(0, self.again)
        else:
            self._train_on(after)
            self.whole = after
        self._recover(again=False)

    def _regroup(self, nodes: int) -> None:
        """Stops all workers, which costs the current iteration, and reconnects them on more nodes."""
        way = self.way
        if self._recovers():
            self.base = int(self._replayed())
        else:
            self._drop_unfinished()
            way, self.base, self.failed_at = self.strategy.saving, int(self.done), self.now
        self.way = dataclasses.replace(way, restart_s=self.members.grow_s, local=False)
        self.whole, self.gone, self.chance = self.used, 0, self._luck()
        self._train_on(nodes)

    def result(self) -> Result:
        part_s = self.job.wall_s / self.job.parts
        strategy = self.strategy
        return Result(
            name=strategy.saving.name,
            wall_s=self.job.wall_s,
            useful_s=self.useful,
            saving_s=self.saving,
            slower_s=self.slower,
            recovery_s=self.recovery,
            idle_s=self.idle,
            iterations=int(self.done),
            samples=self.done * self.job.samples,
            failures=self.failures,
            replayed=self.replayed,
            longest_s=self.longest,
            written=self.saves,
            host_bytes=strategy.saving.host_bytes,
            k=strategy.k,
            plt=strategy.plt,
            nodes_s=dict(sorted(self.nodes_s.items())),
            fallbacks=dict(self.fallbacks),
            goodput=tuple(done * self.job.samples / part_s for done in self.iterations),
            plts=tuple(self.plts),
            ks=tuple(self.ks) if strategy.k else (),
        )
