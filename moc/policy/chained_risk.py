"""Computes tokens at risk with gradients in place of state: replays loads of experts through the policy's choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moc.policy.budgets import Sizes
from moc.policy.choice import Choice
from moc.policy.partial import Saves
from moc.policy.risk import Risk, lost_by_layer, of_iteration
from moc.policy.selection import Counts, Limit
from moc.policy.selective_state import minus
from moc.state.detail import Detail


@dataclass(frozen=True)
class ChainedRisk:
    """Tokens at risk and contents of snapshots of every iteration, as means over snapshots.

    Attributes:
        risk: momentary lost tokens.
        experts: experts of each layer in a snapshot, mean over layers.
        gradients: share of these experts whose gradients are saved.
    """

    risk: Risk
    experts: float
    gradients: float


def replay(loads: Sequence[Counts], limits: Sequence[Limit], sizes: Sizes, max_age: int, skipped: int) -> ChainedRisk:
    """Simulates a snapshot in every iteration, with experts ranked by tokens at risk per byte; starts from a full save.

    Args:
        loads: by iteration, tokens of each expert by layer; more iterations than ``skipped``.
        limits: the budget.
        sizes: sizes of states and gradients.
        max_age: iterations after which an expert, or the base of a chain, is saved first.
        skipped: number of first iterations whose snapshots do not count.
    """
    each, numbers = of_iteration(loads), {layer: len(row) for layer, row in loads[0].items()}
    saves, total, oldest = Saves({}, {}, {}), {layer: [0] * number for layer, number in numbers.items()}, 0
    saves.note(numbers, {place: Detail.FULL for place in sizes.experts}, 1, total)
    lost, chosen = [], []
    for iteration, now in enumerate(loads, 2):
        total = {layer: [a + b for a, b in zip(total[layer], row, strict=True)] for layer, row in now.items()}
        oldest = max(oldest, iteration - min(map(min, saves.at.values())))
        found = Choice(iteration, total, "per-byte", "tokens", max_age, True, sizes).choose(saves, limits)
        saves.note(numbers, found, iteration, total)
        if iteration > skipped + 1:
            lost.append(lost_by_layer(minus(total, saves.tokens), each))
            chosen.append(found.values())
    mlt, number = sum(map(sum, lost)) / len(lost), sum(map(len, chosen))
    chained = sum(detail is Detail.GRAD for details in chosen for detail in details)
    risk = Risk(mlt, mlt / max(1, len(lost[0])), oldest)
    return ChainedRisk(risk, number / len(chosen) / len(numbers), chained / max(1, number))


def alike(loads: Counts, gradient: float) -> Sizes:
    """Returns sizes of equally large experts on a single rank.

    Args:
        loads: defines layers and experts.
        gradient: bytes of gradients relative to a state.
    """
    unit = 1000
    places = [(layer, expert) for layer, row in loads.items() for expert in range(len(row))]
    states, gradients = (dict.fromkeys(places, {0: nbytes}) for nbytes in (unit, round(unit * gradient)))
    return Sizes({}, states, (0,), 0, gradients)
