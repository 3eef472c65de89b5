"""What a sparse window is chosen by: how long an iteration leaves a copy to itself, and how fast copies are."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from moc.policy.interval import BLOCK, SNAPSHOTS, WARM_UP, Interval, Observed


class WindowTuner(Interval):
    """Measures while training runs (the profiler of MoEvement's Algorithm 1, line 8).

    The first ``WARM_UP`` iterations are passed over and ``BLOCK`` measured without a snapshot; from then on there is
    one in every iteration.  What counts are medians of what was seen last: of the time from the begin of an iteration
    to its vote, which is what a copy can hide behind, and of the bandwidth of copies.  The paper takes the whole
    iteration for the former, though training waits for a copy before the update.
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
        """In every iteration, as soon as enough of them were measured."""
        return iteration > 0 and len(self._seconds) == BLOCK

    @property
    def seconds(self) -> float | None:
        """What a copy can hide behind; None while not known."""
        return median(self._seconds) if self._seconds else None

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of a rank; None while not known."""
        return median(self._bandwidths) if self._bandwidths else None

    def state_dict(self) -> dict[str, Any]:
        """What was measured."""
        return {"forward_backward_s": list(self._seconds), "bandwidths": list(self._bandwidths)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`Interval.load_state_dict`; the state of another tuner serves as far as it goes."""
        try:
            seconds, bandwidths = ([float(x) for x in state.get(k, ())] for k in ("forward_backward_s", "bandwidths"))
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"this is no state of a tuner: {state!r}; start without it") from error
        self._seconds, self._bandwidths = deque(seconds, maxlen=BLOCK), deque(bandwidths, maxlen=SNAPSHOTS)
        self._passed_over = 0
