"""Measures a run's machine and faults, as input of its plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from moc.files import decode
from moc.policy.interval import BLOCK, BLOCKS, WARM_UP, Observed, Transfer

UNDISTURBED_MTBF_S = 86400.0
"""Prior mean time between failures in seconds: as if the run had already seen one fault in that time."""

_TRANSFERS = ("copied", "written", "replicated")


class Measurements:
    """Medians of recent measurements; identical on every rank that receives the same observations.

    The first ``WARM_UP`` iterations after each start are skipped. Iteration times exclude stalls but include the
    slowdown by snapshots: with a snapshot in every iteration, all are disturbed.

    Args:
        trained_s: seconds of all iterations since the job began.
        faults: faults that the job has seen.
    """

    def __init__(self, trained_s: float = 0.0, faults: int = 0):
        self.trained_s, self.faults = trained_s, faults
        self._passed_over = 0
        self._iteration_s: deque[float] = deque(maxlen=BLOCK * BLOCKS)
        self._forward_backward_s: deque[float] = deque(maxlen=BLOCK * BLOCKS)
        self._bubble_s: deque[float] = deque(maxlen=BLOCK * BLOCKS)
        self._transfers: dict[str, deque[Transfer]] = {name: deque(maxlen=BLOCK) for name in _TRANSFERS}

    def observe(self, seen: Observed) -> None:
        """Records the measurements of one iteration."""
        self.trained_s += seen.iteration_s
        for name, transfers in self._transfers.items():
            one = getattr(seen, name)
            if one.bytes and one.seconds:
                transfers.append(one)
        self._passed_over += 1
        if self._passed_over <= WARM_UP:
            return
        self._iteration_s.append(max(0.0, seen.iteration_s - seen.stall_s))
        if seen.forward_backward_s > 0:
            self._forward_backward_s.append(seen.forward_backward_s)
        if seen.bubble_s > 0:
            self._bubble_s.append(seen.bubble_s)

    @property
    def figures(self) -> dict[str, float]:
        """The figures known so far, by name.

        ``iteration_s``, ``forward_backward_s`` and ``bubble_s`` are in seconds. Rates are in bytes per second:

        * ``copy_rate``: of a rank to host memory,
        * ``write_rate``: of a rank to storage while all write,
        * ``replicate_rate``: of a node from others.
        """
        rates = zip(("copy_rate", "write_rate", "replicate_rate"), self._transfers.values(), strict=True)
        found = {name: median(one.bytes / one.seconds for one in seen) for name, seen in rates if seen}
        if len(self._forward_backward_s) >= BLOCK:
            found["iteration_s"] = median(self._iteration_s)
            found["forward_backward_s"] = min(found["iteration_s"], median(self._forward_backward_s))
        if len(self._bubble_s) >= BLOCK:
            found["bubble_s"] = median(self._bubble_s)
        return found

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the job in seconds, estimated from the faults so far."""
        return (UNDISTURBED_MTBF_S + self.trained_s) / (1 + self.faults)

    def state_dict(self) -> dict[str, Any]:
        """Returns all measurements as JSON-compatible values."""
        transfers = {name: [[one.bytes, one.seconds] for one in seen] for name, seen in self._transfers.items()}
        times = {"iteration_s": list(self._iteration_s), "forward_backward_s": list(self._forward_backward_s)}
        times |= {"bubble_s": list(self._bubble_s)} if self._bubble_s else {}
        return {"trained_s": self.trained_s, "faults": self.faults} | times | transfers

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Measurements:
        """Restores a :meth:`state_dict`; the first iterations are skipped again.

        Raises:
            ValueError: the state is not from :meth:`state_dict`.
        """
        stored = decode.state(state, _Stored, "the measurements of a run")
        measured = cls(stored.trained_s, stored.faults)
        measured._iteration_s.extend(stored.iteration_s)
        measured._forward_backward_s.extend(stored.forward_backward_s)
        measured._bubble_s.extend(stored.bubble_s)
        for name, seen in measured._transfers.items():
            seen.extend(Transfer(amount, seconds) for amount, seconds in getattr(stored, name))
        return measured


_Transfers = tuple[tuple[decode.Positive, decode.Positive], ...]


@dataclass(frozen=True)
class _Stored:
    """State of measurements: seconds, and bytes and seconds of each transfer."""

    trained_s: decode.Seconds
    faults: decode.Count
    iteration_s: tuple[decode.Seconds, ...]
    forward_backward_s: tuple[decode.Positive, ...]
    copied: _Transfers
    written: _Transfers
    replicated: _Transfers
    bubble_s: tuple[decode.Positive, ...] = ()
