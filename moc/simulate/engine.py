"""A discrete-event simulation of a run: failures, replacements and recoveries; one step from event to event."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from moc.simulate.failures import Event, Faults
from moc.simulate.policy_costs import PolicyCosts, Strategy, Traffic
from moc.simulate.result import Result


@dataclass(frozen=True)
class SimulatedJob:
    """The job to simulate, and for how long.

    Attributes:
        iteration_s: seconds of an iteration without checkpoints.
        samples: sequences per iteration.
        nodes: nodes that the job needs.
        stages: pipeline stages, some of which a local recovery replays.
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
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.spares is not None and self.spares < 0:
            raise ValueError(f"there cannot be {self.spares} spare nodes")


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
        self.returns: list[tuple[float, int]] = []  # when lost nodes return, and how many
        self.now = self.exposed = self.event_at = 0.0
        self.up = job.available  # nodes; None for unlimited
        if self.up is None and job.spares is not None:
            self.up = job.nodes + job.spares
        self.used = self._usable()
        self.waits = self.used == 0
        self.done = 0.0  # iterations, including the fraction of the current one
        self.way, self.base = strategy.saving, 0  # costs of the recovery, and the iteration that it restores
        self.replay_starts = self.ends = self.failed_at = 0.0
        self.segments: list[tuple[set[int], float]] = []  # stages that replay together, and when they finish
        self.useful = self.saving = self.slower = self.recovery = self.idle = self.longest = 0.0
        self.failures = self.replayed = 0
        self.saves = Traffic()
        self.iterations = [0.0] * job.parts
        self.plts, self.ks = [0.0] * job.parts, [0] * job.parts

    def step(self) -> None:
        """Advances to the next event."""
        event_s = self._event_s()
        back_s = self.returns[0][0] if self.returns else math.inf
        until = min(self.job.wall_s, event_s, back_s, self.ends if self._recovers() else math.inf)
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
        iterations = (until - start) / (each_s * self.job.nodes / self.used)
        self.done += iterations
        self._book(iterations)
        self.saves = self.saves.after(iterations / self.strategy.saving.interval, self.strategy.saving.traffic)
        part_s = self.job.wall_s / self.job.parts
        for part in self._parts(start, until):
            within = min(until, (part + 1) * part_s) - max(start, part * part_s)
            self.iterations[part] += iterations * max(0.0, within) / (until - start) if until > start else 0.0

    def _parts(self, start: float, until: float) -> range:
        """The parts of the run that a time falls into."""
        part_s, last = self.job.wall_s / self.job.parts, self.job.parts - 1
        return range(min(int(start / part_s), last), min(int(until / part_s), last) + 1)

    def _book(self, iterations: float) -> float:
        """Books iterations (negative to undo), returns their seconds; useful time is that of the full job's nodes."""
        useful, saving = iterations * self.job.iteration_s, iterations * self.strategy.saving.per_iteration_s()
        slower = (useful + saving) * (self.job.nodes / self.used - 1)
        self.useful, self.saving, self.slower = self.useful + useful, self.saving + saving, self.slower + slower
        return useful + saving + slower

    def _lose(self, nodes: int) -> None:
        hit = self._hit(nodes)
        if self.up is not None:
            self.up = max(0, self.up - nodes)
            if not self.faults.trace and math.isfinite(self.job.repair_s):
                heapq.heappush(self.returns, (self.now + self.job.repair_s, nodes))
        if hit and not self.waits:
            self._fail(nodes)

    def _hit(self, nodes: int) -> bool:
        """Whether the loss hits the job: an MTBF is the job's own, a trace also has nodes that it does not use."""
        if self.up is None or not self.faults.trace:
            return True
        return any(self.rng.random() * max(1, self.up - lost) < self.used for lost in range(nodes))

    def _fail(self, nodes: int) -> None:
        self.failures += 1
        again, at, oldest = self._recovers(), self.done, 0
        self._drop_unfinished()
        if not again:
            self.failed_at = self.now
        elif not self.way.local:  # replayed iterations are saved again, and the restored checkpoint still exists
            oldest, at = self.base, self._replayed()
        self.strategy.failed(int(at))
        saving = self.strategy.saving
        way = saving.way_back(nodes, self.rng.random() if saving.copies else 0.0)
        if not (again and way.local):  # during a global rollback, another failure's stages roll back globally, too
            self.way = way
        self.base = max(oldest, self.way.restored(at))
        self.used = self._usable()
        self.waits = self.used == 0
        if not self.waits:
            self._recover(again)

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
        """The iteration, with its fraction, that the current recovery has replayed up to."""
        seconds = (self.now - self.replay_starts) * self.used / self.job.nodes
        return min(self.done, self.base + self.way.replayed(seconds)) if seconds > 0 else self.base

    def _recover(self, again: bool) -> None:
        count = int(self.done) - self.base
        self.replayed += count
        self.replay_starts = self.now + self.way.restart_s
        self.ends = self.replay_starts + self.way.replay_total_s(count) * self.job.nodes / self.used
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
        before, after = self.used, self._usable()
        if after <= before or not (self.waits or self.strategy.saving.elastic):
            return
        if self._recovers():
            self.base = int(self._replayed())
        elif not self.waits:  # all workers stop to regroup, which costs the current iteration
            self._drop_unfinished()
            self.way, self.base, self.failed_at = self.strategy.saving, int(self.done), self.now
        self.used, self.waits = after, False
        self._recover(again=False)

    def _usable(self) -> int:
        """Nodes that compute; 0 if there are too few."""
        if self.up is None or self.up >= self.job.nodes:
            return self.job.nodes
        multiple = self.strategy.saving.elastic
        return self.up // multiple * multiple if multiple else 0

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
            goodput=tuple(done * self.job.samples / part_s for done in self.iterations),
            plts=tuple(self.plts),
            ks=tuple(self.ks) if strategy.k else (),
        )
