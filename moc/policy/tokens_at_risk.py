"""Computes the tokens at risk under selective snapshots.

Replays loads of experts through selection rules, or through the policy's choice with gradients in place of state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from moc.policy.errors import PolicyError
from moc.policy.expert_selection import (
    CountsByLayer,
    ExpertsByLayer,
    ExpertSizes,
    Limit,
    lost_tokens_by_layer,
    per_byte,
    proportional,
    scores,
    steady_risk,
)
from moc.policy.partial import SavedVersions
from moc.policy.pec_selection import sequential_experts
from moc.policy.selective_choice import ExpertChoice, subtract_counts
from moc.state.operators import Detail

SelectionRule = Callable[[CountsByLayer, CountsByLayer, int], ExpertsByLayer]
"""Selects a snapshot's experts by tokens and iterations since each one's last save, and the snapshot's index from 0."""


@dataclass(frozen=True)
class TokensAtRisk:
    """Momentary lost tokens (MoEtion, eq. 6): the loss of a fault right after a snapshot, as a mean over snapshots.

    Attributes:
        mlt: the sum over layers, each in units of its tokens per iteration.
        mlt_per_layer: the mean over layers: tokens at risk, in iterations.
        oldest: maximum number of iterations between two snapshots of an expert.
    """

    mlt: float
    mlt_per_layer: float
    oldest: int


def tokens_per_iteration(loads: Sequence[CountsByLayer]) -> dict[int, float]:
    """Returns the tokens of an iteration by layer: the mean over iterations (at least one)."""
    return {layer: sum(sum(row[layer]) for row in loads) / len(loads) for layer in loads[0]}


def selection_rules(limits: Sequence[Limit], max_age: int) -> dict[str, SelectionRule]:
    """Returns the rules by name: per byte with either score, also without age limit, Algorithm 1, and in turn.

    Args:
        limits: the budget; for the rule in turn, only its S_total counts.
        max_age: as in :func:`per_byte`.
    """

    def by_score(kind: str, max_age: float) -> SelectionRule:
        return lambda unsaved, ages, _: per_byte(scores(unsaved, ages, kind), ages, max_age, limits)

    total = min(limit.expert_count() for limit in limits)
    return {
        "per-byte, tokens-age": by_score("tokens-age", max_age),
        "per-byte, tokens-age, any age": by_score("tokens-age", math.inf),
        "per-byte, tokens": by_score("tokens", max_age),
        "proportional (Algorithm 1)": lambda unsaved, ages, _: proportional(unsaved, limits),
        "in turn": lambda unsaved, ages, snapshot: experts_in_turn(unsaved, total, snapshot),
    }


def experts_in_turn(table: CountsByLayer, total: int, snapshot: int) -> ExpertsByLayer:
    """Returns the next ``total`` experts on a circle where neighbours belong to different layers.

    Args:
        table: defines layers and experts; its values do not matter.
        total: experts in a snapshot.
        snapshot: index of the snapshot, from 0.
    """
    circle = sorted(((layer, expert) for layer, row in table.items() for expert in range(len(row))), key=lambda p: p[1])
    number = min(total, len(circle))
    chosen = (
        {circle[position] for position in sequential_experts(snapshot, 0, number, len(circle), 1)} if number else set()
    )
    return {layer: [expert for expert in range(len(row)) if (layer, expert) in chosen] for layer, row in table.items()}


