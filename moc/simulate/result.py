"""Defines the result of a simulated run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any

from moc.simulate.policy_costs import Traffic


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
        more = {
            "fell_back": self.fell_back,
            "ettr": self.ettr,
            "overhead": self.overhead,
            "recovery_each_s": self.recovery_each_s,
        }
        return asdict(self) | more


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
