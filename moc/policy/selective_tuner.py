"""Measures the budgets of selective snapshots (MoEtion, section 4.2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moc.policy.interval import Interval, Observed
from moc.policy.measurements import Measurements

_STALL = 0.03
"""Largest share of the training time that snapshots may cost where not even the smallest hides."""

_KEYS = Measurements().state_dict().keys()


class SelectiveTuner(Interval):
    """Measures how many bytes a snapshot may copy and send unnoticed.

    The first iterations are measured without a snapshot; the first snapshot is of everything, and the next one waits
    until that one is safe.  From then on every ``every``-th iteration takes one.

    Args:
        every: iterations between snapshots.
    """

    def __init__(self, every: int = 1):
        self.every = every
        self._seen = Measurements()
        self._started = self._busy = False

    def observe(self, seen: Observed) -> None:
        """As :meth:`Interval.observe`."""
        self._seen.observe(seen)
        self._started, self._busy = self._started or seen.started, seen.busy

    def due(self, iteration: int) -> bool:
        """True for every ``every``-th iteration once iterations, and the cost of the first snapshot, are measured."""
        figures = self._seen.figures
        measured = "copy_rate" in figures or not (self._started and self._busy)
        return iteration > 0 and iteration % self.every == 0 and "iteration_s" in figures and measured

    @property
    def local(self) -> float | None:
        """B_local: bytes that a rank copies to host memory while it computes; None until measured.

        The paper has the whole iteration for it; training waits for the copy before the update, so here it is the time
        of forward and backward.
        """
        figures = self._seen.figures
        if "copy_rate" not in figures or "iteration_s" not in figures:
            return None
        return figures["copy_rate"] * figures["forward_backward_s"]

    def remote(self, tier: str) -> float | None:
        """B_remote per iteration: bytes that a node receives from others, or with tier ``disk`` that a rank writes.

        None until measured, and with tier ``memory``.
        """
        figures, rate = self._seen.figures, {"peers": "replicate_rate", "disk": "write_rate"}.get(tier, "")
        if rate not in figures or "iteration_s" not in figures:
            return None
        return figures[rate] * figures["iteration_s"]

    def stretched(self, least: float) -> int:
        """Iterations between snapshots that do not hide, so that stalls stay below 3 % of the training time.

        Args:
            least: bytes of the busiest rank's smallest snapshot.
        """
        if self.local is None or least <= self.local:
            return 1
        figures = self._seen.figures
        return math.ceil((least - self.local) / figures["copy_rate"] / (_STALL * figures["iteration_s"]))

    def state_dict(self) -> dict[str, Any]:
        """The measurements."""
        return self._seen.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`Interval.load_state_dict`; another tuner's state is ignored."""
        if not isinstance(state, Mapping):
            raise ValueError(f"this is no state of a tuner: {state!r}; start without it")
        self._seen = Measurements.from_state(state) if _KEYS <= state.keys() else Measurements()
        self._started = self._busy = False