def replay_loads(
    loads: Sequence[CountsByLayer], choose: SelectionRule, interval: int = 1, skipped: int = 0
) -> TokensAtRisk:
    """Simulates a snapshot of selected experts every ``interval`` iterations; starts from a full save.

    Args:
        loads: by iteration, tokens of each expert by layer.
        choose: the rule.
        interval: iterations between snapshots.
        skipped: number of first iterations whose snapshots do not count.

    Raises:
        ValueError: no snapshot is left to count.
    """
    if len(loads) // interval * interval <= skipped:
        raise PolicyError(
            f"of {len(loads)} iterations, no snapshot counts with one every {interval} after {skipped}. Fix: simulate "
            "more iterations, or lower the interval",
            code="interval-invalid",
        )
    each = tokens_per_iteration(loads)
    unsaved = {layer: [0] * len(row) for layer, row in loads[0].items()}
    ages = {layer: list(row) for layer, row in unsaved.items()}
    lost, oldest = [], 0
    for iteration, load in enumerate(loads, 1):
        for layer, row in load.items():
            unsaved[layer] = [before + tokens for before, tokens in zip(unsaved[layer], row, strict=True)]
            ages[layer] = [age + 1 for age in ages[layer]]
        oldest = max(oldest, max(map(max, ages.values())))
        if iteration % interval:
            continue
        for layer, experts in choose(unsaved, ages, iteration // interval - 1).items():
            for expert in experts:
                unsaved[layer][expert] = ages[layer][expert] = 0
        if iteration > skipped:
            lost.append(lost_tokens_by_layer(unsaved, each))
    mlt = sum(map(sum, lost)) / len(lost)
    return TokensAtRisk(mlt, mlt / max(1, len(lost[0])), oldest)


def risk_by_share(loads: Sequence[CountsByLayer]) -> Callable[[float, float], float] | None:
    """Returns :func:`steady_risk_per_layer` by the share of experts in a snapshot and ``always``.

    Returns None if some layer has received no tokens.
    """
    if not loads or not loads[0] or not all(tokens_per_iteration(loads).values()):
        return None
    number = sum(map(len, loads[0].values()))
    return cache(lambda share, always: steady_risk_per_layer(loads, share * number, always=always))


def steady_risk_per_layer(
    loads: Sequence[CountsByLayer], total: float, interval: int = 1, always: float = 1.0
) -> float:
    """Returns :func:`steady_risk` per layer in iterations: the mean over iterations, each with constant loads.

    Args:
        loads: by iteration, tokens of each expert by layer.
        total: experts in a snapshot, over all layers.
        interval: iterations between snapshots.
        always: as in :func:`steady_risk`.
    """
    each = {layer: tokens for layer, tokens in tokens_per_iteration(loads).items() if tokens > 0}
    risks = [
        steady_risk([interval * tokens / each[layer] for layer in each for tokens in load[layer]], total, always)
        for load in loads
    ]
    return sum(risks) / len(risks) / max(1, len(each))


@dataclass(frozen=True)
class ChainedRisk:
    """Tokens at risk and contents of snapshots of every iteration, as means over snapshots.

    Attributes:
        risk: momentary lost tokens.
        experts: experts of each layer in a snapshot, mean over layers.
        gradients: share of these experts whose gradients are saved.
    """

    risk: TokensAtRisk
    experts: float
    gradients: float


def replay_chains(
    loads: Sequence[CountsByLayer], limits: Sequence[Limit], sizes: ExpertSizes, max_age: int, skipped: int
) -> ChainedRisk:
    """Simulates a snapshot in every iteration, with experts ranked by tokens at risk per byte; starts from a full save.

    Args:
        loads: by iteration, tokens of each expert by layer; more iterations than ``skipped``.
        limits: the budget.
        sizes: sizes of states and gradients.
        max_age: iterations after which an expert, or the base of a chain, is saved first.
        skipped: number of first iterations whose snapshots do not count.
    """
    each, numbers = tokens_per_iteration(loads), {layer: len(row) for layer, row in loads[0].items()}
    saves, total, oldest = SavedVersions({}, {}, {}), {layer: [0] * number for layer, number in numbers.items()}, 0
    saves.record(numbers, {expert_id: Detail.FULL for expert_id in sizes.experts}, 1, total)
    lost, chosen = [], []
    for iteration, load in enumerate(loads, 2):
        total = {layer: [a + b for a, b in zip(total[layer], row, strict=True)] for layer, row in load.items()}
        oldest = max(oldest, iteration - min(map(min, saves.at.values())))
        details = ExpertChoice(iteration, total, "per-byte", "tokens", max_age, True, sizes).choose(saves, limits)
        saves.record(numbers, details, iteration, total)
        if iteration > skipped + 1:
            lost.append(lost_tokens_by_layer(subtract_counts(total, saves.tokens), each))
            chosen.append(details.values())
    mlt, number = sum(map(sum, lost)) / len(lost), sum(map(len, chosen))
    chained = sum(detail is Detail.GRAD for details in chosen for detail in details)
    risk = TokensAtRisk(mlt, mlt / max(1, len(lost[0])), oldest)
    return ChainedRisk(risk, number / len(chosen) / len(numbers), chained / max(1, number))


def equal_sizes(loads: CountsByLayer, gradient: float) -> ExpertSizes:
    """Returns sizes of equally large experts on a single rank.

    Args:
        loads: defines layers and experts.
        gradient: bytes of gradients relative to a state.
    """
    unit = 1000
    places = [(layer, expert) for layer, row in loads.items() for expert in range(len(row))]
    states, gradients = (dict.fromkeys(places, {0: nbytes}) for nbytes in (unit, round(unit * gradient)))
    return ExpertSizes({}, states, (0,), 0, gradients)
