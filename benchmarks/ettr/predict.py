"""Measures the ETTR of a run from its events, and predicts it with the simulator; pure functions.

ETTR is useful time divided by wall-clock time. Useful time is the number of counted iterations times the duration of an
iteration without saving and faults. A run is cut into parts, which alternate between two halves, because the load of a
machine changes from minute to minute. One half calibrates the simulator, which then predicts the other half.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from moc.simulate.engine import SimulatedJob, simulate
from moc.simulate.failures import ClusterEvent, Faults
from moc.simulate.policy_costs import RecoveryCosts, SimulatedCosts, program_recovery
from moc.simulate.profile import Profile, faults, stretches

PARTS = 8  # parts of a run
WARM_UP = 5  # first iterations, which allocate and connect
AT_ONCE = 2  # mean number of workers that a fault kills
_NEARLY_ALL = 0.999  # upper limit of the completed share of an interrupted iteration
RUNS = 100  # simulations with random faults


@dataclass(frozen=True)
class Way:
    """Policy as the simulator receives it."""

    interval: int = 1  # iterations between snapshots
    window: int = 1  # W of a sparse policy; otherwise 1
    blocking: bool = False  # training waits until a snapshot is usable
    exact: bool = True  # the restored state is exact


@dataclass(frozen=True)
class Hit:
    """A fault."""

    iterations: int  # counted iterations before the fault
    since_s: float  # seconds since the last counted iteration
    after_s: float | None  # seconds since the previous fault if no counted iteration completed in between
    lost: int  # workers killed


@dataclass(frozen=True)
class Part:
    """Part of a run between the ends of two iterations."""

    events: Sequence[dict]
    seconds: float  # duration
    iterations: int  # iterations, each counted once
    hits: tuple[Hit, ...]  # faults


@dataclass(frozen=True)
class Half:
    """Every second part of a run."""

    parts: tuple[Part, ...]

    @property
    def events(self) -> list[dict]:
        return [event for part in self.parts for event in part.events]

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def iterations(self) -> int:
        return sum(part.iterations for part in self.parts)

    @property
    def hits(self) -> list[Hit]:
        return [hit for part in self.parts for hit in part.hits]

    def ettr(self, plain_s: float) -> float:
        """Returns the measured ETTR; an iteration without saving and faults takes ``plain_s``."""
        return self.iterations * plain_s / self.seconds


def halves(events: Sequence[dict], every: int = 1, parts: int = PARTS) -> tuple[Half, Half]:
    """Returns the two halves of a run without its first iterations.

    Args:
        events: events of the run.
        every: iterations between snapshots; a part starts at a snapshot.
        parts: parts of both halves together, of about the same number of iterations.

    Raises:
        ValueError: too few iterations between recoveries to cut the run.
    """
    events = sorted(events, key=lambda event: event["time"])
    recovering = {id(event) for stretch in stretches(events) for event in stretch[:-1]}
    counted = list(_that_count(events))
    cuts = [one for one in counted if one["iteration"] >= WARM_UP and id(one) not in recovering]
    begins = [one for one in cuts if one["iteration"] % every == 0]
    if not begins:
        raise ValueError("there is no iteration to cut a run at: run longer")
    first, last = begins[0]["iteration"], cuts[-1]["iteration"]
    wanted = [first + number * (last - first) / parts for number in range(parts)]
    borders = [min(begins, key=lambda event, at=at: abs(event["iteration"] - at)) for at in wanted] + [cuts[-1]]
    if any(one["iteration"] >= next_one["iteration"] for one, next_one in pairwise(borders)):
        raise ValueError(f"{len(begins)} iterations between recoveries are too few to cut a run at: run longer")
    found = tuple(_between(events, counted, *ends) for ends in pairwise(borders))
    return Half(found[::2]), Half(found[1::2])


def _that_count(events: Sequence[dict]) -> Iterator[dict]:
    """Yields iterations when they complete for the first time."""
    newest = 0
    for event in events:
        if event["type"] == "iteration" and event["iteration"] > newest:
            newest = event["iteration"]
            yield event


def _between(events: Sequence[dict], counted: Sequence[dict], first: dict, last: dict) -> Part:
    part = [event for event in events if first["time"] < event["time"] <= last["time"]]
    hits, before = [], None
    for at, lost in faults(part):
        done = next(one for one in reversed(counted) if one["time"] <= at)
        after_s = at - before[0] if before and before[1] is done else None
        hits.append(Hit(done["iteration"] - first["iteration"], at - done["time"], after_s, lost))
        before = at, done
    return Part(part, last["time"] - first["time"], last["iteration"] - first["iteration"], tuple(hits))


def predicted(way: Way, half: Half, profile: Profile, parts: RecoveryCosts, plain_s: float) -> float:
    """Returns the predicted ETTR of a half, from measurements of the other half and the positions of its faults.

    Args:
        way: the policy.
        half: half with known duration and faults.
        profile: profile of the other half.
        parts: recovery costs from the other halves of the policy's runs.
        plain_s: seconds of an iteration without saving and faults.
    """
    each_s, useful_s = profile.mean_iteration_s, 0.0
    for part in half.parts:
        trace = tuple(ClusterEvent(_place_s(hit, each_s), hit.lost, after_s=hit.after_s) for hit in part.hits)
        chance = Faults(trace=trace, while_training=True) if trace else Faults(math.inf)
        useful_s += part.seconds * _simulated(way, part.seconds, chance, profile, parts, plain_s)
    return useful_s / half.seconds


def _place_s(hit: Hit, each_s: float) -> float:
    """Returns the time of a fault: the completed iterations and a part of the next."""
    return (hit.iterations + min(_NEARLY_ALL, hit.since_s / each_s)) * each_s


def expected(way: Way, seconds: float, mtbf: float, profile: Profile, parts: RecoveryCosts, plain_s: float) -> float:
    """Returns the predicted ETTR if only the mean iterations and killed workers per fault are known."""
    chance = Faults(mtbf * profile.mean_iteration_s, together=AT_ONCE, while_training=True)
    return fmean(_simulated(way, seconds, chance, profile, parts, plain_s, seed) for seed in range(RUNS))


def _simulated(
    way: Way, seconds: float, chance: Faults, profile: Profile, parts: RecoveryCosts, plain_s: float, seed: int = 0
) -> float:
    saving, iteration_s = saving_of(way, profile, parts, plain_s)
    job = SimulatedJob(iteration_s, samples=1, nodes=1, wall_s=seconds, seed=seed)
    return simulate(job, chance, saving).ettr * plain_s / iteration_s


def saving_of(way: Way, profile: Profile, parts: RecoveryCosts, plain_s: float) -> tuple[SimulatedCosts, float]:
    """Returns the policy for the simulator, and the seconds of its iteration without stalls.

    The cost of saving is the additional time of an iteration with saving. If there is none, iterations without saving
    take as long as those with it.
    """
    mean_s = profile.mean_iteration_s
    iteration_s = min(plain_s, mean_s)
    interval = way.window if way.window > 1 else way.interval
    saving = SimulatedCosts("policy", interval=interval, stall_s=interval * (mean_s - iteration_s), exact=way.exact)
    lag = 0.0 if way.blocking else profile.usable_s / mean_s
    return program_recovery(saving, parts, iteration_s, lag, sparse=way.window > 1), iteration_s
