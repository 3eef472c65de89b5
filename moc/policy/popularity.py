"""Computes popularity and skewness of experts (MoEvement, section 3.5, Appendices B and D)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from moc.policy.errors import PolicyError

Scores = Mapping[int, Sequence[float]]
"""Popularity of each expert by layer: tokens, or any quantity that orders like tokens."""

CHANGE, OF_EXPERTS = 0.10, 0.25
"""Relative change of frequency, and share of experts that must exceed it, for a reordering (section 3.5)."""


def frequencies(scores: Scores) -> dict[int, list[float]]:
    """Returns each expert's share of its layer's total, by layer; zeros if the total is zero."""
    shares = {}
    for layer, row in scores.items():
        total = sum(row)
        shares[layer] = [score / total if total else 0.0 for score in row]
    return shares


def has_changed(before: Scores, now: Scores) -> bool:
    """Returns whether activation frequencies differ by more than 10 % for at least 25 % of experts (section 3.5).

    Args:
        before: :func:`frequencies` at the last reordering.
        now: current frequencies, with the same layers and experts.
    """
    pairs = [pair for layer in before for pair in zip(before[layer], now[layer], strict=True)]
    changed = sum(abs(new - old) > CHANGE * old for old, new in pairs)
    return bool(pairs) and changed >= OF_EXPERTS * len(pairs)


def decayed(mean: Scores, counts: Scores, alpha: float) -> dict[int, list[float]]:
    """Returns the time-decayed popularity A(t) = alpha A(t-1) + (1 - alpha) counts of an iteration (Appendix B).

    Args:
        mean: A(t-1); empty before the first iteration.
        counts: tokens of this iteration.
        alpha: weight of the previous value, from 0 to 1.
    """
    nothing = {layer: [0.0] * len(row) for layer, row in counts.items()}
    return {
        layer: [alpha * old + (1 - alpha) * new for old, new in zip((mean or nothing)[layer], row, strict=True)]
        for layer, row in counts.items()
    }


def relative(scores: Scores, capacities: Scores) -> dict[int, list[float]]:
    """Returns popularity relative to each expert's capacity, A / C (Appendix B, capacity-aware ordering)."""
    return {layer: [a / c for a, c in zip(row, capacities[layer], strict=True)] for layer, row in scores.items()}


def hhi(counts: Sequence[float]) -> float:
    """Returns the Herfindahl-Hirschman index of a layer: the sum of squared shares of its experts (Appendix D).

    Raises:
        ValueError: the layer has no tokens.
    """
    total = sum(counts)
    if not total > 0:
        raise PolicyError(
            "no expert of this layer was given a token. Fix: count tokens first",
            code="counts-misfit",
        )
    return sum((count / total) ** 2 for count in counts)


def skewness(counts: Sequence[float]) -> float:
    """Returns S of Appendix D, from 0 (all experts of a layer are equally busy) to 1 (one expert has all tokens).

    Raises:
        ValueError: there are fewer than two experts, or no token.
    """
    if len(counts) < 2:
        raise PolicyError(
            f"skewness is between experts, and there is {len(counts)}. Fix: count the tokens of two experts or more",
            code="counts-misfit",
        )
    least = 1 / len(counts)
    return (hhi(counts) - least) / (1 - least)


def skew_gauges(counts: Scores) -> dict[str, float]:
    """Returns mean ``hhi`` and ``skewness`` of an iteration, over the layers with several experts and any tokens."""
    rows = [row for row in counts.values() if len(row) > 1 and sum(row) > 0]
    if not rows:
        return {}
    return {"hhi": fmean(map(hhi, rows)), "skewness": fmean(map(skewness, rows))}
