"""What a simulated run has come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean

from moc.simulate.policy_costs import Traffic


@dataclass(frozen=True)
class Result:
    """One run; ``useful_s + saving_s + slower_s + recovery_s + idle_s`` is ``wall_s``.

    Attributes:
        name: of the policy.
        wall_s: seconds of the run.
        useful_s: of these, computing iterations for the first time: so many samples, at the speed of all nodes.
        saving_s: waiting for checkpoints.
        slower_s: by which iterations took longer because fewer nodes than the job has computed them.
        recovery_s: detecting, restarting, replaying, and what was computed of iterations that a failure cut short.
        idle_s: waiting for nodes.
        iterations: completed.
        samples: sequences of these.
        failures: that hit the job.
        replayed: iterations that were computed again.
        longest_s: the longest time from a failure until the run was where it had been.
        written: bytes, by where they went.
        host_bytes: kept in host memory.
        k: experts of each layer in a checkpoint at the end; None where that has no meaning.
        plt: proportion of lost tokens at the end (MoC, eq. 7).
        goodput: samples per second, useful ones, in equal parts of the run.
        plts: the proportion at the end of each part.
        ks: K at the end of each part; empty where that has no meaning.
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
    goodput: tuple[float, ...]
    plts: tuple[float, ...]
    ks: tuple[int, ...]

    @property
    def ettr(self) -> float:
        """Effective training time ratio: the share of the wall clock that was useful."""
        return self.useful_s / self.wall_s

    @property
    def overhead(self) -> float:
        """What checkpoints add to an iteration, as a proportion of it."""
        return self.saving_s / self.useful_s if self.useful_s else 0.0

    @property
    def recovery_each_s(self) -> float:
        """Seconds that a failure costs, in the mean."""
        return self.recovery_s / self.failures if self.failures else 0.0

    def to_dict(self) -> dict:
        """Plain values, for JSON."""
        more = {"ettr": self.ettr, "overhead": self.overhead, "recovery_each_s": self.recovery_each_s}
        return asdict(self) | more


def mean_of(results: Sequence[Result]) -> Result:
    """The mean run of several of the same length; whole numbers are rounded, the course of time is the mean too.

    Args:
        results: at least one.
    """
    means = {}
    for name in (field.name for field in fields(Result)):
        values = [getattr(result, name) for result in results]
        means[name] = values[0] if name == "name" else _mean(values)
    return Result(**means)


def _mean(values: list):
    first = values[0]
    if first is None:
        return None
    if isinstance(first, tuple):
        return tuple(_mean(list(column)) for column in zip(*values, strict=True))
    if isinstance(first, Traffic):
        return Traffic(*(fmean(getattr(value, field.name) for value in values) for field in fields(Traffic)))
    mean = fmean(values)
    return round(mean) if isinstance(first, int) else mean
