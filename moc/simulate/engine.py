"""Simulates a run by discrete events: failures, replacements and recoveries; a step leads to the next event.

The result is a :class:`Result`: where the wall-clock time went, and what the failures cost.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any

from moc.simulate import SimulationError
from moc.simulate.failures import ClusterEvent, Faults
from moc.simulate.policy_costs import Loss, SimulatedCosts, Strategy, Traffic, VaryingNodes


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


def simulate(job: SimulatedJob, faults: Faults, strategy: Strategy | SimulatedCosts) -> Result:
    """Simulates a job with failures.

    Time and memory depend only on the number of failures, not on ranks or iterations.  The same arguments give the same
    result; a strategy has state, so pass a new one for each run.
    """
    if isinstance(strategy, SimulatedCosts):
        strategy = Strategy(strategy)
    run = _Run(job, faults, strategy)
    while run.now < job.wall_s:
        run.step()
    return run.result()


class _Run:
    def __init__(self, job: SimulatedJob, faults: Faults, strategy: Strategy):
        self.job, self.faults, self.strategy = job, faults, strategy
        self.rng = random.Random(job.seed)
        self.events: Iterator[ClusterEvent] = faults.events(random.Random(self.rng.random()))
        self.event = next(self.events, None)
        self.returns: list[tuple[float, int]] = []  # times and numbers of returning nodes
        self.now = self.exposed = self.event_at = 0.0
        self.up = job.available  # nodes; None for unlimited
        if self.up is None and job.spares is not None:
            self.up = job.nodes + job.spares
        self.members = strategy.saving.members or VaryingNodes(job.nodes, job.nodes)
        self._train_on(self.members.usable(self.up))
        self.grows_at = math.inf  # when newly arrived nodes join
        if 0 < self.used < self.members.most and self.members.grow_wait_s:
            self.grows_at = self.members.grow_wait_s
            self._train_on(0)
        self.with_state, self.lost_since, self.chance = (
            self.used,
            0,
            0.0,
        )  # nodes with state, losses since, random number
        self.completed = 0.0  # iterations, including the fraction of the current one
        self.path, self.base = strategy.saving, 0  # costs of the recovery, and the iteration that it restores
        self.replay_starts = self.ends = self.failed_at = 0.0
        self.oldest, self.lost_at, self.is_repeated = 0, 0.0, False  # least iteration to restore; that at the loss
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
        self.completed += iterations
        self._book(iterations)
        self.saves = self.saves.after(iterations / self.strategy.saving.interval, self.strategy.saving.traffic)
        part_s = self.job.wall_s / self.job.parts
        for part in self._parts(start, until):
            overlap_s = min(until, (part + 1) * part_s) - max(start, part * part_s)
            self.iterations[part] += iterations * max(0.0, overlap_s) / (until - start) if until > start else 0.0

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
            self._decide(hit, is_repeated=True)  # waiting nodes may lose state, too
        elif hit:
            self._fail(hit)

    def _hit(self, nodes: int) -> int:
        """Returns how many lost nodes are the job's: all with an MTBF, which is the job's; a trace also has others."""
        job = self.with_state - self.lost_since if self.waits else self.used
        if self.up is None or not self.faults.trace:
            return min(nodes, job)
        hit = 0
        for lost in range(min(nodes, self.up)):
            hit += self.rng.random() * (self.up - lost) < job - hit
        return hit

    def _fail(self, nodes: int) -> None:
        self.failures += 1
        is_repeated = self.is_repeated = self._recovers()
        self.lost_at, self.oldest = self.completed, 0
        self._drop_unfinished()
        if not is_repeated:
            self.failed_at = self.now
        elif not self.path.local:  # replayed iterations are saved again, and the restored checkpoint still exists
            self.oldest, self.lost_at = self.base, self._replayed()
        self.strategy.failed(int(self.lost_at))
        fixed = self.strategy.saving.members is None  # replaces lost nodes immediately, as in the closed form
        if fixed or self.now >= self.replay_starts:
            self.with_state, self.lost_since, self.chance = self.used, 0, self._luck()
        self.grows_at = math.inf
        self._train_on(self.members.usable(self.up))
        self._decide(nodes, is_repeated)
        if self.waits:
            self.replay_starts = math.inf
        else:
            self._recover(is_repeated)

    def _luck(self) -> float:
        saving = self.strategy.saving
        return self.rng.random() if saving.copies or saving.members else 0.0

    def _decide(self, nodes: int, is_repeated: bool) -> None:
        """Chooses the recovery path after a loss of this many more nodes, and the iteration that it restores."""
        loss = Loss(nodes, self.with_state, self.lost_since, self.used)
        path = self.strategy.saving.recovery_costs(loss, self.chance)
        self.lost_since = loss.total
        if not (is_repeated and path.local):  # in a global rollback, stages of another failure also roll back globally
            if path.why and not self.path.why:
                self.oldest = 0  # the previously restored state is lost
            self.path = path
        if self.path.why and not self.waits:
            self.fallbacks[f"{self.path.why}: {loss.total} of {loss.of} nodes lost"] += 1
        self.base = max(self.oldest, self.path.restored(self.lost_at))

    def _drop_unfinished(self) -> None:
        """Moves the time of the interrupted iteration from useful to recovery."""
        completed = math.floor(self.completed + 1e-9)
        fraction = max(0.0, self.completed - completed)
        seconds, self.completed = -self._book(-fraction), float(completed)
        self.recovery += seconds
        if self.faults.trace:
            self.exposed -= seconds
        last = min(int(self.now / self.job.wall_s * self.job.parts), self.job.parts - 1)
        for part in range(last, -1, -1):  # the parts that counted it
            removed = min(fraction, self.iterations[part])
            self.iterations[part] -= removed
            fraction -= removed
            if fraction <= 0:
                break

    def _replayed(self) -> float:
        """Returns the iteration, with its fraction, up to where the current recovery has replayed."""
        seconds = (self.now - self.replay_starts) / self.slowdown
        return min(self.completed, self.base + self.path.replayed(seconds)) if seconds > 0 else self.base

    def _recover(self, is_repeated: bool) -> None:
        count = int(self.completed) - self.base
        self.replayed += count
        self.replay_starts = self.now + self.path.restart_s
        self.ends = self.replay_starts + self.path.replay_total_s(count) * self.slowdown
        if self.path.local:
            self._join(is_repeated)
        self.longest = max(self.longest, self.ends - self.failed_at)

    def _join(self, is_repeated: bool) -> None:
        """Adds a stage to a neighbouring segment that replays; others replay in parallel (MoEvement, Appendix A)."""
        stage = self.rng.randrange(self.job.stages)
        segment, separate = {stage}, []
        for stages, through in self.segments if is_repeated else ():
            if stages & {stage - 1, stage, stage + 1}:
                segment |= stages
            else:
                separate.append((stages, through))
        self.segments = [*separate, (segment, self.ends)]
        self.ends = max(through for _, through in self.segments)

    def _gain(self, nodes: int) -> None:
        if self.up is None:
            return
        self.up += nodes
        after = self.members.usable(self.up)
        if after <= self.used:
            return
        if self.waits and self.with_state:
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
        elif self.with_state:
            self._train_on(after)
            self._decide(0, self.is_repeated)
        else:
            self._train_on(after)
            self.with_state = after
        self._recover(is_repeated=False)

    def _regroup(self, nodes: int) -> None:
        """Stops all workers, which costs the current iteration, and reconnects them on more nodes."""
        path = self.path
        if self._recovers():
            self.base = int(self._replayed())
        else:
            self._drop_unfinished()
            path, self.base, self.failed_at = self.strategy.saving, int(self.completed), self.now
        self.path = dataclasses.replace(path, restart_s=self.members.grow_s, local=False)
        self.with_state, self.lost_since, self.chance = self.used, 0, self._luck()
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
            iterations=int(self.completed),
            samples=self.completed * self.job.samples,
            failures=self.failures,
            replayed=self.replayed,
            longest_s=self.longest,
            written=self.saves,
            host_bytes=strategy.saving.host_bytes,
            k=strategy.k,
            plt=strategy.plt,
            nodes_s=dict(sorted(self.nodes_s.items())),
            fallbacks=dict(self.fallbacks),
            goodput=tuple(iterations * self.job.samples / part_s for iterations in self.iterations),
            plts=tuple(self.plts),
            ks=tuple(self.ks) if strategy.k else (),
        )


@dataclass(frozen=True)
class Result:
    """Simulated run; ``useful_s + saving_s + slower_s + recovery_s + idle_s`` is ``wall_s``.

    Attributes:
        useful_s: computing iterations for the first time, at the speed of the full job.
        saving_s: waiting for checkpoints.
        slower_s: additional time of iterations on fewer nodes than the job's.
        recovery_s: detecting, restarting, replaying, and iterations that a failure cut short.
        idle_s: waiting for nodes.
        failures: failures that hit the job.
        longest_s: the longest time from a failure until the run had regained its position.
        written: bytes written, by destination.
        host_bytes: bytes kept in host memory.
        k: experts of each layer in a checkpoint at the end; None if it does not apply.
        plt: proportion of lost tokens at the end (MoC, eq. 7).
        nodes_s: seconds by number of nodes that trained or recovered; 0 nodes is waiting.
        fallbacks: recoveries that were not the policy's usual one, by reason.
        goodput: useful samples per second, in equal parts of the run.
        plts: the proportion of lost tokens at the end of each part.
        ks: K at the end of each part; empty if it does not apply.
    """

    name: str
    wall_s: float
    useful_s: float
    saving_s: float
    slower_s: float
    recovery_s: float
    idle_s: float
    iterations: int
    samples: float
    failures: int
    replayed: int
    longest_s: float
    written: Traffic
    host_bytes: float
    k: int | None
    plt: float
    nodes_s: Mapping[int, float]
    fallbacks: Mapping[str, float]
    goodput: tuple[float, ...]
    plts: tuple[float, ...]
    ks: tuple[int, ...]

    @property
    def ettr(self) -> float:
        """Effective training time ratio: the share of the wall clock that was useful."""
        return self.useful_s / self.wall_s

    @property
    def overhead(self) -> float:
        """Time that checkpoints add, relative to useful time."""
        return self.saving_s / self.useful_s if self.useful_s else 0.0

    @property
    def fell_back(self) -> float:
        """Recoveries that were not the policy's usual one."""
        return sum(self.fallbacks.values())

    @property
    def recovery_each_s(self) -> float:
        """Mean seconds that a failure costs."""
        return self.recovery_s / self.failures if self.failures else 0.0

    def to_dict(self) -> dict:
        """Returns plain values, for JSON."""
        derived = {
            "fell_back": self.fell_back,
            "ettr": self.ettr,
            "overhead": self.overhead,
            "recovery_each_s": self.recovery_each_s,
        }
        return asdict(self) | derived


def mean_of(results: Sequence[Result]) -> Result:
    """Returns the mean of one or more runs of equal length, including values over time; integers are rounded."""
    columns = {field.name: [getattr(result, field.name) for result in results] for field in fields(Result)}
    return Result(columns.pop("name")[0], **{name: _mean(values) for name, values in columns.items()})


def _mean(values: list) -> Any:
    first = values[0]
    if first is None:
        return None
    if isinstance(first, tuple):
        return tuple(_mean(list(column)) for column in zip(*values, strict=True))
    if isinstance(first, dict):
        keys = {key: None for value in values for key in value}
        return {key: fmean(value.get(key, 0.0) for value in values) for key in keys}
    if isinstance(first, Traffic):
        return Traffic(*(fmean(getattr(value, field.name) for value in values) for field in fields(Traffic)))
    mean = fmean(values)
    return round(mean) if isinstance(first, int) else mean
