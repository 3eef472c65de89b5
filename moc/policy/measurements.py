"""What a run has measured of its machine and its faults: what a plan for it is made from."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from moc.policy.interval import BLOCK, BLOCKS, WARM_UP, Observed, Transfer

UNDISTURBED_MTBF_S = 86400.0
"""Seconds from one fault to the next as long as nothing is known: a run begins as if it had seen one in so many."""

_TRANSFERS = ("copied", "written", "replicated")


class Measurements:
    """Medians of what was seen last; the same on every rank, as long as every rank is told the same.

    The first ``WARM_UP`` iterations after each start are passed over.  Of the others, the time without stalls counts:
    where there is a snapshot in each iteration none is undisturbed, so what a snapshot slows down is in it.

    Args:
        trained_s: seconds of all iterations since the job began.
        faults: that the job has seen.
    """

    def __init__(self, trained_s: float = 0.0, faults: int = 0):
        self.trained_s, self.faults = trained_s, faults
        self._passed_over = 0
        self._iteration_s: deque[float] = deque(maxlen=BLOCK * BLOCKS)
        self._forward_backward_s: deque[float] = deque(maxlen=BLOCK * BLOCKS)
        self._transfers: dict[str, deque[Transfer]] = {name: deque(maxlen=BLOCK) for name in _TRANSFERS}

    def observe(self, seen: Observed) -> None:
        """Learns what one iteration has shown."""
        self.trained_s += seen.iteration_s
        for name, transfers in self._transfers.items():
            one = getattr(seen, name)
            if one.bytes and one.seconds:
                transfers.append(one)
        if self._passed_over < WARM_UP:
            self._passed_over += 1
            return
        self._iteration_s.append(max(0.0, seen.iteration_s - seen.stall_s))
        if seen.forward_backward_s > 0:
            self._forward_backward_s.append(seen.forward_backward_s)

    @property
    def figures(self) -> dict[str, float]:
        """What is known so far, by name.

        ``iteration_s`` and ``forward_backward_s``, seconds; ``copy_rate``, bytes per second from a rank to host memory,
        ``write_rate``, of a rank to storage when all write, ``replicate_rate``, of a node from others.
        """
        rates = zip(("copy_rate", "write_rate", "replicate_rate"), self._transfers.values(), strict=True)
        found = {name: median(one.bytes / one.seconds for one in seen) for name, seen in rates if seen}
        if len(self._forward_backward_s) >= BLOCK:
            found["iteration_s"] = median(self._iteration_s)
            found["forward_backward_s"] = min(found["iteration_s"], median(self._forward_backward_s))
        return found

    @property
    def mtbf_s(self) -> float:
        """Seconds from one fault of the job to the next, as far as it can be told from those so far."""
        return (UNDISTURBED_MTBF_S + self.trained_s) / (1 + self.faults)

    def state_dict(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        transfers = {name: [[one.bytes, one.seconds] for one in seen] for name, seen in self._transfers.items()}
        times = {"iteration_s": list(self._iteration_s), "forward_backward_s": list(self._forward_backward_s)}
        return {"trained_s": self.trained_s, "faults": self.faults} | times | transfers

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Measurements:
        """From :meth:`state_dict`; the first iterations are passed over again.

        Raises:
            ValueError: this is no such state.
        """
        try:
            measured = cls(float(state["trained_s"]), int(state["faults"]))
            measured._iteration_s.extend(map(float, state["iteration_s"]))
            measured._forward_backward_s.extend(map(float, state["forward_backward_s"]))
            for name, seen in measured._transfers.items():
                seen.extend(Transfer(float(amount), float(seconds)) for amount, seconds in state[name])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"these are no measurements of a run: {state!r}; start without them") from error
        return measured
