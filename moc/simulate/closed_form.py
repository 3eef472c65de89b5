"""Computes ETTR in closed form, and its maximizing checkpoint interval (MoEvement, section 2.4 and Appendix C)."""

from __future__ import annotations

import dataclasses
import math

from moc.simulate import SimulationError
from moc.simulate.policy_costs import SimulatedCosts


def recovery_s(saving: SimulatedCosts) -> float:
    """Returns E[R]: mean seconds from a failure until the run has regained its position.

    A failure falls uniformly between two checkpoints, so half an interval and the lag are replayed: I / 2 for dense
    checkpoints, 3/2 W for a sparse window (section 3.6).
    """
    return saving.restart_s + saving.replay_total_s(saving.lag + saving.interval / 2)


def expected_ettr(saving: SimulatedCosts, iteration_s: float, mtbf_s: float) -> float:
    """Returns the useful share of time: 1 / (1 + overhead) x 1 / (1 + E[R] / MTBF).

    It assumes that failures are so rare that none falls into a recovery.  An infinite MTBF means no failures.
    """
    overhead = saving.per_iteration_s() / iteration_s
    recovery = 0.0 if math.isinf(mtbf_s) else recovery_s(saving) / mtbf_s
    return 1 / (1 + overhead) / (1 + recovery)


def best_interval(saving: SimulatedCosts, iteration_s: float, mtbf_s: float, at_least: int = 1) -> int:
    """Returns the interval in iterations with the highest expected ETTR; near Young's sqrt(2 x stall x MTBF).

    ``saving`` is a policy with global rollback, at any interval; ``at_least`` is a checkpoint's own duration.
    """
    young = math.sqrt(2 * saving.stall_s * mtbf_s) / iteration_s
    if not math.isfinite(young):
        raise SimulationError(
            "without failures no interval is best: the longer the better. Fix: give a finite MTBF",
            code="interval-unlimited",
        )

    def ettr(interval: int) -> float:
        return expected_ettr(at_interval(saving, interval, iteration_s), iteration_s, mtbf_s)

    # 1 / ETTR is a + b n + c / n + d / n^2 with positive coefficients: it falls, then rises.
    low, high = at_least, max(at_least, math.ceil(4 * young))
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if ettr(middle + 1) > ettr(middle) else (low, middle)
    return low


def at_interval(saving: SimulatedCosts, interval: int, iteration_s: float) -> SimulatedCosts:
    """Returns the same policy at another interval; with global rollback, checkpoints during replay take time, too."""
    slower = saving.replay_s / (iteration_s + saving.per_iteration_s())
    replay_s = slower * (iteration_s + saving.stall_s / interval)
    return dataclasses.replace(saving, interval=interval, replay_s=replay_s)


def longest(least: int, best: int, plt_per_iteration: float, limit: float) -> int:
    """Returns the longest interval up to ``best`` within a limit on lost tokens, and not below ``least``.

    The expected proportion of lost tokens is ``plt_per_iteration`` times the interval.
    """
    return max(least, min(best, int(limit / plt_per_iteration))) if plt_per_iteration > 0 else best


def capped_interval(stall_s: float, iteration_s: float, cap: float, at_least: int = 1) -> int:
    """Returns CheckFreq's interval: the shortest whose stalls stay within a share of time (MoEvement, section 5.2)."""
    if not cap > 0:
        raise SimulationError(
            f"a cap of {cap} on the overhead leaves no interval. Fix: give one above 0, such as 0.03",
            code="value-out-of-range",
        )
    return max(at_least, math.ceil(stall_s / (cap * iteration_s)))
