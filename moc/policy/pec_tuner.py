"""Chooses K_snapshot, K_persist and the interval together, from measurements during training."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any

from moc.files import decode
from moc.policy.adaptive import Measured, TunedSettings, TuningLimits, choose
from moc.policy.interval import BLOCK, BLOCKS, SNAPSHOTS, IntervalTuner, Observed, Transfer


class PecTuner(IntervalTuner):
    """Measures as :class:`IntervalTuner`, and uses :func:`~moc.policy.adaptive.choose` (MoC, section 5.3).

    The first snapshot is full. It follows the same number of undisturbed iterations, and measures copy and write
    bandwidth. From then on, K and interval follow from the medians of recent measurements. A snapshot starts only when
    the previous one is in storage.

    Args:
        limits: constraints of the choice.
        mtbf_s: mean time between failures of the job in seconds.
    """

    def __init__(self, limits: TuningLimits, mtbf_s: float):
        super().__init__()
        self.limits, self.mtbf_s = limits, mtbf_s
        self.busiest: Mapping[int, int] = {}
        """Bytes of the busiest rank, by K; set before training."""
        self._forward_backward_s: deque[float] = deque(maxlen=BLOCK)
        self._copied: deque[Transfer] = deque(maxlen=SNAPSHOTS)
        self._written: deque[Transfer] = deque(maxlen=SNAPSHOTS)

    def observe(self, seen: Observed) -> None:
        """As :meth:`IntervalTuner.observe`; a transfer may be reported during the next snapshot."""
        super().observe(seen)
        for transfers, one in ((self._copied, seen.copied), (self._written, seen.written)):
            if one.bytes and one.seconds:
                transfers.append(one)

    def _count_undisturbed(self, seen: Observed) -> None:
        super()._count_undisturbed(seen)
        if seen.forward_backward_s > 0:
            self._forward_backward_s.append(seen.forward_backward_s)

    @property
    def choice(self) -> TunedSettings | None:
        """The current choice; None before the first measurements, and without experts."""
        measured = self._measured_machine()
        return None if measured is None else _chosen(measured, self.limits)

    def _measured_machine(self) -> _Machine | None:
        if not (self.busiest and self._copied and self._written and self._forward_backward_s) or not self.iteration_s:
            return None
        return (
            tuple(self.busiest.items()),
            median(self._forward_backward_s),
            self.iteration_s,
            _bandwidth(self._copied),
            _bandwidth(self._written),
            0.0,  # the restart time does not depend on the choice
            self.iteration_s / self.mtbf_s,
        )

    @property
    def settled(self) -> bool:
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
        stored, load_others = decode.state(state, _Stored, "a tuner"), super().loading(state)

        def load() -> None:
            load_others()
            self._forward_backward_s = deque(stored.forward_backward_s, maxlen=BLOCK)
            self._copied, self._written = (
                deque((Transfer(*one) for one in transfers), maxlen=SNAPSHOTS)
                for transfers in (stored.copied, stored.written)
            )

        return load


@dataclass(frozen=True)
class _Stored:
    """Fields that this tuner adds to :class:`IntervalTuner`: seconds, and bytes and seconds of transfers."""

    forward_backward_s: tuple[decode.Positive, ...] = ()
    copied: tuple[tuple[decode.Positive, decode.Positive], ...] = ()
    written: tuple[tuple[decode.Positive, decode.Positive], ...] = ()


_Machine = tuple[tuple[tuple[int, int], ...], float, float, float, float, float, float]


@lru_cache(maxsize=BLOCKS)
def _chosen(machine: _Machine, limits: TuningLimits) -> TunedSettings:
    """Returns the choice for these measurements; cached, since every iteration needs it."""
    busiest, *rest = machine
    return choose(Measured(dict(busiest), *rest), limits)


def _bandwidth(transfers: deque[Transfer]) -> float:
    """Returns the median bandwidth in bytes per second."""
    return median(one.bytes / one.seconds for one in transfers)
