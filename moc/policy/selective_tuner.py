"""Measures the budgets of selective snapshots (MoEtion, section 4.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from moc.files import decode
from moc.policy.interval import Interval, Observed
from moc.policy.measurements import Measurements

_STALL = 0.03
"""Maximum share of training time for stalls if even the smallest snapshot does not hide."""

_CHANGED = 0.1
"""Relative change of a measurement that updates the budgets; smaller changes do not."""

_KEYS = Measurements().state_dict().keys()


class SelectiveTuner(Interval):
    """Measures how many bytes a snapshot may copy and send without delaying training.

    The first iterations are measured without a snapshot. The first snapshot has everything, and the next one waits
    until it is durable. From then on, every ``every``-th iteration takes one.

    Args:
        every: iterations between snapshots.
        figures: earlier measurements, named as in :attr:`Measurements.figures`; budgets use them until new ones are
            known.
        bubble_share: share of forward and backward in the pipeline's bubbles until they are timed, if copies hide
            there; by default they hide behind forward and backward.
        given: all budgets are given, so no snapshot waits for a measurement.
    """

    def __init__(
        self,
        every: int = 1,
        figures: Mapping[str, float] | None = None,
        bubble_share: float = 0.0,
        given: bool = False,
    ):
        self.every, self.bubble_share, self.given = every, bubble_share, given
        self._seen = Measurements()
        self._used: dict[str, float] = dict(figures or {})
        self._started = self._busy = False

    @property
    def apart(self) -> int:
        """As :attr:`Interval.apart`."""
        return self.every

    def observe(self, seen: Observed) -> None:
        """As :meth:`Interval.observe`."""
        self._seen.observe(seen)
        self._started, self._busy = self._started or seen.started, seen.busy
        now = self._seen.figures
        if any(abs(now[name] - self._used.get(name, 0.0)) > _CHANGED * now[name] for name in now):
            self._used = now

    def due(self, iteration: int) -> bool:
        """Returns True for every ``every``-th iteration once iterations and the first snapshot's cost are measured."""
        measured = "copy_rate" in self._used or not (self._started and self._busy)
        known = self.given or ("iteration_s" in self._used and measured)
        return iteration > 0 and iteration % self.every == 0 and known

    @property
    def local(self) -> float | None:
        """B_local: bytes that a rank copies to host memory while it computes; None until measured.

        The paper uses the whole iteration. Here training waits for the copy before the update, so only forward and
        backward count, or the pipeline's bubbles.
        """
        computing = self._computing
        if not self.bubble_share or computing is None:
            return computing
        bubble_s = self._used.get("bubble_s", self.bubble_share * self._used["forward_backward_s"])
        return min(computing, self._used["copy_rate"] * bubble_s)

    @property
    def _computing(self) -> float | None:
        """Bytes that a rank copies during forward and backward, including bubbles; None until measured."""
        if not {"copy_rate", "iteration_s"} <= self._used.keys():
            return None
        return self._used["copy_rate"] * self._used["forward_backward_s"]

    def remote(self, tier: str) -> float | None:
        """Returns B_remote per iteration: bytes that a node receives, or with tier ``disk`` that a rank writes.

        None until measured, and with tier ``memory``.
        """
        rate = {"peers": "replicate_rate", "disk": "write_rate"}.get(tier, "")
        if not {rate, "iteration_s"} <= self._used.keys():
            return None
        return self._used[rate] * self._used["iteration_s"]

    def stretched(self, least: float) -> int:
        """Returns the iterations between snapshots that keep stalls below 3 % of the training time; 1 if copies hide.

        Args:
            least: bytes of the busiest rank's smallest snapshot.
        """
        hidden = self._computing  # the rest is copied during computation if bubbles are too short
        if hidden is None or least <= hidden:
            return 1
        stall_s = (least - hidden) / self._used["copy_rate"]
        return math.ceil(stall_s / (_STALL * self._used["iteration_s"]))

    def state_dict(self) -> dict[str, Any]:
        """Returns all measurements, and the measurements that budgets use."""
        return self._seen.state_dict() | {"used": dict(self._used)}

    def loading(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """As :meth:`Interval.loading`; another tuner's state is ignored."""
        known = _KEYS <= decode.state(state, dict, "a tuner").keys()
        seen = Measurements.from_state(state) if known else Measurements()
        used = decode.state(state.get("used", {}), dict[str, decode.Positive], "a tuner") if known else {}

        def load() -> None:
            self._seen, self._used = seen, used
            self._started = self._busy = False

        return load
