"""What a run's events say of its ETTR, and what the simulator says of it; pure functions.

ETTR is the time of useful work by the wall clock's: iterations that count, each for as long as it takes where nothing
is saved and nothing fails.  A run is cut into two halves at an iteration; the first one tells the simulator how long
things take, the second one is what it has to predict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from moc.simulate.engine import Job, simulate
from moc.simulate.failures import Event, Faults
from moc.simulate.profile import Profile
from moc.simulate.recoveries import faults, stretches
from moc.simulate.saving import Saving
from moc.simulate.ways import Parts, program_way

WARM_UP = 5  # iterations that allocate and connect
AT_ONCE = 2  # workers that a random fault kills, in the mean
RUNS = 100  # of the model clock, where faults come by chance


@dataclass(frozen=True)
class Way:
    """A policy as the simulator is told of it.

    Attributes:
        interval: iterations from one snapshot to the next.
        window: W of a sparse policy; else 1.
        blocking: training waits until a snapshot can be used.
        exact: what comes back is what was there.
    """

    interval: int = 1
    window: int = 1
    blocking: bool = False
    exact: bool = True


@dataclass(frozen=True)
class Half:
    """A part of a run, from the end of one iteration to the end of another one.

    Attributes:
        events: of it.
        seconds: that it took.
        iterations: that count, each once.
        faults: seconds from its begin to each, and how many workers it killed.
    """

    events: Sequence[dict]
    seconds: float
    iterations: int
    faults: tuple[tuple[float, int], ...]

    def ettr(self, plain_s: float) -> float:
        """As it was measured; an iteration without saving and faults takes ``plain_s``."""
        return self.iterations * plain_s / self.seconds


def halves(events: Sequence[dict]) -> tuple[Half, Half]:
    """The two halves of a run, without its first iterations.

    Raises:
        ValueError: there are not enough iterations between recoveries to cut at.
    """
    events = sorted(events, key=lambda event: event["time"])
    recovering = {id(event) for stretch in stretches(events) for event in stretch[:-1]}
    newest, cuts = 0, []
    for event in events:
        if event["type"] == "iteration" and event["iteration"] > newest:
            newest = event["iteration"]
            if newest >= WARM_UP and id(event) not in recovering:
                cuts.append(event)
    if len(cuts) < 3:
        raise ValueError(f"{len(cuts)} iterations between recoveries are too few to cut a run in halves: run longer")
    middle = min(cuts[1:-1], key=lambda event: abs(2 * event["iteration"] - cuts[0]["iteration"] - newest))
    return _between(events, cuts[0], middle), _between(events, middle, cuts[-1])


def _between(events: Sequence[dict], first: dict, last: dict) -> Half:
    part = [event for event in events if first["time"] < event["time"] <= last["time"]]
    hits = tuple((at - first["time"], lost) for at, lost in faults(part))
    return Half(part, last["time"] - first["time"], last["iteration"] - first["iteration"], hits)


def predicted(way: Way, half: Half, profile: Profile, parts: Parts, plain_s: float) -> float:
    """ETTR of a half, by what was measured of another one and the moments of its faults.

    Args:
        way: the policy.
        half: of which length and faults are known.
        profile: of the other half of the run.
        parts: of a recovery, as the other halves of the policy's runs tell.
        plain_s: seconds of an iteration without saving and faults.
    """
    trace = tuple(Event(at, lost=lost) for at, lost in half.faults)
    chance = Faults(trace=trace) if trace else Faults(math.inf)
    return _simulated(way, half.seconds, chance, profile, parts, plain_s)


def expected(way: Way, seconds: float, mtbf: float, profile: Profile, parts: Parts, plain_s: float) -> float:
    """The same where of the faults nothing is known but how many iterations and workers there are to each."""
    chance = Faults(mtbf * profile.mean_iteration_s, together=AT_ONCE, while_training=True)
    return fmean(_simulated(way, seconds, chance, profile, parts, plain_s, seed) for seed in range(RUNS))


def _simulated(
    way: Way, seconds: float, chance: Faults, profile: Profile, parts: Parts, plain_s: float, seed: int = 0
) -> float:
    saving, iteration_s = saving_of(way, profile, parts, plain_s)
    job = Job(iteration_s, samples=1, nodes=1, wall_s=seconds, seed=seed)
    return simulate(job, chance, saving).ettr * plain_s / iteration_s


def saving_of(way: Way, profile: Profile, parts: Parts, plain_s: float) -> tuple[Saving, float]:
    """The policy on the model clock, and the seconds of its iteration without stalls.

    What saving takes is what iterations take more than without; where that is nothing, these are taken for as fast.
    """
    mean_s = profile.mean_iteration_s
    iteration_s = min(plain_s, mean_s)
    interval = way.window if way.window > 1 else way.interval
    saving = Saving("policy", interval=interval, stall_s=interval * (mean_s - iteration_s), exact=way.exact)
    lag = 0.0 if way.blocking else profile.usable_s / mean_s
    return program_way(saving, parts, iteration_s, lag, sparse=way.window > 1), iteration_s
