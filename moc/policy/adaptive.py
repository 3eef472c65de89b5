"""How many experts to snapshot and to persist, and how often: from what was measured."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial

from moc.policy.expected import ages

_MANY = 16  # experts
_RATE, _RESTART = "faults_per_iteration", "restart_s"

PltOf = Callable[[int, int, int], float]
"""The PLT that (K_snapshot, K_persist, interval in iterations) is expected to cost; no less with a longer interval."""


@dataclass(frozen=True)
class Measured:
    """A machine, a model and a layout.

    Attributes:
        busiest: by K, the bytes of the rank that saves most when K experts of each layer are saved, of the numbers that
            may be chosen; the largest of them is all experts.
        forward_backward_s: seconds of forward and backward of an iteration: T_F&B.
        iteration_s: seconds of an iteration.
        snapshot_bandwidth: bytes per second from a rank's device to host memory, beside the computation.
        persist_bandwidth: bytes per second that a rank gets to storage, when all write.
        restart_s: seconds from a fault until training goes on: O_restart.
        faults_per_iteration: lambda; above 0, since nothing has a best interval without faults.

    Raises:
        ValueError: something that must be positive is not; seconds to restart may be 0.
    """

    busiest: Mapping[int, int]
    forward_backward_s: float
    iteration_s: float
    snapshot_bandwidth: float
    persist_bandwidth: float
    restart_s: float
    faults_per_iteration: float

    def __post_init__(self):
        for name in ("forward_backward_s", "iteration_s", "snapshot_bandwidth", "persist_bandwidth", _RATE, _RESTART):
            value = getattr(self, name)
            if not (math.isfinite(value) and (value > 0 or value == 0 and name == _RESTART)):
                raise ValueError(f"{name} must be a number above 0, not {value}")
        if not self.busiest or min(self.busiest) < 1:
            raise ValueError("there is no K to choose from: busiest needs bytes by number of experts, from 1")

    @property
    def num_experts(self) -> int:
        """N."""
        return max(self.busiest)

    def snapshot_s(self, k: int) -> float:
        """Seconds that a snapshot takes: T_snapshot."""
        return self.busiest[k] / self.snapshot_bandwidth

    def persist_s(self, k: int) -> float:
        """Seconds to write one to storage."""
        return self.busiest[k] / self.persist_bandwidth

    def save_s(self, k: int) -> float:
        """Seconds that training waits for a snapshot: O_save (MoC, section 6.2.5, eq. 10)."""
        return max(0.0, self.snapshot_s(k) - self.forward_backward_s)

    def overhead_s(self, k: int, interval: int) -> float:
        """Seconds that an iteration costs more than without faults and snapshots (eqs. 4, 11 and 13, by I_total)."""
        lost_s = self.restart_s + interval / 2 * self.iteration_s
        return self.save_s(k) / interval + self.faults_per_iteration * lost_s


@dataclass(frozen=True)
class TunedSettings:
    """What to configure.

    Attributes:
        k_snapshot: experts of each layer in a snapshot.
        k_persist: those of them that go to storage.
        interval: iterations from one to the next: I_ckpt.
        save_s: O_save, seconds for which training waits.
        overhead_s: see :meth:`Measured.overhead_s`.
        full_overhead_s: the same with all experts at the interval that is best then (eq. 12).
        plt: expected proportion of lost tokens.
        reason: why, in a few sentences.
    """

    k_snapshot: int
    k_persist: int
    interval: int
    save_s: float
    overhead_s: float
    full_overhead_s: float
    plt: float
    reason: str


@dataclass(frozen=True)
class _Candidate:
    k_snapshot: int
    k_persist: int
    interval: int
    overhead_s: float

    @property
    def rank(self) -> tuple:
        return self.overhead_s, -self.k_snapshot, -self.k_persist, self.interval


@dataclass(frozen=True)
class TuningLimits:
    """What a choice must keep to.

    Attributes:
        plt: the expected PLT must not be above it; None for any.
        interval: iterations from one snapshot to the next, if that is not to be chosen; storage may need more.
        k_persist: at least so many experts go to storage.
        one_level: there is no memory tier, so that all experts of a snapshot go to storage.
    """

    plt: float | None = None
    interval: int | None = None
    k_persist: int = 1
    one_level: bool = False


def choose(measured: Measured, limits: TuningLimits | None = None, plt_of: PltOf | None = None) -> TunedSettings:
    """The configuration with the least total overhead (MoC, sections 5.3 and 6.2.5).

    A snapshot should hide behind forward and backward of the next iteration, so that it costs nothing (eq. 10), and a
    snapshot starts when the one before it is in storage, so that bounds the interval from below.  Of all pairs
    of K_persist <= K_snapshot, each with its best interval, the one with the least overhead is taken (eq. 13), of equal
    ones that with the most experts in a snapshot, and then in storage: more experts that cost no time cost no tokens
    either.  So where anything hides, K_snapshot is the largest that does, unless the limit needs more.

    Args:
        measured: the machine.
        limits: what to keep to; by default nothing.
        plt_of: what to expect; by default :func:`uniform_plt` with half of the experts from storage.

    Raises:
        ValueError: even with all experts the limit is passed, which ``plt_of`` alone can bring about.
    """
    plt_of = plt_of or partial(uniform_plt, measured.num_experts, measured.faults_per_iteration, 0.5)
    limits = limits or TuningLimits()
    chosen = min(_candidates(measured, limits, plt_of), key=lambda candidate: candidate.rank, default=None)
    if chosen is None:
        raise ValueError(f"no number of experts keeps the expected PLT within {limits.plt}: raise the limit")
    return _choice(measured, chosen, plt_of(chosen.k_snapshot, chosen.k_persist, chosen.interval), limits)


def candidates(num_experts: int) -> list[int]:
    """The numbers of experts that are worth looking at: all, or powers of two and N where these are many."""
    return [k for k in range(1, num_experts + 1) if num_experts <= _MANY or k == num_experts or k & (k - 1) == 0]


def uniform_plt(
    num_experts: int,
    faults_per_iteration: float,
    from_storage: float,
    k_snapshot: int,
    k_persist: int,
    interval: int,
) -> float:
    """The PLT to expect where all experts are equally busy and are saved in turn.

    In memory, which keeps each expert's newest version, K_snapshot experts are in the state of the newest snapshot, as
    many in that of the one before, and so on; in storage it is the same with K_persist.  So a layer has lost, for each
    expert, the tokens of its age times the interval.  Faults in proportion to the iterations makes that a proportion of
    all tokens, whatever the length of training.  (Follows from eq. 7; the paper measures it.)

    Args:
        num_experts: N.
        faults_per_iteration: lambda.
        from_storage: share of the experts that are restored from storage, since memory that held them is lost.
        k_snapshot: experts of each layer in a snapshot.
        k_persist: those of them that go to storage.
        interval: iterations from one to the next.
    """
    lost, left = _mean_age(num_experts, k_snapshot, k_persist), _mean_age(num_experts, k_snapshot, k_snapshot)
    return faults_per_iteration * interval * (from_storage * lost + (1 - from_storage) * left)


@cache
def _mean_age(num_experts: int, k_snapshot: int, k_persist: int) -> float:
    """In checkpoints, over the experts of a layer, where K_persist of those in a snapshot are kept."""
    if k_persist == k_snapshot or num_experts % k_snapshot == 0 == k_snapshot % k_persist:  # in turn without a gap
        return sum(place // k_persist for place in range(num_experts)) / num_experts
    return ages(num_experts, k_snapshot, k_persist).mean


def _candidates(measured: Measured, limits: TuningLimits, plt_of: PltOf) -> Iterator[_Candidate]:
    for k_snapshot, k_persist in _pairs(measured, limits):
        intervals = _intervals(measured, k_snapshot, k_persist, limits.interval)
        if limits.plt is not None:
            # Shorter than the best one costs more time but fewer tokens: the longest that is allowed.
            intervals = intervals[: bisect_right(intervals, limits.plt, key=partial(plt_of, k_snapshot, k_persist))]
        if intervals:
            yield _Candidate(k_snapshot, k_persist, intervals[-1], measured.overhead_s(k_snapshot, intervals[-1]))


def _pairs(measured: Measured, limits: TuningLimits) -> Iterator[tuple[int, int]]:
    for k_snapshot in measured.busiest:
        for k_persist in (k_snapshot,) if limits.one_level else measured.busiest:
            if limits.k_persist <= k_persist <= k_snapshot:
                yield k_snapshot, k_persist


def _intervals(measured: Measured, k_snapshot: int, k_persist: int, wanted: int | None) -> range:
    """From the shortest that storage can follow to the one with the least overhead."""
    least = max(1, math.ceil(measured.persist_s(k_persist) / measured.iteration_s))
    if wanted is not None:
        return range(max(least, wanted), max(least, wanted) + 1)
    # Where the derivative of the overhead by the interval is 0.
    best = math.isqrt(int(2 * measured.save_s(k_snapshot) / (measured.faults_per_iteration * measured.iteration_s)))
    best = min(max(1, best), best + 1, key=lambda interval: measured.overhead_s(k_snapshot, interval))
    return range(least, max(least, best) + 1)


def _choice(measured: Measured, chosen: _Candidate, plt: float, limits: TuningLimits) -> TunedSettings:
    n, save_s = measured.num_experts, measured.save_s(chosen.k_snapshot)
    full_overhead_s = measured.overhead_s(n, _intervals(measured, n, n, limits.interval)[-1])
    return TunedSettings(
        k_snapshot=chosen.k_snapshot,
        k_persist=chosen.k_persist,
        interval=chosen.interval,
        save_s=save_s,
        overhead_s=chosen.overhead_s,
        full_overhead_s=full_overhead_s,
        plt=plt,
        reason=" ".join(_reasons(measured, chosen, save_s, full_overhead_s, plt, limits.plt)),
    )


def _reasons(
    measured: Measured, chosen: _Candidate, save_s: float, full_overhead_s: float, plt: float, plt_limit: float | None
) -> Iterator[str]:
    k, snapshot_s = chosen.k_snapshot, measured.snapshot_s(chosen.k_snapshot)
    hidden = f"{snapshot_s:.3g} s beside {measured.forward_backward_s:.3g} s of forward and backward"
    larger = min((other for other in measured.busiest if other > k), default=None)
    if save_s:
        yield f"A snapshot of {k} experts takes {hidden}, so training waits for {save_s:.3g} s."
    elif larger is None:
        yield f"A snapshot of all {k} experts hides: {hidden}."
    else:
        larger_s = measured.snapshot_s(larger)
        yield f"A snapshot of {k} experts hides: {hidden}; one of {larger} would take {larger_s:.3g} s."
    persist_s = measured.persist_s(chosen.k_persist)
    yield (
        f"Writing {chosen.k_persist} of them takes {persist_s:.3g} s, and one snapshot in {chosen.interval} iterations "
        f"({chosen.interval * measured.iteration_s:.3g} s) leaves time for that."
    )
    yield (
        f"All in all that costs {1000 * chosen.overhead_s:.3g} ms an iteration; with all experts it would be "
        f"{1000 * full_overhead_s:.3g} ms."
    )
    limit = "" if plt_limit is None else f", of at most {100 * plt_limit:.3g} %"
    yield f"Faults are expected to lose {100 * plt:.3g} % of the tokens of experts{limit}."
