"""Chooses K_snapshot, K_persist and the interval together, from measurements during training.

:func:`choose_pec_settings` is the pure choice, :class:`PecTuner` measures its input.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from statistics import median
from typing import Any, NamedTuple

from moc.files import decode
from moc.policy.errors import PolicyError
from moc.policy.interface import SnapshotSizer
from moc.policy.interval import BLOCK, BLOCKS, SNAPSHOTS, IntervalTuner, ObservedIteration, Transfer
from moc.policy.partial import experts_by_layer
from moc.policy.pec_selection import expert_ages, sequential_experts
from moc.state.operators import Detail, Operator

_MANY = 16  # experts
_RATE, _RESTART = "faults_per_iteration", "restart_s"

PltOf = Callable[[int, int, int], float]
"""Expected PLT of (K_snapshot, K_persist, interval in iterations); must not decrease with the interval."""


@dataclass(frozen=True)
class PecMeasurements:
    """Measurements of a machine, a model and a layout.

    Attributes:
        busiest: bytes of the busiest rank, for each candidate K; the largest K is all experts.
        forward_backward_s: seconds of forward and backward per iteration: T_F&B.
        iteration_s: seconds per iteration.
        snapshot_bandwidth: bytes per second from a rank's device to host memory, overlapped with computation.
        persist_bandwidth: bytes per second of a rank to storage while all ranks write.
        restart_s: seconds from a fault until training continues: O_restart.
        faults_per_iteration: lambda; above 0, since without faults there is no optimal interval.

    Raises:
        ValueError: a value is not positive (``restart_s`` may be 0), or ``busiest`` has no valid K.
    """

    busiest_rank_bytes: Mapping[int, int]
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
                raise PolicyError(
                    f"{name} is {value}. Fix: measure it again, or set a number above 0",
                    code="value-out-of-range",
                )
        if not self.busiest_rank_bytes or min(self.busiest_rank_bytes) < 1:
            raise PolicyError(
                "there is no K to choose from. Fix: measure the bytes by number of experts, from 1",
                code="value-out-of-range",
            )

    @property
    def num_experts(self) -> int:
        """N, experts of a layer."""
        return max(self.busiest_rank_bytes)

    def snapshot_s(self, k: int) -> float:
        """Returns the seconds that a snapshot takes: T_snapshot."""
        return self.busiest_rank_bytes[k] / self.snapshot_bandwidth

    def persist_s(self, k: int) -> float:
        """Returns the seconds that a write to storage takes."""
        return self.busiest_rank_bytes[k] / self.persist_bandwidth

    def save_s(self, k: int) -> float:
        """Returns the seconds that training waits for a snapshot: O_save (MoC, section 6.2.5, eq. 10)."""
        return max(0.0, self.snapshot_s(k) - self.forward_backward_s)

    def overhead_s(self, k: int, interval: int) -> float:
        """Returns the overhead of faults and snapshots per iteration, in seconds (eqs. 4, 11 and 13, over I_total)."""
        lost_s = self.restart_s + interval / 2 * self.iteration_s
        return self.save_s(k) / interval + self.faults_per_iteration * lost_s


@dataclass(frozen=True)
class PecChoice:
    """Chosen configuration, with the reason.

    Attributes:
        k_snapshot: experts of each layer in a snapshot.
        k_persist: number of these that are persisted.
        interval: iterations between snapshots: I_ckpt.
        overhead_s: see :meth:`PecMeasurements.overhead_s`.
        save_s: O_save, seconds that training waits.
        full_overhead_s: the overhead with all experts at its own optimal interval (eq. 12).
        plt: expected proportion of lost tokens.
    """

    k_snapshot: int
    k_persist: int
    interval: int
    overhead_s: float
    save_s: float
    full_overhead_s: float
    plt: float
    reason: str


class _Candidate(NamedTuple):
    k_snapshot: int
    k_persist: int
    interval: int
    overhead_s: float


@dataclass(frozen=True)
class PecLimits:
    """Constraints of a choice.

    Attributes:
        plt: maximum of the expected PLT; None for no limit.
        interval: fixed iterations between snapshots, which slow storage may lengthen; None to choose it.
        k_persist: minimum of K_persist.
        one_level: no memory tier, so all experts of a snapshot are persisted.
    """

    plt: float | None = None
    interval: int | None = None
    k_persist: int = 1
    one_level: bool = False


def choose_pec_settings(
    measured: PecMeasurements, limits: PecLimits | None = None, plt_of: PltOf | None = None
) -> PecChoice:
    """Returns the configuration with the least total overhead (MoC, sections 5.3 and 6.2.5).

    A snapshot that overlaps fully with forward and backward of the next iteration costs nothing (eq. 10). A snapshot
    starts only when the previous one is in storage: a lower bound of the interval.

    Each pair K_persist <= K_snapshot gets its best interval, and the pair with the least overhead is chosen (eq. 13).
    Ties go to the most experts in a snapshot, then in storage: experts saved at no cost in time lose no tokens. So if
    any snapshot overlaps fully, K_snapshot is the largest that does, unless the PLT limit requires more.

    The model ``plt_of`` is by default :func:`uniform_plt` with half of the experts restored from storage.

    Raises:
        ValueError: no candidate has a PLT within the limit, which only a custom ``plt_of`` can cause.
    """
    n = measured.num_experts
    plt_of, limits = plt_of or partial(uniform_plt, n, measured.faults_per_iteration, 0.5), limits or PecLimits()
    candidates = _candidates(measured, limits, plt_of)
    chosen = min(candidates, key=lambda c: (c.overhead_s, -c.k_snapshot, -c.k_persist, c.interval), default=None)
    if chosen is None:
        raise PolicyError(
            f"no number of experts keeps the expected PLT within {limits.plt}. Fix: raise the limit",
            code="plt-limit-too-low",
        )
    save_s, plt = measured.save_s(chosen.k_snapshot), plt_of(chosen.k_snapshot, chosen.k_persist, chosen.interval)
    full_overhead_s = measured.overhead_s(n, _intervals(measured, n, n, limits.interval)[-1])
    reason = " ".join(_reasons(measured, chosen, save_s, full_overhead_s, plt, limits.plt))
    return PecChoice(*chosen, save_s, full_overhead_s, plt, reason)


def candidate_expert_counts(num_experts: int) -> list[int]:
    """Returns the candidate values of K: 1 to N, or powers of two and N if N is large."""
    return [k for k in range(1, num_experts + 1) if num_experts <= _MANY or k == num_experts or k & (k - 1) == 0]


def bytes_by_expert_count(sizer: SnapshotSizer, operators: Sequence[Operator], ep: int) -> dict[int, int]:
    """Returns the busiest rank's bytes by number of experts saved per layer; empty without experts.

    A collective call.
    """
    experts = experts_by_layer(operators)
    layers = {layer: index for index, layer in enumerate(experts)}

    def details(k: int) -> dict[str, Detail]:
        chosen = {layer: sequential_experts(0, layers[layer], k, number, ep) for layer, number in experts.items()}
        saved = (one for one in operators if one.place is None or one.place[1] in chosen[one.place[0]])
        return {operator.name: Detail.FULL for operator in saved}

    counts = candidate_expert_counts(min(experts.values())) if experts else []
    return {k: sizer(details(k)) for k in counts}


def uniform_plt(
    num_experts: int, faults_per_iteration: float, from_storage: float, k_snapshot: int, k_persist: int, interval: int
) -> float:
    """Returns the expected PLT if all experts are equally busy and saved in turn.

    Memory has each expert's newest version: K_snapshot experts are in the newest snapshot, K_snapshot in the previous
    one, and so on; likewise storage with K_persist. So each expert of a layer loses the tokens of its age times the
    interval. With faults proportional to iterations, this is a proportion of all tokens, independent of the length of
    training. (Follows from eq. 7; the paper measures it.)

    ``from_storage`` is the share of the experts restored from storage, because their memory is lost.
    """
    lost, left = _mean_age(num_experts, k_snapshot, k_persist), _mean_age(num_experts, k_snapshot, k_snapshot)
    return faults_per_iteration * interval * (from_storage * lost + (1 - from_storage) * left)


@cache
def _mean_age(num_experts: int, k_snapshot: int, k_persist: int) -> float:
    """Returns the mean age in checkpoints of a layer's experts, if K_persist of a snapshot's experts are kept."""
    if k_persist == k_snapshot or num_experts % k_snapshot == 0 == k_snapshot % k_persist:  # in turn without a gap
        return sum(place // k_persist for place in range(num_experts)) / num_experts
    return expert_ages(num_experts, k_snapshot, k_persist)[1].mean


def _candidates(measured: PecMeasurements, limits: PecLimits, plt_of: PltOf) -> Iterator[_Candidate]:
    pairs = itertools.product(measured.busiest_rank_bytes, measured.busiest_rank_bytes)
    for k_snapshot, k_persist in pairs:
        if not limits.k_persist <= k_persist <= k_snapshot or limits.one_level and k_persist < k_snapshot:
            continue
        intervals = _intervals(measured, k_snapshot, k_persist, limits.interval)
        if limits.plt is not None:
            # A shorter interval costs more time but loses fewer tokens: take the longest within the limit.
            intervals = intervals[: bisect_right(intervals, limits.plt, key=partial(plt_of, k_snapshot, k_persist))]
        if intervals:
            yield _Candidate(k_snapshot, k_persist, intervals[-1], measured.overhead_s(k_snapshot, intervals[-1]))


def _intervals(measured: PecMeasurements, k_snapshot: int, k_persist: int, wanted: int | None) -> range:
    """Returns the intervals from the shortest that storage sustains to the one with the least overhead."""
    least = max(1, math.ceil(measured.persist_s(k_persist) / measured.iteration_s))
    if wanted is not None:
        return range(max(least, wanted), max(least, wanted) + 1)
    # The zero of the overhead's derivative with respect to the interval.
    best = math.isqrt(int(2 * measured.save_s(k_snapshot) / (measured.faults_per_iteration * measured.iteration_s)))
    best = min(max(1, best), best + 1, key=lambda interval: measured.overhead_s(k_snapshot, interval))
    return range(least, max(least, best) + 1)


def _reasons(
    measured: PecMeasurements,
    chosen: _Candidate,
    save_s: float,
    full_overhead_s: float,
    plt: float,
    plt_limit: float | None,
) -> Iterator[str]:
    k, snapshot_s = chosen.k_snapshot, measured.snapshot_s(chosen.k_snapshot)
    counted = f"{k} expert{'' if k == 1 else 's'}"
    hidden = f"{snapshot_s:.3g} s during {measured.forward_backward_s:.3g} s of forward and backward"
    larger = min((other for other in measured.busiest_rank_bytes if other > k), default=None)
    if save_s:
        yield f"A snapshot of {counted} takes {hidden}, so training waits for {save_s:.3g} s."
    elif larger is None:
        yield f"A snapshot of all {counted} hides: {hidden}."
    else:
        larger_s = measured.snapshot_s(larger)
        yield f"A snapshot of {counted} hides: {hidden}; one of {larger} would take {larger_s:.3g} s."
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


class PecTuner(IntervalTuner):
    """Measures as :class:`IntervalTuner`, and uses :func:`choose_pec_settings` (MoC, section 5.3).

    The first snapshot is full. It follows the same number of undisturbed iterations, and measures copy and write
    bandwidth. From then on, K and interval follow from the medians of recent measurements. A snapshot starts only when
    the previous one is in storage.

    Args:
        limits: constraints of the choice.
        mtbf_s: mean time between failures of the job in seconds.
    """

    def __init__(self, limits: PecLimits, mtbf_s: float):
        super().__init__()
        self.limits, self.mtbf_s = limits, mtbf_s
        self.busiest_rank_bytes: Mapping[int, int] = {}
        """Bytes of the busiest rank, by K; set before training."""
        self._forward_backward_s: deque[float] = deque(maxlen=BLOCK)
        self._copied: deque[Transfer] = deque(maxlen=SNAPSHOTS)
        self._written: deque[Transfer] = deque(maxlen=SNAPSHOTS)

    def observe(self, observed: ObservedIteration) -> None:
        """As :meth:`IntervalTuner.observe`; a transfer may be reported during the next snapshot."""
        super().observe(observed)
        for transfers, one in ((self._copied, observed.copied), (self._written, observed.written)):
            if one.bytes and one.seconds:
                transfers.append(one)

    def _add_undisturbed(self, observed: ObservedIteration) -> None:
        super()._add_undisturbed(observed)
        if observed.forward_backward_s > 0:
            self._forward_backward_s.append(observed.forward_backward_s)

    @property
    def choice(self) -> PecChoice | None:
        """The current choice; None before the first measurements, and without experts."""
        measured = self._measurements()
        return None if measured is None else _cached_choice(measured, self.limits)

    def _measurements(self) -> _Machine | None:
        if (
            not (self.busiest_rank_bytes and self._copied and self._written and self._forward_backward_s)
            or not self.iteration_s
        ):
            return None
        return (
            tuple(self.busiest_rank_bytes.items()),
            median(self._forward_backward_s),
            self.iteration_s,
            _median_bandwidth(self._copied),
            _median_bandwidth(self._written),
            0.0,  # the restart time does not depend on the choice
            self.iteration_s / self.mtbf_s,
        )

    @property
    def is_settled(self) -> bool:
        """Whether a choice exists."""
        return self.choice is not None

    @property
    def interval(self) -> int:
        """Iterations between snapshots, at least 1; provisional until :attr:`settled`."""
        choice = self.choice
        return BLOCK if choice is None else choice.interval

    def state_dict(self) -> dict[str, Any]:
        """Returns the measurements, without flags and sizes."""
        return super().state_dict() | {
            "forward_backward_s": list(self._forward_backward_s),
            "copied": [[one.bytes, one.seconds] for one in self._copied],
            "written": [[one.bytes, one.seconds] for one in self._written],
        }

    def loading(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """As :meth:`Interval.loading`."""
        stored, load_others = decode.convert_state(state, _StoredPecTuner, "a tuner"), super().loading(state)

        def load() -> None:
            load_others()
            self._forward_backward_s = deque(stored.forward_backward_s, maxlen=BLOCK)
            self._copied, self._written = (
                deque((Transfer(*one) for one in transfers), maxlen=SNAPSHOTS)
                for transfers in (stored.copied, stored.written)
            )

        return load


@dataclass(frozen=True)
class _StoredPecTuner:
    """Fields that this tuner adds to :class:`IntervalTuner`: seconds, and bytes and seconds of transfers."""

    forward_backward_s: tuple[decode.Positive, ...] = ()
    copied: tuple[tuple[decode.Positive, decode.Positive], ...] = ()
    written: tuple[tuple[decode.Positive, decode.Positive], ...] = ()


_Machine = tuple[tuple[tuple[int, int], ...], float, float, float, float, float, float]


@lru_cache(maxsize=BLOCKS)
def _cached_choice(machine: _Machine, limits: PecLimits) -> PecChoice:
    """Returns the choice for these measurements; cached, since every iteration needs it."""
    busiest, *rest = machine
    return choose_pec_settings(PecMeasurements(dict(busiest), *rest), limits)


def _median_bandwidth(transfers: deque[Transfer]) -> float:
    """Returns the median bandwidth in bytes per second."""
    return median(one.bytes / one.seconds for one in transfers)
