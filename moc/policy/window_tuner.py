"""Measurements that a sparse window is chosen from: the time that a copy can overlap, and copy bandwidth."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from moc.policy.interval import BLOCK, SNAPSHOTS, WARM_UP, Interval, Observed


class WindowTuner(Interval):
    """Measures while training runs (the profiler of MoEvement's Algorithm 1, line 8).

    The first ``WARM_UP`` iterations are skipped and ``BLOCK`` are measured without a snapshot; from then on every
    iteration takes one.  The window follows from medians of recent values: the time from the start of an iteration to
    its vote, which a copy can overlap, and copy bandwidth.  The paper uses the whole iteration for the former, though
    training waits for a copy before the update.
    """

    def __init__(self):
        self._passed_over = 0
        self._seconds: deque[float] = deque(maxlen=BLOCK)
        self._bandwidths: deque[float] = deque(maxlen=SNAPSHOTS)

    def observe(self, seen: Observed) -> None:
        """As :meth:`Interval.observe`."""
        if seen.copied.bytes and seen.copied.seconds:
            self._bandwidths.append(seen.copied.bytes / seen.copied.seconds)
        if self._passed_over < WARM_UP:
            self._passed_over += 1
        elif seen.forward_backward_s > 0:
            self._seconds.append(seen.forward_backward_s)

    def due(self, iteration: int) -> bool:
        """True for every iteration once enough of them are measured."""
        return iteration > 0 and len(self._seconds) == BLOCK

    @property
    def seconds(self) -> float | None:
        """Seconds that a copy can overlap; None until measured."""
        return median(self._seconds) if self._seconds else None

    @property
    def bandwidth(self) -> float | None:
        """Copy bandwidth of a rank in bytes per second; None until measured."""
        return median(self._bandwidths) if self._bandwidths else None

    def state_dict(self) -> dict[str, Any]:
        """The measurements."""
        return {"forward_backward_s": list(self._seconds), "bandwidths": list(self._bandwidths)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`Interval.load_state_dict`; of another tuner's state, the common fields are used."""
        try:
            seconds, bandwidths = ([float(x) for x in state.get(k, ())] for k in ("forward_backward_s", "bandwidths"))
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"this is no state of a tuner: {state!r}; start without it") from error
        self._seconds, self._bandwidths = deque(seconds, maxlen=BLOCK), deque(bandwidths, maxlen=SNAPSHOTS)
        self._passed_over = 0
